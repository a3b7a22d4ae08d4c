"""Random jobs, drawn from a seed. Pure: the same seed gives the same trials in any process.

A trial is a table of choices. What a trial does not choose is as in `PLAIN`, which is what a failure is shrunk towards.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).resolve().parents[1])  # where "differences.parts" is found
Table = dict[str, Any]
Choices = Mapping[str, Any]

PLAIN: Table = {
    "data": "classes",  # one of DATA
    "size": 24,
    "test_size": 10,
    "ignored": 0.0,  # share of labels that do not count, of tokens
    "ignored_label": -100,
    "data_settings": {},  # keys of [data] that any source takes
    "nested": "",  # how samples and outputs are built, one of NESTED; "": one tensor in, one out
    "model": "blocks",  # or a built-in one
    "blocks": ["linear"],
    "is_chain": True,
    "double": True,
    "loss": "cross_entropy",
    "loss_settings": {},
    "optimizer": {"use": "sgd", "lr": 0.1},
    "schedule": {"use": "constant"},
    "batch_size": 8,
    "steps": 4,  # 0: epochs
    "epochs": 0,
    "training": {},  # accumulate, clip_norm, precision, reproducible, shards, lr_scale
    "evaluation": {"every_epochs": 0},
    "checkpoint": {"every_steps": 0},
    "stop": {},
    "metrics": {},
    "seed": 0,
    "strategy": {"name": "data_parallel", "workers": 2},
    "before": None,  # the strategy that took the first `resume_at` steps
    "resume_at": 0,
}

DATA = {
    "classes": "classes",
    "synthetic": "classes",
    "iris": "classes",
    "digits": "classes",
    "dataset": "classes",
    "stream": "classes",
    "images": "images",
    "tokens": "tokens",
    "numbers": "numbers",
    "yes_or_no": "yes_or_no",
}
NESTED = ("names", "tuple", "own_loss")
CAN_BE_NESTED = ("classes", "dataset", "stream", "images", "tokens", "numbers")
ODD_BLOCKS = (
    *(
        "dropout",
        "batch_norm",
        "layer_norm",
        "group_norm",
        "twice",
        "tied",
        "tied_offset",
        "frozen",
        "half_frozen",
        "unused",
        "scalar",
    ),
    *("counter", "average", "buffers", "checkpointed", "reentrant", "relu", "masked", "normalized"),
)
# Between these and the rest of a sequence there is a dimension more than a batch or group norm here takes.
NOT_FOR_TOKENS = ("batch_norm", "group_norm")
OPTIMIZERS: tuple[Table, ...] = (
    {"use": "sgd", "lr": 0.1},
    {"use": "sgd", "lr": 0.05, "momentum": 0.9},
    {"use": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"use": "adam", "lr": 0.01},
    {"use": "adam", "lr": 0.01, "amsgrad": True, "weight_decay": 0.01},
    {"use": "adamw", "lr": 0.01, "weight_decay": 0.1},
    {"use": "rmsprop", "lr": 0.003, "momentum": 0.5, "centered": True},
    {"use": "adagrad", "lr": 0.05, "lr_decay": 0.01},
    {"use": "adadelta", "lr": 1.0},
    {"use": "adamax", "lr": 0.01},
    {"use": "nadam", "lr": 0.01},
    {"use": "radam", "lr": 0.01},
    {"use": "asgd", "lr": 0.05},
    {"use": "rprop", "lr": 0.01},
    {"use": "adafactor", "lr": 0.05},
    {"use": "differences.parts:grouped_sgd", "lr": 0.05, "momentum": 0.9},
    {"use": "differences.parts:layered_sgd", "lr": 0.05, "momentum": 0.9},
)
# In single precision a small denominator makes whole steps out of gradients that are nothing but rounding.
ROUNDING_OPTIMIZERS: tuple[Table, ...] = (*OPTIMIZERS[:3], {"use": "adam", "lr": 0.01, "eps": 1e-2})
GPT_HEAD_WIDTH = 2
METRIC_STOPS = ("accuracy", "loss", "patience", "metrics")
METRICS: dict[str, tuple[Any, ...]] = {
    "classes": (
        "accuracy",
        "f1",
        "top_2",
        {"use": "recall", "average": "micro"},
        "torchmetrics.classification.MulticlassCohenKappa",
        "differences.parts:mean_score",
    ),
    "tokens": ("f1", "perplexity", "differences.parts:mean_score"),
    "numbers": ("mae", "rmse", "r2", "torchmetrics.MeanAbsoluteError", "differences.parts:mean_score"),
    "yes_or_no": ("f1", "accuracy", "precision", "differences.parts:mean_score"),
}
METRICS["images"] = METRICS["classes"]
TORCH_SCHEDULES: tuple[Table, ...] = (
    {"use": "StepLR", "step_size": 2, "gamma": 0.5, "per": "step"},
    {"use": "ExponentialLR", "gamma": 0.7},
    {"use": "OneCycleLR", "max_lr": 0.2, "cycle_momentum": False},
    {"use": "CosineAnnealingWarmRestarts", "T_0": 2, "per": "step"},
    {"use": "SequentialLR", "per": "step", "milestones": [2], "schedulers": [
        {"use": "LinearLR", "total_iters": 2}, {"use": "ExponentialLR", "gamma": 0.8}]},
)  # fmt: skip


def draw_trials(seed: int, num_strategies: int = 4) -> list[Table]:
    """Return one job with several strategies: the trials of `seed`."""
    rng = random.Random(f"linear loss {seed}")
    if rng.random() < 0.2:
        return [draw_straight(rng) for _ in range(num_strategies)]
    rng = random.Random(f"job {seed}")
    job = draw_job(rng)
    nest(random.Random(f"nested {seed}"), job)
    return [draw_strategy(rng, job) for _ in range(num_strategies)]


def draw_job(rng: random.Random) -> Table:
    """Return choices of all but the strategy."""
    job: Table = {**PLAIN, "seed": rng.randrange(1000)}
    job["data"] = rng.choice([*DATA, "classes", "tokens", "tokens"])
    kind = DATA[job["data"]]
    job["size"], job["test_size"] = rng.randint(13, 41), rng.choice([0, 1, 5, 10, 17])
    job["batch_size"] = rng.choice([4, 5, 6, 8, 12])
    if job["data"] in ("iris", "digits"):
        job["batch_size"] = rng.choice([16, 50])
    job["double"] = rng.random() < 0.8
    job["training"] = _draw_training(rng, job)
    _draw_model(rng, job, kind)
    _draw_loss(rng, job, kind)
    job["optimizer"] = dict(rng.choice(OPTIMIZERS if job["double"] else ROUNDING_OPTIMIZERS))
    job["schedule"] = _draw_schedule(rng)
    if rng.random() < 0.5 and job["data"] != "digits":
        job["epochs"], job["steps"] = rng.choice([1, 1, 2]), 0
    else:
        job["steps"] = rng.randint(2, 9)
    _draw_looking(rng, job)
    own = random.Random(f"metrics {job['seed']} {job['size']}")  # what was drawn before stays as it was
    if own.random() < 0.25:
        job["training"]["ema"] = own.choice([0.5, 0.9])
    if own.random() < 0.2 and "reentrant" not in job["blocks"]:
        job["training"]["recompute"] = True
    is_scaled = "lr_scale" in job["training"]  # the reference has another rate in one place only
    is_grouped = str(job["optimizer"]["use"]).startswith("differences") or "tied_head" in job["blocks"]
    if own.random() < 0.2 and not is_scaled and not is_grouped:
        job["optimizer"]["groups"] = [{"match": "bias", "lr": job["optimizer"]["lr"] / 2}]
    if own.random() < 0.3 and not is_scaled and job["data"] != "stream":
        job["schedule"] = dict(own.choice(TORCH_SCHEDULES))
    if own.random() < 0.4:
        job["metrics"] = {f"metric_{i}": use for i, use in enumerate(own.sample(METRICS[kind], 2))}
    return job


def nest(rng: random.Random, job: Table) -> None:
    """Have some of the jobs give their model several inputs, and get several outputs of it."""
    if rng.random() < 0.7 or job["data"] not in CAN_BE_NESTED or job["model"] == "mlp":
        return
    if "augment" in job["data_settings"]:
        return
    job["nested"] = rng.choice(NESTED)
    if job["nested"] == "own_loss":
        job["loss"], job["loss_settings"] = "model", {}
        if DATA[job["data"]] == "tokens":
            job["loss_settings"] = {"count": "labels", "ignore_index": job["ignored_label"]}
    elif job["nested"] == "tuple" and ":" not in job["loss"]:
        job["loss_settings"] = {**job["loss_settings"], "output": 1}
    elif ":" in job["loss"]:
        job["nested"] = ""  # losses of the user's own are given all outputs


def _draw_training(rng: random.Random, job: Table) -> Table:
    training: Table = {}
    if rng.random() < 0.35:
        training["accumulate"] = rng.randint(2, 3)
    if rng.random() < 0.35:
        training["clip_norm"] = rng.choice([0.01, 0.3, 100.0])
    if rng.random() < 0.35:
        training["reproducible"] = True
        if rng.random() < 0.4:
            training["shards"] = rng.choice([4, 5, 6])
    elif rng.random() < 0.15:
        training["lr_scale"] = rng.choice(["linear", "sqrt"])
    if rng.random() < 0.1:
        training["precision"], job["double"] = "bf16", False
    return training


def _draw_model(rng: random.Random, job: Table, kind: str) -> None:
    if kind == "tokens" and rng.random() < 0.35:
        job["model"] = "gpt"
        return
    if kind == "classes" and rng.random() < 0.15:
        job["model"], job["double"] = "mlp", False
        return
    number = rng.choice([1, 2, 3, 3, 4])
    blocks = [rng.choice([*ODD_BLOCKS, "linear", "linear"]) for _ in range(number)]
    if kind == "tokens":
        entries = ["embedding", "tied_head"] if rng.random() < 0.4 else ["embedding"]
        blocks = [*entries, *(block for block in blocks if block not in NOT_FOR_TOKENS)]
    if kind == "images" and rng.random() < 0.7:
        blocks.insert(0, "conv")
    job["blocks"] = blocks
    job["is_chain"] = rng.random() < 0.65


def _draw_loss(rng: random.Random, job: Table, kind: str) -> None:
    if kind == "numbers":
        job["loss"] = rng.choice(["mse", "l1", "torch.nn:SmoothL1Loss", "differences.parts:log_cosh"])
    elif kind == "yes_or_no":
        job["loss"] = "binary_cross_entropy"
    elif kind == "tokens":
        job["loss_settings"] = {"label_smoothing": 0.1} if rng.random() < 0.3 else {}
        if rng.random() < 0.6:
            job["ignored"] = rng.choice([0.2, 0.6])
            job["ignored_label"] = rng.choice([-100, 3])
        if job["ignored_label"] != -100:
            job["loss_settings"]["ignore_index"] = job["ignored_label"]
    else:
        job["loss_settings"] = {"label_smoothing": 0.1} if rng.random() < 0.3 else {}
        if rng.random() < 0.1:
            job["loss"], job["loss_settings"] = "differences.parts:class_weighted", {}


def _draw_schedule(rng: random.Random) -> Table:
    warm: Table = {"warmup_steps": rng.randint(1, 3)} if rng.random() < 0.3 else {}
    return rng.choice(
        [
            {"use": "constant", **warm},
            {"use": "constant", **warm},
            {"use": "cosine", "final": 0.1, **warm},
            {"use": "linear", **warm},
            {"use": "step", "every_steps": 2, "factor": 0.5, **warm},
            {"use": "differences.parts:sawtooth"},
        ]
    )


def _draw_looking(rng: random.Random, job: Table) -> None:
    """Draw when to evaluate, to save and to stop."""
    is_fixed = job["data"] in ("iris", "digits")
    if rng.random() < 0.4:
        wanted: list[Table] = [{"train_limit": 61 if is_fixed else job["size"] - 3}, {"prefetch": 0}]
        if is_fixed or job["test_size"]:
            wanted.append({"test_limit": 4})
        elif job["data"] != "stream":
            wanted.append({"test_fraction": 0.25})
        job["data_settings"] = rng.choice(wanted)
    if job["data"] == "images" and rng.random() < 0.5:
        job["data_settings"] = {**job["data_settings"], "augment": ["flip", "crop"]}
    has_test = bool(job["test_size"]) or "test_fraction" in job["data_settings"] or is_fixed
    job["evaluation"] = rng.choice(
        [
            {"every_epochs": 1},
            {"every_epochs": 0, "every_steps": rng.randint(1, 4)},
            {"every_epochs": 1, "every_steps": 3, "batch_size": rng.choice([1, 3, 7])},
            {"every_epochs": 0, "batch_size": 4},
        ]
    )
    job["checkpoint"] = {"every_steps": rng.choice([0, 0, 1, 2, 3]), "keep": rng.choice([1, 2, 3])}
    if rng.random() < 0.2:
        job["checkpoint"]["asynchronous"] = False
    if has_test and rng.random() < 0.2:
        job["checkpoint"]["keep_best"] = True
    if rng.random() < 0.25:
        stops: list[Table] = [{"steps": rng.randint(1, 6)}]
        if has_test:
            stops += [{"patience": 1}, {"loss": 1.3}]
        job["stop"] = rng.choice(stops)


# Strategies


def draw_strategy(rng: random.Random, job: Choices) -> Table:
    """Return `job` with a strategy that may take it, and for some of them an interruption on the way."""
    trial: Table = {**job, "strategy": _draw_one(rng, job)}
    follows_metrics = any(key in job["stop"] for key in METRIC_STOPS) or job["checkpoint"].get("keep_best")
    if rng.random() < 0.35 and not follows_metrics and job["training"].get("lr_scale", "none") == "none":
        before, at = _draw_one(rng, job, may_be_single=True), rng.randint(1, 4)
        if at < job["stop"].get("steps", math.inf):  # a run that has ended is not resumed
            trial["before"], trial["resume_at"] = before, at
    return trial


_SPLITTING = ["sharded", "pipeline", "tensor", "hybrid", "sharded", "pipeline", "hybrid", "local_sgd"]


def _draw_one(rng: random.Random, job: Choices, may_be_single: bool = False) -> Table:
    names = ["data_parallel", "data_parallel", "parameter_server", "parameter_server"]
    if not job["training"].get("reproducible"):
        names += ["sharded", "sharded"] if job["nested"] else _SPLITTING
    if may_be_single:
        names += ["single"] * 3
    name = rng.choice(names)
    return {"name": name, **_SETTINGS[name](rng, job)}


def _single(rng: random.Random, job: Choices) -> Table:
    return {"workers": 1}


def _data_parallel(rng: random.Random, job: Choices) -> Table:
    settings: Table = {"workers": rng.choice([2, 2, 2, 3, 4])}
    if not job["training"].get("reproducible"):
        settings |= _batch_norm(rng, job)
        if rng.random() < 0.4:
            settings["reducer"] = rng.choice(["flat", "overlapped", "overlapped", "ddp"])
            if settings["reducer"] == "overlapped":
                settings["segment_bytes"] = rng.choice([1, 100, 1000])
                if settings.get("batch_norm") == "sync":
                    settings["batch_norm"] = "average"
        if rng.random() < 0.05:
            settings["compression"], settings["reducer"] = rng.choice(["fp16", "bf16", "int4"]), "flat"
    return settings


def _local_sgd(rng: random.Random, job: Choices) -> Table:
    """One step alone is what data_parallel does, for optimizers that are linear in the gradient (see comparing.py).

    Longer windows cross the ends of epochs, and so do the mean losses that they report: test_local_sgd.py has them.
    """
    settings: Table = {"workers": rng.choice([2, 2, 3]), "sync_every": 1}
    if "batch_norm" in job["blocks"]:
        settings["batch_norm"] = rng.choice(["local", "average"])
    return settings


def _parameter_server(rng: random.Random, job: Choices) -> Table:
    settings: Table = {"workers": rng.choice([1, 2, 2, 3]), "servers": rng.choice([1, 1, 2, 3])}
    if not job["training"].get("reproducible") and rng.random() < 0.25:
        settings["staleness"] = rng.choice([1, 2, "unbounded"])
        if rng.random() < 0.5:
            settings["push_every"], settings["pull_every"] = rng.choice([(2, 1), (1, 2), (3, 3), (4, 1)])
    if rng.random() < 0.25:
        settings["replicas"] = 2
    if {"clip_norm", "reproducible"} & job["training"].keys() or rng.random() > 0.05:
        return settings
    return {**settings, "compression": rng.choice(["fp16", "int8"])}


def draw_straight(rng: random.Random) -> Table:
    """Return a trial whose gradients do not depend on the weights: then workers that are not in step agree as well.

    So what is combined here is what other trials cannot compare: staleness, pushes of several batches, windows of
    steps, groups, fragments, and compression, which may leave out no more than it has not yet sent.
    """
    workers = rng.choice([1, 2, 2, 4])
    job: Table = {
        **PLAIN,
        "seed": rng.randrange(1000),
        "model": "straight",
        "loss": "differences.parts:tilted",
        "optimizer": {"use": "sgd", "lr": 0.1},
        "size": rng.choice([24, 48]),  # all workers have as many samples of every batch
        "batch_size": rng.choice([4, 8, 12]),
        "steps": rng.randint(4, 16),
        "checkpoint": {"every_steps": rng.choice([0, 3])},
    }
    kind = rng.random()
    if kind < 0.1:
        settings: Table = {"name": "data_parallel", "workers": max(2, workers), "reducer": "flat"}
        settings["compression"] = rng.choice(["bf16", "int8", "int4", {"use": "topk", "share": 0.3}])
    elif kind < 0.55:
        settings = {
            "name": "parameter_server",
            "workers": workers,
            "servers": rng.choice([1, 2, 3]),
            "staleness": rng.choice([1, 2, "unbounded"]),
        }
        settings["push_every"], settings["pull_every"] = rng.choice([(1, 1), (2, 1), (1, 2), (3, 3), (4, 1), (2, 2)])
        if rng.random() < 0.7:
            settings["compression"] = rng.choice(["fp16", "bf16", "int8", "int4", "topk", "topk_2bit"])
            if settings["compression"].startswith("topk"):
                settings["topk"] = 0.5
        if rng.random() < 0.3:
            settings["replicas"] = 2
    else:
        workers = max(2, workers)
        settings = {"name": "local_sgd", "workers": workers, "sync_every": rng.choice([1, 2, 4, 6])}
        if rng.random() < 0.5:
            settings["workers_per_group"] = rng.choice([each for each in (1, 2, 4) if each <= workers])
        if settings["sync_every"] % 2 == 0 and rng.random() < 0.4:
            settings["fragments"] = 2
        if settings["sync_every"] // settings.get("fragments", 1) > 1 and rng.random() < 0.4:
            settings["delay"] = 1
        if rng.random() < 0.7:
            some = ["fp16", "bf16", "int8", "int4", {"use": "topk", "share": 0.3}, {"use": "topk_2bit", "share": 0.3}]
            settings["compress"] = rng.choice([*some, {"use": "powersgd", "rank": 1}])
    trial = {**job, "strategy": settings}
    if rng.random() < 0.3:
        trial["before"], trial["resume_at"] = dict(settings), rng.randint(1, 3)
    return trial


def _sharded(rng: random.Random, job: Choices) -> Table:
    return {"workers": rng.choice([2, 2, 3, 4]), **_sharded_settings(rng, job)}


def _sharded_settings(rng: random.Random, job: Choices) -> Table:
    settings: Table = {"unit_bytes": rng.choice([1, 500, 4 << 20]), **_batch_norm(rng, job)}
    if rng.random() < 0.3:
        settings["keep_gathered"] = True
    return settings


def _pipeline(rng: random.Random, job: Choices) -> Table:
    workers = rng.choice([2, 2, 2, 3, 4])
    return {"workers": workers, **_pipeline_settings(rng, job, workers)}


def _pipeline_settings(rng: random.Random, job: Choices, num_parts: int) -> Table:
    settings: Table = {"schedule": rng.choice(["1f1b", "1f1b", "gpipe", "interleaved", "zero-bubble"])}
    if rng.random() < 0.6:
        settings["microbatches"] = rng.choice([1, 2, 2, 4]) if settings["schedule"] == "gpipe" else num_parts
    if rng.random() < 0.3 and settings["schedule"] != "zero-bubble":
        settings["recompute"] = True
    return settings


def _tensor(rng: random.Random, job: Choices) -> Table:
    return {"workers": rng.choice([2, 2, 4]), **_tensor_settings(rng, job)}


def _tensor_settings(rng: random.Random, job: Choices) -> Table:
    if job["model"] != "blocks":
        return {}
    return {"plan": {"*.linear": rng.choice(["gather", "scatter"])}}


def _hybrid(rng: random.Random, job: Choices) -> Table:
    axes = rng.choice(
        [
            {"data": 2, "pipeline": 2},
            {"data": 2, "sharded": 2},
            {"data": 2, "tensor": 2},
            {"pipeline": 2, "tensor": 2},
            {"sharded": 2, "tensor": 2},
            {"pipeline": 2, "sharded": 2},
            {"pipeline": 2},
        ]
    )
    settings: Table = {"workers": 2 if len(axes) == 1 else 4, "mesh": dict(axes)}
    if "pipeline" in axes:
        settings |= _pipeline_settings(rng, job, 2)
    elif "sharded" in axes:
        settings |= _sharded_settings(rng, job)
        if "tensor" in axes:
            settings.pop("batch_norm", None)
    if "tensor" in axes:
        settings |= _tensor_settings(rng, job)
    return settings


def _batch_norm(rng: random.Random, job: Choices) -> Table:
    if "batch_norm" not in job["blocks"]:
        return {}
    return {"batch_norm": rng.choice(["local", "average", "sync", "sync", "sync"])}


_SETTINGS = {
    "single": _single,
    "data_parallel": _data_parallel,
    "local_sgd": _local_sgd,
    "parameter_server": _parameter_server,
    "sharded": _sharded,
    "pipeline": _pipeline,
    "tensor": _tensor,
    "hybrid": _hybrid,
}


# Job files


def job_table(choices: Choices) -> Table:
    """Return the job file's table for these choices."""
    length = {"steps": choices["steps"]} if choices["steps"] else {"epochs": choices["epochs"]}
    table = {
        "name": "trial",
        "seed": choices["seed"],
        "python_path": [TESTS],
        "model": _model_section(choices),
        "data": {**_data_section(choices), **choices["data_settings"]},
        "loss": {"use": choices["loss"], **choices["loss_settings"]},
        "optimizer": dict(choices["optimizer"]),
        "schedule": dict(choices["schedule"]),
        "training": {"batch_size": choices["batch_size"], **length, "threads": 1, **choices["training"]},
        "evaluation": dict(choices["evaluation"]),
        "checkpoint": dict(choices["checkpoint"]),
        "monitoring": {"every_steps": 1},
        "strategy": dict(choices["strategy"]),
        # A machine with other work on it is no reason to take a worker for lost.
        "cluster": {"failure_timeout": "30s"},
    }
    if choices["metrics"]:
        table["metrics"] = dict(choices["metrics"])
    if choices["stop"]:
        table["stop"] = dict(choices["stop"])
    return table


def _model_section(choices: Choices) -> Table:
    if choices["nested"]:
        own = _model_section({**choices, "nested": ""})
        settings = {"kind": choices["nested"], "ignored_label": choices["ignored_label"]}
        return {**own, "use": "differences.parts:nested_model", "of": own["use"].partition(":")[2], **settings}
    if choices["model"] == "straight":
        return {"use": "differences.parts:straight"}
    if choices["model"] == "mlp":
        return {"use": "mlp", "hidden": [8, 8], "dropout": 0.0, "activation": "tanh"}
    if choices["model"] == "gpt":
        size = {"num_layers": 1, "num_heads": 4, "embedding_width": 4 * GPT_HEAD_WIDTH}
        return {"use": "differences.parts:gpt", **size, "double": choices["double"]}
    return {
        "use": "differences.parts:build",
        "blocks": list(choices["blocks"]),
        "is_chain": choices["is_chain"],
        "double": choices["double"],
    }


def _data_section(choices: Choices) -> Table:
    if choices["nested"]:
        own = _data_section({**choices, "nested": ""})
        settings = {"of": own["use"].partition(":")[2], "kind": choices["nested"]}
        return {**own, "use": "differences.parts:nested", **settings}
    name, sizes = choices["data"], {"size": choices["size"], "test_size": choices["test_size"]}
    if name in ("iris", "digits"):
        return {"use": name}
    if name == "synthetic":
        return {"use": "synthetic", "shape": [6], "num_classes": 4, **sizes}
    if name == "tokens":
        labels = {"ignored": choices["ignored"], "ignored_label": choices["ignored_label"]}
        return {"use": "differences.parts:tokens", **sizes, **labels}
    return {"use": f"differences.parts:{name}", **sizes}


def num_microbatches(choices: Choices) -> int:
    """Return into how many parts the strategy cuts a batch by itself; 1 where it is no pipeline."""
    strategy = choices["strategy"]
    mesh = strategy.get("mesh", {})
    stages = mesh.get("pipeline", 1) if strategy["name"] == "hybrid" else strategy["workers"]
    if strategy["name"] not in ("pipeline", "hybrid") or stages == 1:
        return 1
    share = choices["batch_size"] // (mesh.get("data", 1) * mesh.get("sharded", 1))
    return int(strategy.get("microbatches") or min(4 * stages, share))


def num_shares(choices: Choices) -> int:
    """Return into how many shares workers cut a batch between them."""
    strategy = choices["strategy"]
    mesh = strategy.get("mesh", {})
    if strategy["name"] == "hybrid":
        return int(mesh.get("data", 1) * mesh.get("sharded", 1))
    return 1 if strategy["name"] in ("pipeline", "tensor") else int(strategy["workers"])


def reference(choices: Choices) -> Table:
    """Return the trial of one worker that this one has to agree with."""
    training = dict(choices["training"])
    optimizer = dict(choices["optimizer"])
    shares = num_shares(choices)
    optimizer["lr"] *= {"none": 1.0, "linear": shares, "sqrt": shares**0.5}[training.pop("lr_scale", "none")]
    if choices["model"] == "straight" and choices["strategy"].get("staleness", 0) != 0:
        optimizer["lr"] *= shares  # each share is an update of its own
    parts = num_microbatches(choices)
    # What sees one part of a batch at a time sees micro-batches here, and the parts of `accumulate` there.
    if (
        parts > 1
        and training.get("accumulate", 1) == 1
        and set(choices["blocks"]) & {"batch_norm", "counter", "average"}
    ):
        training["accumulate"] = min(parts, choices["batch_size"])
    alone = {"strategy": {"name": "single", "workers": 1}, "before": None, "resume_at": 0}
    return {**choices, "optimizer": optimizer, "training": training, **alone}


def simpler(choices: Choices) -> Iterator[Table]:
    """Yield trials with one choice nearer to the plain one, the largest changes first."""
    for key, plain in PLAIN.items():
        if choices[key] != plain and key not in ("strategy", "before", "resume_at", "steps", "epochs"):
            yield {**choices, key: plain}
    if choices["epochs"]:
        yield {**choices, "epochs": 0, "steps": PLAIN["steps"]}
    if choices["before"] is not None:
        yield {**choices, "before": None, "resume_at": 0}
        yield {**choices, "before": {"name": "single", "workers": 1}}
    for key in (
        "training",
        "evaluation",
        "checkpoint",
        "stop",
        "data_settings",
        "loss_settings",
        "optimizer",
        "strategy",
    ):
        for inner in _without_one(choices[key], kept=("name", "use", "lr", "workers", "mesh", *PLAIN[key])):
            yield {**choices, key: inner}
    for position in range(len(choices["blocks"])):
        yield {**choices, "blocks": [*choices["blocks"][:position], *choices["blocks"][position + 1 :]]}
    if choices["steps"] > 1:
        yield {**choices, "steps": choices["steps"] // 2}
    workers = choices["strategy"]["workers"]
    if workers > 2 and choices["strategy"]["name"] != "hybrid":
        yield {**choices, "strategy": {**choices["strategy"], "workers": workers - 1}}


def _without_one(table: Mapping[str, Any], kept: Sequence[str]) -> Iterator[Table]:
    for key in table:
        if key not in kept:
            yield {name: value for name, value in table.items() if name != key}
