"""A small BERT on batches that are dicts, with the loss that the model computes: a job, and the same with its peers.

Everybody takes whole batches from the same tensors, with AdamW of one rate and without clipping. One kernel thread for
each process. Peers are used as their manuals say; of several processes they use DDP on gloo.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from cordee.bench.harness import Clock, Contestant, Loop, Place, compare_speeds, compete, goal_outcome
from cordee.bench.loops import LEARNING_RATE, train_for_ever
from cordee.core import Job
from cordee.core.errors import MissingExtraError

BATCH_SIZE = 16  # per worker
NUM_STEPS = 30
NUM_SAMPLES, LENGTH, VOCABULARY, NUM_CLASSES = 4096, 32, 512, 4


def is_installed() -> bool:
    """Whether the peers are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("transformers", "accelerate"))


def sentences() -> dict[str, Tensor]:
    """Made-up sentences of 8 to 32 words, padded and masked."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, LENGTH + 1, (NUM_SAMPLES, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    words = torch.randint(1, VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator) * mask
    labels = torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def bert() -> nn.Module:
    """A model of 0.5 M parameters, the same each time."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    labels: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "num_labels": NUM_CLASSES}
    model: nn.Module = BertForSequenceClassification(BertConfig(**sizes, **labels))
    return model


GOAL = 1.0  # how many times as fast as each peer `cordee` should be
PEERS = ("hugging face trainer", "accelerate")
SIZES = {"transformer/one worker": 1, "transformer/two workers": 2}


def measures(rounds: int, say: Callable[[str], None]) -> dict[str, Callable[[], dict[str, list[float]]]]:
    return {case: partial(_measure, size, rounds, say) for case, size in SIZES.items()}


def rows(raw: Mapping[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each contestant: how many times as fast `cordee` is."""
    for case in SIZES:
        figures = {name.partition(": ")[2]: values for name, values in raw.items() if name.startswith(f"{case}: ")}
        for row in compare_speeds(figures) if figures else []:
            is_peer, times = row["contestant"] in PEERS, row["cordee_is_times"]
            yield {
                "case": case,
                "contestant": row["contestant"],
                "unit": "times its samples/s by cordee",
                "median": times,
                "worst": min(a / b for a, b in zip(figures["cordee"], figures[row["contestant"]], strict=True)),
                "goal": GOAL if is_peer else None,
                "outcome": goal_outcome(times >= GOAL) if is_peer else "",
            }


def _measure(size: int, rounds: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the samples per second of each contestant with `size` processes."""
    if not is_installed():
        raise MissingExtraError("the benchmark 'frameworks'", "transformers,bench")
    loops: dict[str, Loop] = {
        "cordee": _cordee,
        "hand-written": _by_hand,
        "accelerate": _accelerate,
        "hugging face trainer": _trainer,
    }
    contestants = {name: Contestant(loop, size, NUM_STEPS, BATCH_SIZE) for name, loop in loops.items()}
    return compete(contestants, rounds, say)[0]


def _cordee(place: Place, clock: Clock) -> None:
    job = Job.from_dict(
        {
            "model": {"use": "cordee.bench.transformer:bert"},
            "data": {"use": "cordee.bench.transformer:sentences"},
            "loss": {"use": "model"},
            "optimizer": {"use": "adamw", "lr": LEARNING_RATE, "weight_decay": 0.0},
            "training": {"batch_size": BATCH_SIZE * place.size, "steps": 10**9, "threads": 1, "device": "cpu"},
            "strategy": {"name": "single" if place.size == 1 else "data_parallel", "workers": place.size},
            "evaluation": {"every_epochs": 0},
            "checkpoint": {"every_steps": 0},
        }
    )
    train_for_ever(job, place, clock)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)


def _by_hand(place: Place, clock: Clock) -> None:
    model: Any = bert().train()
    if place.size > 1:
        dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.size)
        model = DistributedDataParallel(model)
    optimizer, data = _optimizer(model), sentences()
    for epoch in itertools.count():
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for chosen in order.view(-1, place.size, BATCH_SIZE)[:, place.rank]:
            clock.tick()
            optimizer.zero_grad()
            model(**{name: column[chosen] for name, column in data.items()}).loss.backward()
            optimizer.step()


class _Batches(Dataset[Any]):
    """Gives whole batches: an index is a list of indices."""

    def __init__(self) -> None:
        self._columns = sentences()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, indices: Any) -> dict[str, Tensor]:
        return {name: column[indices] for name, column in self._columns.items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return self[indices]


def _as_it_is(batch: Any) -> Any:
    return batch


def _accelerate(place: Place, clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any = bert().train()
    loader: Any = DataLoader(_Batches(), batch_size=BATCH_SIZE, shuffle=True, collate_fn=_as_it_is)
    model, optimizer, loader = accelerator.prepare(model, _optimizer(model), loader)
    while True:
        for batch in loader:
            clock.tick()
            optimizer.zero_grad()
            accelerator.backward(model(**batch).loss)
            optimizer.step()


def _trainer(place: Place, clock: Clock) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tick(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, *args: Any, **keywords: Any) -> None:
            clock.tick()

    arguments = TrainingArguments(
        output_dir=place.folder,
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=10**9,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    Trainer(model=bert(), args=arguments, train_dataset=_Batches(), data_collator=_as_it_is, callbacks=[Tick()]).train()
