"""What users simulate with instead: a federation of the same clients in Flower and in pfl.

Run as `PYTHON federated_peers.py NAME FOLDER NUM_CLIENTS` by the benchmark `federated`, with the Python of an
environment that has the peer, torch, and nothing of Cordée. FOLDER has `data.pt`: the inputs and targets of all
clients, and the parameters of the model. Each peer makes two rounds with two processes of one thread, and prints the
seconds of the second one. A process loads the data once, and a batch is gathered at once, as ours are.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn

BATCH_SIZE, LEARNING_RATE, WORKERS, ROUNDS = 32, 0.01, 2, 2
NEVER = 10**9  # rounds between evaluations; the first round has one, and is not measured


def lenet() -> nn.Sequential:
    """Return the model of src/cordee/models/lenet.py, with the same names."""
    model = nn.Sequential()
    model.add_module("conv1", nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.AvgPool2d(2)))
    model.add_module("conv2", nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2)))
    model.add_module("flatten", nn.Flatten())
    model.add_module("linear1", nn.Sequential(nn.Linear(256, 120), nn.ReLU()))
    model.add_module("linear2", nn.Sequential(nn.Linear(120, 84), nn.ReLU()))
    model.add_module("classifier", nn.Linear(84, 10))
    return model


def loaded(folder: str) -> dict[str, Any]:
    """Return the data and the parameters: once in each process.

    They are kept in a module, since Ray makes the functions of a script again for each call.
    """
    kept = sys.modules.setdefault("federated_peers_data", ModuleType("federated_peers_data"))
    if not hasattr(kept, "found"):
        torch.set_num_threads(1)
        kept.found = torch.load(Path(folder) / "data.pt", weights_only=True)  # type: ignore[attr-defined]
    found: dict[str, Any] = kept.found
    return found


def samples_of(folder: str, client: int, num_clients: int) -> tuple[Tensor, Tensor]:
    found = loaded(folder)
    indices = found["order"].tensor_split(num_clients)[client]
    return found["inputs"][indices], found["targets"][indices]


def report(second_round_s: float) -> None:
    print(json.dumps({"seconds": second_round_s}), flush=True)


def run_flower(folder: str, num_clients: int) -> None:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        inputs, targets = samples_of(folder, int(context.node_config["partition-id"]), num_clients)
        model = lenet()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for chosen in torch.split(torch.randperm(len(inputs)), BATCH_SIZE):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        content = RecordDict(
            {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(inputs)})}
        )
        return Message(content=content, reply_to=message)

    class Timed(FedAvg):  # type: ignore[misc]
        times: ClassVar[list[float]] = []

        def configure_train(self, *arguments: Any) -> Any:
            self.times.append(time.perf_counter())
            return super().configure_train(*arguments)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            heard = list(replies)
            errors = [str(reply.error) for reply in heard if reply.has_error()]
            if len(heard) != num_clients or errors:
                raise RuntimeError(
                    f"{len(heard)} of {num_clients} clients answered, {len(errors)} of errors: {errors[:1]}"
                )
            found = super().aggregate_train(server_round, heard)
            if server_round == ROUNDS:
                report(time.perf_counter() - self.times[-1])
            return found

    @server_app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=num_clients,
                         min_available_nodes=num_clients)  # fmt: skip
        strategy.start(grid=grid, initial_arrays=ArrayRecord(loaded(folder)["model"]), num_rounds=ROUNDS)

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=num_clients,
        backend_name="ray",
        backend_config={
            "init_args": {"num_cpus": WORKERS, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


def run_pfl(folder: str, num_clients: int) -> None:
    """Be one of the processes that torchrun has started."""
    import numpy as np
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    np.random.seed(0)

    class Shuffled(Dataset):  # type: ignore[misc]
        """Batches in a new order each time, gathered at once. The library's own data set has one order."""

        def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
            inputs, targets = self.raw_data
            for chosen in torch.split(torch.randperm(len(inputs)), batch_size or len(inputs)):
                yield [inputs[chosen], targets[chosen]]

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = lenet()
            self.layers.load_state_dict(loaded(folder)["model"])

        def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
            self.train()
            return nn.functional.cross_entropy(self.layers(inputs), targets)

        def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(inputs, targets).detach()), 1)}

    class Timed(TrainingProcessCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times = [time.perf_counter()]

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            self.times.append(time.perf_counter())
            return False, Metrics()

    network = Network()
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    users = list(range(num_clients))
    clients = FederatedDataset(
        lambda user: Shuffled(raw_data=list(samples_of(folder, user, num_clients)), user_id=str(user)),
        get_user_sampler("minimize_reuse", users),
    )
    backend = SimulatedBackend(training_data=clients, val_data=clients, postprocessors=[WeightByDatapoints()])
    timed = Timed()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS, evaluation_frequency=NEVER, train_cohort_size=num_clients, val_cohort_size=0
        ),
        backend,
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH_SIZE),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[timed],
        send_metrics_to_platform=False,
    )
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        report(timed.times[ROUNDS] - timed.times[ROUNDS - 1])


PEERS: dict[str, Callable[[str, int], None]] = {"flower": run_flower, "pfl": run_pfl}

if __name__ == "__main__":
    peer, place, count = sys.argv[1:]
    PEERS[peer](place, int(count))
