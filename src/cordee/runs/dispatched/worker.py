"""The main function of a worker of a dispatched run: take work, pull, compute, push, until there is no more."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import torch

from cordee.cluster import Team
from cordee.cluster.member_link import MemberSpec
from cordee.compute import Loss, find_unsound, split_batch
from cordee.compute.devices import MemoryWatch
from cordee.compute.schedules import PlateauSchedule
from cordee.core import Batch
from cordee.core.blocked_time import BLOCKED
from cordee.core.fault_points import identify, reach
from cordee.core.seeds import derive_seed
from cordee.data.order import count_batches
from cordee.data.source import check_same
from cordee.monitoring import events
from cordee.monitoring.timeline import Phase, Timeline
from cordee.parameters.calls import ServerCalls
from cordee.parameters.placement import Piece, make_layout
from cordee.runs.dispatched.link import DispatchLink
from cordee.runs.dispatched.messages import Leave, SaveResiduals, TakeWork, Work
from cordee.runs.dispatched.on_demand_worker import Attempt, work_until_ended
from cordee.runs.dispatched.plan import is_due
from cordee.strategies.parameter_server.client import ParameterClient
from cordee.strategies.parameter_server.messages import PullExtras, Push, Pushed
from cordee.strategies.parameter_server.push_watch import PushWatch
from cordee.strategies.parameter_server.state import adopt_flat, flatten_parameters
from cordee.strategies.parameter_server.strategy import can_split, fixed_of, settings_of
from cordee.strategies.shards import aligned
from cordee.training.components import Components, assemble

log = logging.getLogger("cordee.worker")


def main(argument: dict[str, Any]) -> int:
    """Work until the run ends; return the exit code. Called in a fresh fork of the fork server."""
    spec = msgspec.convert(argument, MemberSpec)
    identify(spec.name)
    return 0 if work(spec) is None else 1


def work(spec: MemberSpec) -> Exception | None:
    """Work until the run ends; return why this worker could not continue, if it could not."""
    memory = MemoryWatch()

    def work_once(attempt: Attempt[DispatchLink]) -> None:
        job = spec.load_job()
        team = Team(
            worker_index=min(spec.index, job.strategy.workers - 1),
            num_workers=job.strategy.workers,
            num_local_workers=spec.num_local,
        )
        parts = assemble(job, team)
        attempt.stack.callback(parts.train.close)
        loop = DispatchedWorker(parts, attempt.link, spec, attempt.leave_asked, memory, attempt.timeline)
        attempt.join()  # a failure before is not heard
        if spec.data:
            check_same(spec.data, parts.splits)
        loop.run()

    return work_until_ended(spec, DispatchLink, work_once)


class DispatchedWorker:
    """One worker's way from unit to unit. It keeps no optimizer state."""

    def __init__(
        self,
        parts: Components,
        link: DispatchLink,
        spec: MemberSpec,
        leave_asked: threading.Event,
        memory: MemoryWatch,
        timeline: Timeline,
    ) -> None:
        self._timeline = timeline
        self._leave_asked = leave_asked
        self._memory = memory
        self._parts = parts
        self._job = parts.job
        self._link = link
        self._settings = settings_of(parts.job)
        self._model = parts.model.to(parts.computation.device)
        self._layout = make_layout(self._model, self._settings.servers, can_split=can_split(parts.job))
        self._flat = flatten_parameters(self._model, self._layout)
        self._gradient = torch.zeros_like(self._flat)
        adopt_flat(self._model, self._layout, self._flat, self._gradient)
        patience_s = 6 * spec.failure_timeout_s
        self._client = ParameterClient(self._layout, self._settings, ServerCalls(link.connect, patience_s))
        self._fixed = fixed_of(parts.job)
        self._clip_norm = self._settings.clip_norm
        # Only its groups and their rates are used: the state is the servers'.
        self._rates = parts.recipe.make(self._model.named_parameters())
        self._num_until_pull = 0
        self._index, self._num_units = spec.index, 0
        # One that takes the place of another has an index of its own, and what that one left out is lost.
        is_of_before = spec.resume and spec.index < parts.job.strategy.workers
        self._resumes_as = spec.name if is_of_before and self._settings.compression != "none" else ""
        self._pushes: list[tuple[Piece, Future[Pushed]]] = []
        self._work: Work | None = None
        # Clipping one's own gradient needs all of it first, and so does adding up several; one piece is complete last.
        can_push_early = self._settings.push_every == 1 and (self._settings.is_synchronous or not self._clip_norm)
        self._pushes_early = can_push_early and len(self._layout.pieces) > 1
        names = dict.fromkeys(one.name for piece in self._layout.pieces for one in piece.slices)
        self._parameter_numbers = {name: number for number, name in enumerate(names)}
        self._watch = PushWatch(self._model, self._layout, self._start_push)
        self._count = 0.0
        self._blamed = ""  # the sample that made the loss of this unit not finite, in words

    def run(self) -> None:
        """Take work until there is no more."""
        if self._resumes_as:
            self._client.take_residuals(self._resumes_as)
        done, waited_s, has_asked = TakeWork(), 0.0, False
        began_s = None
        while True:
            asked_s = time.perf_counter()
            self._timeline.switch(Phase.WAIT)
            reply = self._link.ask(done)
            if began_s is None:  # the first wait is for the others to start
                began_s = time.perf_counter()
                self._timeline.enter("training")
            else:
                waited_s += time.perf_counter() - asked_s
            if isinstance(reply, Leave):
                break
            if isinstance(reply, SaveResiduals):
                self._client.keep_residuals(reply.step)
                done = TakeWork(kept=reply.step, leaves=self._leave_asked.is_set())
                has_asked = done.leaves
                continue
            assert isinstance(reply, Work)
            self._link.step = reply.first_batch
            if self._leave_asked.is_set() and not has_asked:
                has_asked, done = True, TakeWork(leaves=True)  # the unit goes to another, if there is one
                continue
            done = msgspec.structs.replace(self._do(reply), leaves=self._leave_asked.is_set())
            has_asked = done.leaves
        seconds = time.perf_counter() - began_s
        self._link.emit(
            events.WorkerEnded(
                worker=self._index,
                units=self._num_units,
                seconds=seconds,
                waited_seconds=waited_s,
                peak_memory_bytes=self._memory.peak_bytes() or None,
            )
        )
        self._client.close()

    def _do(self, work: Work) -> TakeWork:
        self._work = work
        self._num_units += 1
        self._timeline.switch(Phase.COMPUTE)
        if self._num_until_pull == 0 or work.apply_step >= 0:
            self._client.pull(self._flat, work.apply_step, work.scale)
            self._num_until_pull = self._settings.pull_every
        self._num_until_pull -= 1
        buffers = dict(self._model.named_buffers())
        if buffers and (self._fixed is not None or self._num_units == 1):  # else they are this worker's own
            self._client.pull_extras(buffers, PullExtras(work.apply_step))
        self._blamed = ""
        loss = self._compute(work)
        reach("worker.computed")
        refused, norms = "", []
        for piece, push in self._pushes:
            with BLOCKED:
                answer = push.result()
            refused = refused or (answer.detail and answer.detail + self._blamed)
            norms += [
                (self._parameter_numbers[one.name], norm)
                for one, norm in zip(piece.slices, answer.norms, strict=bool(answer.norms))
                if norm >= 0
            ]
        self._pushes = []
        reach("worker.pushed")
        if buffers:
            self._client.push_extras(buffers, work.unit, work.step, work.share, work.num_shares)
        self._timeline.end_step(work.first_batch + work.num_batches)
        if self._num_until_pull and work.num_batches == 1:  # of several, `_compute` has taken the local steps
            self._step_locally(work.first_batch)
        return TakeWork(
            done=work.unit,
            loss_sum=loss.mean * loss.count,
            count=loss.count,
            num_items=loss.num_items,
            num_correct=-1 if loss.num_correct is None else loss.num_correct,
            num_samples=loss.num_samples,
            norms=tuple(norms),
            attempt=work.attempt,
            refused=refused,
        )

    def _compute(self, work: Work) -> Loss:
        """Compute the gradient of a unit: the sum over its batches, where `push_every` makes several of it."""
        self._model.train()
        self._watch.begin()
        losses = []
        total = torch.zeros_like(self._gradient) if work.num_batches > 1 else None
        parts = self._parts_of_batches(work)
        places = [(start, stop) for _, start, stop in parts]
        with contextlib.closing(self._parts.train.read(work.epoch, places)) as batches:
            self._timeline.switch(Phase.DATA)
            for (step, start, stop), batch in zip(parts, batches, strict=True):
                self._timeline.switch(Phase.COMPUTE)
                self._gradient.zero_()
                losses.append(self._compute_batch(work, step, batch, start, stop))
                if total is not None:
                    total.add_(self._gradient)
                    self._step_locally(step)
                self._timeline.switch(Phase.DATA)
            self._timeline.switch(Phase.COMPUTE)
        if total is not None:
            self._gradient.copy_(total)
        self._count = sum(loss.count for loss in losses)
        if self._clip_norm and not self._settings.is_synchronous:
            self._clip()
        self._watch.end()
        return Loss.join(losses)

    def _parts_of_batches(self, work: Work) -> list[tuple[int, int, int]]:
        """Return the unit's part [start, stop) of each of its batches, with the step of the job that the batch is."""
        batch_size, num_samples = self._job.training.batch_size, self._parts.splits.train.num_samples
        assert num_samples is not None, "work is handed out by the positions of samples"
        first = work.first_batch % count_batches(num_samples, batch_size)
        starts = range(first * batch_size, (first + work.num_batches) * batch_size, batch_size)
        sizes = [min(batch_size, num_samples - start) for start in starts]
        parts = cut_like(work.start, work.stop, sizes)
        return [(work.first_batch + i, start, stop) for i, (start, stop) in enumerate(parts) if start < stop]

    def _compute_batch(self, work: Work, step: int, batch: Batch, start: int, stop: int) -> Loss:
        parts = self._parts
        measure = is_due(work.first_batch, work.first_batch + work.num_batches, self._job.monitoring.every_steps)
        if self._fixed is None:
            seed = derive_seed(self._job.seed, "step", step, work.share)
        else:
            seed = derive_seed(derive_seed(self._job.seed, "step", step), "shard", work.share)
        torch.default_generator.manual_seed(seed)
        pieces = [part for part in split_batch(batch, self._job.training.accumulate) if part.num_samples]
        self._count = sum(parts.computation.loss.count_batch(part) for part in pieces)
        total = self._count if self._fixed is None else self._fixed.nominal
        if self._fixed is not None:
            pieces = [aligned(part) for part in pieces]
        passes = itertools.count(1)

        def forward(*args: Any, **keywords: Any) -> Any:
            outputs = self._model(*args, **keywords)
            if next(passes) == len(pieces) and self._pushes_early:
                self._watch.expect(outputs)
            return outputs

        loss = parts.computation.forward_backward(
            forward, pieces, total_count=total, measure=measure, is_share=work.num_shares > 1
        )
        if not math.isfinite(loss.mean) and (found := find_unsound(batch)):
            row, part = found
            number = parts.train.numbers_at(work.epoch, start, stop)[row]
            self._blamed = f": the {part} of sample {number} of the training set is not finite"
        return loss

    def _start_push(self, piece: Piece) -> None:
        work = self._work
        assert work is not None
        push = Push(
            piece=piece.index,
            unit=work.unit,
            step=work.first_batch,
            share=work.share,
            num_shares=work.num_shares,
            count=self._count,
            base=self._client.base(piece),
            floor=work.floor,
            unused=self._watch.unused(piece),
            level=work.level,
        )
        self._pushes.append((piece, self._client.start_push(piece, self._gradient, push)))

    def _clip(self) -> None:
        norm = float(torch.linalg.vector_norm(self._gradient, dtype=torch.float64))
        self._gradient.mul_(min(1.0, self._clip_norm / (norm + 1e-6)))

    def _step_locally(self, step: int) -> None:
        """Move the own copy against its own gradient until the next pull, as Downpour SGD does."""
        schedule = self._parts.recipe.schedule
        if isinstance(schedule, PlateauSchedule) and self._work is not None:
            schedule.level = self._work.level
        self._parts.recipe.set_rate(self._rates, step)
        with torch.no_grad():
            for group in self._rates.param_groups:
                rate = float(group["lr"]) * (1 if group.get("maximize") else -1)
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=rate)


def cut_like(start: int, stop: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Cut [start, stop) in the proportions of `sizes`: at the very places where it is as long as all of them."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return list(itertools.pairwise(start + (stop - start) * end // ends[-1] for end in ends))
