"""A checkpoint that all members of a team write together, each one its own slices of the state."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cordee import checkpoint
from cordee.checkpoint import Folder, SharedDraft, Slices, State, Store
from cordee.checkpoint.slices import Plan, Region
from cordee.cluster import Team
from cordee.core.errors import StorageError
from cordee.core.fault_points import reach


@dataclass(frozen=True)
class Prepared:
    """What is left to be done for a checkpoint once all have written their slices."""

    save: Callable[[], Path] | None  # on the first member only; raises StorageError
    problem: StorageError | None = None  # why this member could not write


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


def write_together(
    folder: Folder, step: int, slices: Slices, team: Team, *, keep: int, protected: Collection[int]
) -> Prepared:
    """Have every member write its slices of the checkpoint of `step`. Collective.

    The checkpoint is there when the first member has called what it gets. Nothing of it is left where that never
    happens, or where a member cannot write. Raises CheckpointError for a state that cannot be saved, and
    CommunicationError when a member is lost.
    """
    plan = checkpoint.plan_files(slices)
    draft, problem = None, None
    if team.is_first:
        try:
            draft = SharedDraft(folder.root, step, plan, slices.values)
        except StorageError as error:
            problem = error
    try:
        return _write(draft, problem, plan, slices, team, folder.root / f"step-{step}", keep, protected)
    except BaseException:
        if draft is not None:
            draft.discard()
        raise


def _write(
    draft: SharedDraft | None,
    problem: StorageError | None,
    plan: Plan,
    slices: Slices,
    team: Team,
    target: Path,
    keep: int,
    protected: Collection[int],
) -> Prepared:
    place = os.fsdecode(checkpoint.share_bytes(os.fsencode(draft.folder) if draft is not None else b""))
    reach("slices.begun")
    if not place:
        return Prepared(partial(_fail, problem) if problem is not None else None)
    regions = [Region(0, 0, 0)] * len(plan.places)
    try:
        # Another host's view of the files is right only once they are on the disk.
        is_spread = team.num_local_workers < team.num_workers
        regions = checkpoint.write_slices(Path(place), plan, slices, is_synced=is_spread)
    except OSError as error:
        problem = StorageError(f"cannot write to the checkpoint {target}: {checkpoint.reason_of(error)}")
    reach("slices.written")
    rows = team.gather_rows(
        [int(problem is not None), plan.digest, *(number for region in regions for number in region)]
    )
    reach("slices.agreed")
    if draft is None:
        return Prepared(None, problem)
    failed = [number for number, row in zip(team.numbers, rows, strict=True) if row[0]]
    written = [[Region(*row[at : at + 3]) for at in range(2, len(row), 3)] for row in rows]
    if failed:
        found: str | None = f"worker{'s' * (len(failed) > 1)} {', '.join(map(str, failed))} could not write to it"
        found = f"{found}: {problem}" if problem is not None else found
    elif len({row[1] for row in rows}) > 1:
        found = "the workers have tensors of other names or shapes"
    else:
        found = checkpoint.find_missing(plan, written, team.numbers)
    if found is not None:
        draft.discard()
        return Prepared(partial(_fail, StorageError(f"cannot save the checkpoint {target}: {found}")))
    return Prepared(partial(draft.finish, written, team.numbers, keep=keep, protected=protected))


def _fail(problem: StorageError) -> Path:
    raise problem
