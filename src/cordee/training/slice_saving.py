"""A checkpoint that all members of a team write together, each one its own slices of the state."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cordee import checkpoint
from cordee.checkpoint import Folder, SharedDraft, Slices, State, Store, Wrote
from cordee.checkpoint.slices import NOTHING, Region
from cordee.cluster import Team
from cordee.core.errors import StorageError
from cordee.core.fault_points import reach


@dataclass(frozen=True)
class Prepared:
    """What is left to be done for a checkpoint once all have written their slices."""

    save: Callable[[], Path] | None  # on the first member only; raises StorageError
    problem: StorageError | None = None  # why this member could not write
    unsound: str | None = None  # a tensor whose values must not be saved: there is no checkpoint


@dataclass(frozen=True)
class SharedSlices:
    """What this member has of the state, and the folder in which all members write."""

    slices: Slices
    folder: Folder

    @property
    def values(self) -> dict[str, Any]:
        return self.slices.values

    @property
    def common(self) -> State:
        """What every member has whole, and should have the same."""
        return State(self.slices.common, {})

    def join(self, state: State, *, is_saved: bool) -> SharedSlices:
        """Return these and what every member has of `state`; `is_saved`: by this member."""
        return SharedSlices(self.slices.join(state, is_saved=is_saved), self.folder)


def choose_folder(store: Store, team: Team) -> Folder | None:
    """Return where all members can read and write; None if one of them cannot. Collective.

    Members of several users may not write into each other's files.
    """
    folder = store if isinstance(store, Folder) else None
    rows = team.gather_rows([int(folder is not None), os.geteuid()])
    return folder if all(has_folder for has_folder, _ in rows) and len({user for _, user in rows}) == 1 else None


class SharedWriting:
    """A checkpoint into whose files every member writes its own slices; it counts once all have agreed on it.

    What a member has of `slices` belongs to the writing from `start` to `agree`: training may compute with it, and
    changes nothing of it. Nothing is left of a checkpoint where a member is lost before that, or cannot write.
    """

    def __init__(
        self,
        folder: Folder,
        step: int,
        slices: Slices,
        team: Team,
        *,
        parameters: Collection[str],
        keep: int,
        protected: Collection[int],
    ) -> None:
        """Make the files. `parameters` have to be finite. Collective.

        Raises CheckpointError for a state that cannot be saved, and CommunicationError when a member is lost.
        """
        self._plan = checkpoint.plan_files(slices)
        self._slices, self._team, self._parameters = slices, team, frozenset(parameters)
        self._target = folder.root / f"step-{step}"
        self._keep, self._protected = keep, protected
        self._draft: SharedDraft | None = None
        self._problem: StorageError | None = None
        self._error: Exception | None = None
        self._wrote = Wrote([NOTHING] * len(self._plan.places))
        self._thread: threading.Thread | None = None
        if team.is_first:
            try:
                self._draft = SharedDraft(folder.root, step, self._plan, slices.values)
            except StorageError as error:
                self._problem = error
        with self._discarding():
            has_others = self._draft is not None and bool(folder.names())
            place = os.fsencode(self._draft.folder) if self._draft is not None else b""
            place = checkpoint.share_bytes(bytes([has_others]) + place)
            # Until there is a first checkpoint, a member that is lost ends the run: no step begins before it is there.
            self._has_others, self._place = bool(place[0]), os.fsdecode(place[1:])
            reach("slices.begun")

    @property
    def may_continue(self) -> bool:
        """Whether the slices may be written while training computes. The same on every member."""
        return self._has_others and all(one.values.device.type == "cpu" for one in self._slices.own.values())

    def start(self, changing: Collection[str]) -> None:
        """Write in a thread. Of the tensors called `changing`, which computing changes, a copy is written. Local."""
        self._slices = self._slices.with_copies(changing)
        self._versions = {name: one.values._version for name, one in self._slices.own.items()}
        self._thread = threading.Thread(target=self._write, name="cordee-slices", daemon=True)
        self._thread.start()

    def agree(self) -> Prepared:
        """Have every member know what all have written. Collective."""
        with self._discarding():
            if self._thread is None:
                self._write()
            else:
                self._thread.join()
                self._refuse_changes()
            self._slices = self._slices._replace(own={}, common={})  # not this checkpoint's any more
            if self._error is not None:
                raise self._error
            if not self._place:
                return Prepared(partial(_fail, self._problem) if self._problem is not None else None)
            reach("slices.written")
            names = list(self._plan.places)
            unsound = names.index(self._wrote.unsound) if self._wrote.unsound is not None else len(names)
            numbers = [number for region in self._wrote.regions for number in region]
            rows = self._team.gather_rows([int(self._problem is not None), self._plan.digest, unsound, *numbers])
            reach("slices.agreed")
            first = min(row[2] for row in rows)
            if first < len(names):
                self._discard()
                return Prepared(None, unsound=names[first])
            save = partial(self._finish, self._draft, rows) if self._draft is not None else None
            return Prepared(save, self._problem)

    def abandon(self) -> None:
        """Leave nothing of the checkpoint. Local: a member was lost."""
        if self._thread is not None:
            self._thread.join()
        self._discard()

    def _write(self) -> None:
        if not self._place:
            return
        try:
            # Another host's view of the files is right only once they are on the disk.
            is_spread = self._team.num_local_workers < self._team.num_workers
            self._wrote = checkpoint.write_slices(
                Path(self._place), self._plan, self._slices, parameters=self._parameters, is_synced=is_spread
            )
        except OSError as error:
            self._problem = StorageError(
                f"cannot write to the checkpoint {self._target}: {checkpoint.reason_of(error)}"
            )
        except Exception as error:  # noqa: BLE001 - for the thread that trains
            self._error = error

    def _refuse_changes(self) -> None:
        for name, version in self._versions.items():
            if self._slices.own[name].values._version != version:
                self._problem = StorageError(
                    f"cannot save the checkpoint {self._target}: '{name}' has changed while it was written"
                )

    def _finish(self, draft: SharedDraft, rows: Sequence[Sequence[int]]) -> Path:
        """Make a checkpoint of what all have written. Local. Raises StorageError, with nothing left."""
        numbers = self._team.numbers
        failed = [number for number, row in zip(numbers, rows, strict=True) if row[0]]
        written = [[Region(*row[at : at + 5]) for at in range(3, len(row), 5)] for row in rows]
        if failed:
            found: str | None = f"worker{'s' * (len(failed) > 1)} {', '.join(map(str, failed))} could not write to it"
            found = f"{found}: {self._problem}" if self._problem is not None else found
        elif len({row[1] for row in rows}) > 1:
            found = "the workers have tensors of other names or shapes"
        else:
            found = checkpoint.find_missing(self._plan, written, numbers)
        if found is not None:
            draft.discard()
            raise StorageError(f"cannot save the checkpoint {self._target}: {found}")
        return draft.finish(written, numbers, keep=self._keep, protected=self._protected)

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        """Leave nothing of the checkpoint where what is inside fails."""
        try:
            yield
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        if self._draft is not None:
            self._draft.discard()


def _fail(problem: StorageError) -> Path:
    raise problem
