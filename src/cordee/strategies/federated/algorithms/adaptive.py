"""The adaptive optimizers of a server (Reddi et al. 2021): without bias correction, and with a large epsilon, `tau`.

torch's Adam and Adagrad are other formulas: theirs divide by what is left of a first moment after few steps, which the
paper leaves out since rounds are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cordee.core.errors import JobError
from cordee.strategies.federated.algorithms.algorithm import Algorithm

Second = Callable[[Tensor, Tensor, float], None]  # changes the second moment in place; its mean, the gradient², beta2


class _Adaptive(Optimizer):
    """m ← beta1 · m + (1 − beta1) · g; v by `_second`; w ← w − lr · m / (√v + tau)."""

    _second: Second

    def __init__(self, params: Iterable[Tensor], lr: float, beta1: float, beta2: float, tau: float) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["first"] = torch.zeros_like(parameter)
                    state["second"] = torch.full_like(parameter, group["tau"] ** 2)
                gradient = parameter.grad
                state["first"].mul_(group["beta1"]).add_(gradient, alpha=1 - group["beta1"])
                type(self)._second(state["second"], gradient * gradient, group["beta2"])
                parameter.addcdiv_(state["first"], state["second"].sqrt() + group["tau"], value=-group["lr"])


def _adam(second: Tensor, square: Tensor, beta2: float) -> None:
    second.mul_(beta2).add_(square, alpha=1 - beta2)


def _yogi(second: Tensor, square: Tensor, beta2: float) -> None:
    second.sub_(square * torch.sign(second - square), alpha=1 - beta2)


def _adagrad(second: Tensor, square: Tensor, beta2: float) -> None:
    second.add_(square)


class ServerAdam(_Adaptive):
    _second = staticmethod(_adam)


class ServerYogi(_Adaptive):
    _second = staticmethod(_yogi)


class ServerAdagrad(_Adaptive):
    _second = staticmethod(_adagrad)


def adaptive(optimizer: type[_Adaptive], server_lr: float, beta1: float, beta2: float, tau: float) -> Algorithm:
    """Return FedAvg with one of these optimizers on the server. Raises JobError."""
    if not (server_lr > 0 and tau > 0):
        raise JobError(f"strategy.algorithm.server_lr = {server_lr} and tau = {tau} must be above 0")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise JobError(f"strategy.algorithm.beta1 = {beta1} and beta2 = {beta2} must be at least 0 and below 1")
    name = f"{optimizer.__module__}:{optimizer.__qualname__}"
    return Algorithm(outer={"use": name, "lr": server_lr, "beta1": beta1, "beta2": beta2, "tau": tau})
