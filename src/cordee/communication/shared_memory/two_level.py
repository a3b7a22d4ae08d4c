"""Collectives of a group that spans several hosts: shared memory inside each host, one exchange between their leaders.

Fewer bytes cross the network than in a flat group: what the members of a host have to say is added up before it
leaves, and what comes in is handed out in shared memory. Operations in which each pair has data of its own (gather,
scatter, all_to_all) go as messages, which cross the network once. As in `collectives`, functions return steps. Waiting
for other hosts happens inside a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from cordee.communication.shared_memory import collectives
from cordee.communication.shared_memory.collectives import Host, Reduction, as_buffer, as_bytes, reduce_into
from cordee.communication.shared_memory.links import Links
from cordee.communication.shared_memory.liveness import PeerFailure
from cordee.communication.shared_memory.mailbox import Mailbox
from cordee.communication.shared_memory.rounds import DTYPE_CODES, Operation, Steps, sign
from cordee.communication.shared_memory.segment import share_of

_LEADER = 0  # the member of each host that exchanges with the other hosts
_TAG = -1  # of messages that belong to a collective; programs have tags from 0
_CHUNK_BYTES = 1 << 22  # exchanged and added at once: what comes in stays in the cache until it is added
_PAIR_BYTES = 1 << 20  # the same between two hosts, where the next part is on its way meanwhile
_SMALL_BYTES = 1 << 16  # up to here each leader sends all to each: one way instead of two


class OneHost:
    """The collectives of a group whose members share a host, with the same names as those of `TwoLevel`."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.barrier = partial(collectives.barrier, host)
        self.broadcast = partial(collectives.broadcast, host)
        self.reduce = partial(collectives.reduce, host)
        self.all_gather = partial(collectives.all_gather, host)
        self.gather = partial(collectives.gather, host)
        self.scatter = partial(collectives.scatter, host)
        self.reduce_scatter = partial(collectives.reduce_scatter, host)
        self.all_to_all = partial(collectives.all_to_all, host)

    def all_reduce(self, data: Tensor, reduction: Reduction) -> Steps:
        plan = collectives.plan_all_reduce(self.host, data.dtype, data.numel(), reduction)
        return collectives.all_reduce(self.host, data, plan)


class TwoLevel:
    """The collectives of a group that spans several hosts, as one of its members sees them."""

    def __init__(
        self,
        host: Host,
        hosts: Sequence[Sequence[int]],
        rank: int,
        job_ranks: Sequence[int],
        links: Links,
        mailbox: Mailbox,
        timeout_s: float,
    ) -> None:
        """`hosts` are the group ranks of each host."""
        self.host, self.hosts = host, hosts
        self._rank, self._job_ranks = rank, job_ranks
        self._links, self._mailbox, self._timeout_s = links, mailbox, timeout_s
        self._index = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        self._leaders = [ranks[_LEADER] for ranks in hosts]
        self._leads = host.member == _LEADER
        self._others = [leader for leader in self._leaders if leader != rank]
        self._num_ranks = sum(len(ranks) for ranks in hosts)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def fail(self, error: BaseException) -> None:
        """Tell the members of this host and of the others that this one cannot continue, and for whom."""
        if (culprit := self._links.culprit) is not None:
            self.host.rounds.watch.blame(PeerFailure(self._job_ranks[culprit], str(error)))
        self._links.fail(f"rank {self._job_ranks[self._rank]} gave up: {error}")

    def gather(self, outputs: Sequence[Tensor], data: Tensor, root: int) -> Steps:
        """Write the data (bytes) of rank r to `outputs[r]` on the rank `root`; `outputs` is empty elsewhere."""
        return self._move({root: data}, dict(enumerate(outputs)))

    def scatter(self, output: Tensor, parts: Sequence[Tensor], root: int) -> Steps:
        """Write `parts[r]` (bytes) of the rank `root` to `output` on rank r; `parts` is empty elsewhere."""
        return self._move(dict(enumerate(parts)), {root: output})

    def all_to_all(self, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
        """Write `parts[own rank]` (bytes) of rank r to `outputs[r]`; any sizes on which the pairs agree."""
        return self._move(dict(enumerate(parts)), dict(enumerate(outputs)))

    def _exchange(
        self,
        sent: dict[int, list[Tensor]],
        received: dict[int, list[Tensor]],
        signature: int,
        taken: Callable[[int], None] | None = None,
    ) -> None:
        self._links.exchange(
            {rank: [as_buffer(part) for part in parts] for rank, parts in sent.items()},
            {rank: [as_buffer(part) for part in parts] for rank, parts in received.items()},
            signature,
            self._timeout_s,
            taken,
        )

    def barrier(self) -> Steps:
        yield from collectives.barrier(self.host)
        if self._leads:
            nothing: dict[int, list[Tensor]] = {other: [] for other in self._others}
            self._exchange(nothing, nothing, sign(Operation.BARRIER))
        yield from collectives.barrier(self.host)

    def all_reduce(self, data: Tensor, reduction: Reduction) -> Steps:
        """Replace `data` by its reduction over all ranks; the same bits everywhere."""
        inside = Reduction.SUM if reduction is Reduction.AVG else reduction
        yield from self._reduce_inside(data, inside)
        if self._leads:
            self._reduce_between(data, inside, _sign(Operation.ALL_REDUCE, data, reduction))
            if reduction is Reduction.AVG:
                data.div_(self._num_ranks)
        yield from self._broadcast_inside(as_bytes(data), _LEADER)

    def _reduce_inside(self, data: Tensor, reduction: Reduction) -> Steps:
        if self.host.num_members > 1:
            yield from collectives.reduce(self.host, data, reduction, _LEADER)

    def _broadcast_inside(self, data: Tensor, member: int) -> Steps:
        if self.host.num_members > 1:
            yield from collectives.broadcast(self.host, data, member)

    def _reduce_between(self, data: Tensor, reduction: Reduction, signature: int) -> None:
        """Replace `data` by its reduction over the leaders, in the order of the hosts. Of leaders."""
        if len(self.hosts) == 2:
            self._reduce_pair(data, reduction, signature)
            return
        if data.nbytes <= _SMALL_BYTES:
            self._reduce_share(data, data, {other: [data] for other in self._others}, reduction, signature)
            return
        if data.nbytes > _CHUNK_BYTES:
            for chunk in torch.split(data, _CHUNK_BYTES // data.itemsize):
                self._reduce_between(chunk, reduction, signature)
            return
        bounds = [share_of(data.numel(), len(self.hosts), index) for index in range(len(self.hosts))]
        shares = {leader: data[start:stop] for leader, (start, stop) in zip(self._leaders, bounds, strict=True)}
        own = shares.pop(self._rank)
        sent = {leader: [share] for leader, share in shares.items()}
        self._reduce_share(own, own, sent, reduction, signature)
        self._exchange({other: [own] for other in self._others}, sent, signature)

    def _reduce_pair(self, data: Tensor, reduction: Reduction, signature: int) -> None:
        """The same with one other leader: a part is added as soon as it has come and the own one is sent."""
        parts = torch.split(data, max(1, _PAIR_BYTES // data.itemsize)) if data.numel() else ()
        scratch = self._room(max((part.nbytes for part in parts), default=0)).view(data.dtype)
        rooms = [scratch[: part.numel()] for part in parts]

        def add(index: int) -> None:
            both = (parts[index], rooms[index]) if self._index == 0 else (rooms[index], parts[index])
            reduce_into(parts[index], both, reduction)

        (other,) = self._others
        self._exchange({other: list(parts)}, {other: rooms}, signature, add)

    def _reduce_share(
        self, out: Tensor, own: Tensor, sent: dict[int, list[Tensor]], reduction: Reduction, signature: int
    ) -> None:
        """Write to `out` the reduction of `own` and of as many elements from each other leader."""
        rows = self._room(len(self._others) * own.nbytes).view(own.dtype).view(len(self._others), own.numel())
        self._exchange(sent, {other: [row] for other, row in zip(self._others, rows, strict=True)}, signature)
        parts = list(rows)
        parts.insert(self._index, own)
        if self._index > 1 and out is own:  # which `reduce_into` would overwrite before it is added
            parts[self._index] = own.clone()
        reduce_into(out, parts, reduction)

    def _room(self, num_bytes: int) -> Tensor:
        """Return memory for what comes in; kept, since fresh memory costs more than the sum."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]

    def reduce(self, data: Tensor, reduction: Reduction, root: int) -> Steps:
        """Replace `data` on the rank `root` by the reduction; the others' data stay as they are."""
        total = data.clone()
        yield from self.all_reduce(total, reduction)
        if self._rank == root:
            data.copy_(total)

    def broadcast(self, data: Tensor, root: int) -> Steps:
        """Replace `data` (bytes) by that of the rank `root`."""
        root_host = next(index for index, ranks in enumerate(self.hosts) if root in ranks)
        if self._index == root_host:
            yield from self._broadcast_inside(data, self.hosts[root_host].index(root))
        if self._leads:
            signature = sign(Operation.BROADCAST, root=root, count=data.numel())
            if self._index == root_host:
                self._exchange({other: [data] for other in self._others}, {}, signature)
            else:
                self._exchange({}, {self._leaders[root_host]: [data]}, signature)
        if self._index != root_host:
            yield from self._broadcast_inside(data, _LEADER)

    def all_gather(self, outputs: Sequence[Tensor], data: Tensor) -> Steps:
        """Write the data (bytes) of rank r to `outputs[r]`; sizes may differ between ranks."""
        own = [outputs[rank] for rank in self.hosts[self._index]]
        yield from collectives.all_gather(self.host, own, data)
        elsewhere = {
            ranks[_LEADER]: [outputs[rank] for rank in ranks]
            for index, ranks in enumerate(self.hosts)
            if index != self._index
        }
        if self._leads:
            signature = sign(Operation.ALL_GATHER, count=sum(output.numel() for output in outputs))
            self._exchange(dict.fromkeys(self._others, own), elsewhere, signature)
        if self.host.num_members == 1:
            return
        received = [output for parts in elsewhere.values() for output in parts]
        if sum(output.numel() for output in received) <= self.host.slots.capacity(torch.uint8):
            joined = torch.cat(received)  # one round instead of one for each
            yield from collectives.broadcast(self.host, joined, _LEADER)
            for output, part in zip(received, torch.split(joined, [one.numel() for one in received]), strict=True):
                output.copy_(part)
        else:
            for output in received:
                yield from collectives.broadcast(self.host, output, _LEADER)

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> Steps:
        """Write the reduction over the ranks of `parts[own rank]` to `output`; parts may differ in size."""
        inside = Reduction.SUM if reduction is Reduction.AVG else reduction
        order = [rank for ranks in self.hosts for rank in ranks]
        lengths = [parts[rank].numel() for rank in order]
        total = torch.cat([parts[rank] for rank in order])
        split = dict(zip(order, torch.split(total, lengths), strict=True))
        if len(set(lengths)) > 1:  # what shared memory hands out has one size
            yield from self.all_reduce(total, reduction)
            output.copy_(split[self._rank])
            return
        yield from self._reduce_inside(total, inside)
        mine = [split[rank] for rank in self.hosts[self._index]]
        if self._leads:
            signature = _sign(Operation.REDUCE_SCATTER, total, reduction)
            by_host = torch.split(total, [lengths[0] * len(ranks) for ranks in self.hosts])
            whole = dict(zip(self._leaders, by_host, strict=True))
            own = whole.pop(self._rank)
            self._reduce_share(own, own, {leader: [part] for leader, part in whole.items()}, inside, signature)
            if reduction is Reduction.AVG:
                own.div_(self._num_ranks)
        handed = [as_bytes(part) for part in mine] if self._leads else []
        if self.host.num_members > 1:
            yield from collectives.scatter(self.host, as_bytes(output), handed, _LEADER)
        else:
            output.copy_(mine[0])

    def _move(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> Steps:
        """Send bytes to ranks and receive bytes from ranks, among them this one."""
        if self._rank in sent and self._rank in received:
            own, target = sent.pop(self._rank), received.pop(self._rank)
            if own.data_ptr() != target.data_ptr():
                target.copy_(own)
        works = [self._mailbox.send(data, rank, _TAG, []) for rank, data in sent.items()]
        works += [self._mailbox.receive(data, rank, _TAG, [], None) for rank, data in received.items()]
        for work in works:
            work.wait()
        yield from ()


def _sign(operation: Operation, data: Tensor, reduction: Reduction) -> int:
    return sign(operation, reduction=reduction, dtype_code=DTYPE_CODES[data.dtype], count=data.numel())
