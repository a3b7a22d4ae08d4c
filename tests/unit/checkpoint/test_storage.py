"""Checkpoints in a storage: the manifest last, verified when they are brought back, one attempt at a time."""

from __future__ import annotations

import ast
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from cordee import checkpoint
from cordee.checkpoint import State, stored_run
from cordee.checkpoint.reading import damage_of
from cordee.checkpoint.storage import RefusedByStorageError, Retries, Storage, conceal, describe, within
from cordee.checkpoint.stored_run import (
    Owner,
    StoredRun,
    TakenOverError,
    find_runs,
    is_stored,
    run_name,
    why_not_shared,
)
from cordee.checkpoint.uploading import Heartbeat, Uploaded, Uploader
from cordee.core.errors import (
    CheckpointError,
    JobError,
    MissingExtraError,
    RunDirectoryError,
    StorageError,
)
from cordee.core.settings import Checkpoint

QUICK = Retries(num_attempts=3, first_s=0.001)


def make_owner(attempt: str = "a1", run: str = "r1", **fields: object) -> Owner:
    known = {"job": "small", "host": "here", "host_id": "h", "pid": 7, "started": 1.0}
    return msgspec.convert({"run": run, "attempt": attempt, **known, **fields}, Owner)


def make_state(step: int) -> State:
    return State({"model.weight": torch.full((300,), float(step))}, {"progress": {"step": step}})


def claim(run: StoredRun, owner: Owner, *, is_new: bool = True, dead: bool | None = False) -> None:
    run.claim(owner, is_new=is_new, is_dead=lambda _: dead)


@pytest.fixture(params=["folder", "file URL"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    (tmp_path / "storage").mkdir()
    return Storage(f"{'file://' if request.param == 'file URL' else ''}{tmp_path}/storage")


@pytest.fixture
def run(place: Storage) -> StoredRun:
    return StoredRun(place, "a run")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


class Watched:
    """An uploader, and what it reported."""

    def __init__(self, run: StoredRun, root: Path, keep: int = 3, damaged: tuple[int, ...] = ()) -> None:
        self.uploaded: list[int] = []
        self.problems: list[str] = []
        self.uploader = Uploader(
            run,
            "a1",
            root,
            keep=keep,
            damaged=damaged,
            on_uploaded=self._take,
            on_problem=self.problems.append,
            retries=lambda leave: Retries(num_attempts=3, first_s=0.001, leave=leave),
        )

    def _take(self, uploaded: Uploaded) -> None:
        self.uploaded.append(uploaded.step)

    def finish(self) -> None:
        self.uploader.start()
        self.uploader.finish()
        assert self.uploader.wait(10)


def upload(run: StoredRun, root: Path, **options: object) -> Watched:
    watched = Watched(run, root, **options)  # type: ignore[arg-type]
    watched.finish()
    return watched


# The setting


def test_a_folder_is_made_absolute_and_urls_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Checkpoint(storage="shared").storage == str(tmp_path / "shared")
    assert Checkpoint(storage="").storage == ""
    for url in ("s3://bucket/folder", "gs://bucket", "hdfs://user@node:8020/x", "file:///x", "sftp://me@host/x"):
        assert Checkpoint(storage=url + "/").storage == url


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:hunter2@bucket/x",
        "s3://AKIAKEY:hunter/2@bucket/x",
        "s3://hunter2@bucket",
        "sftp://me:hunter2@host/x",
        "s3://bucket/x?token=hunter2",
        "simplecache::s3://key:hunter2@bucket",
    ],
)
def test_credentials_in_the_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(JobError) as caught:
        Checkpoint(storage=url)
    assert "checkpoint.storage" in str(caught.value)
    assert "hunter" not in str(caught.value) and "AKIAKEY" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3:/bucket", "begins with 's3://'"),
        ("s3://", "names no bucket"),
        ("file://relative", "not absolute"),
        ("memory://x", "gone with the process"),
        ("a b://x", "no name of a protocol"),
        ("x\ny", "control character"),
    ],
)
def test_what_is_no_storage_is_refused(url: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        Checkpoint(storage=url)


def test_a_protocol_that_nobody_knows_and_one_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match=r"'hdf' is no protocol that fsspec knows; did you mean 'hdfs'"):
        Storage("hdf://bucket")
    with pytest.raises(JobError, match=r"needs a package that is not installed: .*gcsfs"):
        Storage("gs://bucket")
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match=r"cordee\[storage\]"):
        Storage("s3://bucket")


@pytest.mark.parametrize(
    "text",
    [
        "http://user:hunter2@host/x",
        "GET /x?X-Amz-Signature=hunter2&y=1",
        "aws_secret_access_key = hunter2",
        "{'SessionToken': 'hunter2'}",
        "the key AKIAHUNTER2HUNTER2 is wrong",
    ],
)
def test_what_may_be_a_credential_is_concealed(text: str) -> None:
    assert "hunter2" not in conceal(text).lower() and "***" in conceal(text)


def test_errors_of_drivers_are_one_line() -> None:
    assert describe(RuntimeError("first\n  second")) == "RuntimeError: first second"
    assert describe(PermissionError("Access Denied")) == "permission denied (Access Denied)"


# Speaking to it


def test_a_storage_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "nowhere"))
    with pytest.raises(RefusedByStorageError, match="is not there: make it"):
        storage.require()
    with pytest.raises(RefusedByStorageError, match="no such bucket, folder or file"):
        storage.write("a/b", b"x")
    assert not (tmp_path / "nowhere").exists()


def test_small_files(place: Storage) -> None:
    assert place.read("a/b", 10) is None
    place.write("a/b", b"12")
    place.write("a/b", b"34")
    assert place.read("a/b", 10) == b"34" and list(place.pieces("a/b")) == [b"34"]
    assert place.sizes("a") == {"b": 2} and place.folders() == ["a"]
    with pytest.raises(RefusedByStorageError, match="more than the 1 bytes"):
        place.read("a/b", 1)
    assert not place.create("a/b", b"56") and place.create("a/c", b"56")
    place.remove("a/b")
    place.remove("a/b")
    assert place.sizes("a") == {"c": 2} and place.sizes("nothing") == {}


def test_what_fails_is_tried_again_and_a_refusal_is_not() -> None:
    calls: list[float] = []

    def fail(error: StorageError) -> Callable[[], None]:
        def action() -> None:
            calls.append(time.monotonic())
            raise error

        return action

    with pytest.raises(StorageError, match="slow down"):
        Retries(num_attempts=4, first_s=0.02)(fail(StorageError("slow down")))
    waits = [after - before for before, after in itertools.pairwise(calls)]
    assert len(calls) == 4 and waits[0] >= 0.02 and waits[1] >= 0.04 and waits[2] >= 0.08
    calls.clear()
    with pytest.raises(RefusedByStorageError):
        QUICK(fail(RefusedByStorageError("no")))
    assert len(calls) == 1


def test_a_storage_that_does_not_answer_is_not_waited_for() -> None:
    answered = threading.Event()
    with pytest.raises(StorageError, match=r"the bucket did not answer within 0\.2 s"):
        within(0.2, "the bucket", answered.wait)
    answered.set()


# Putting and bringing


def test_checkpoints_are_put_and_brought_back_bit_for_bit(run: StoredRun, root: Path, tmp_path: Path) -> None:
    claim(run, make_owner())
    for step in (4, 8):
        checkpoint.save(root, step, make_state(step), keep=3)
    watched = upload(run, root)
    assert (watched.uploaded, watched.problems, watched.uploader.missing()) == ([8, 4], [], [])
    other = tmp_path / "other"
    fetched = run.fetch_newest(other, -1, QUICK)
    assert (fetched.step, fetched.damaged) == (8, [])
    assert damage_of(other / "step-8") is None
    for file in (root / "step-8").iterdir():
        assert file.read_bytes() == (other / "step-8" / file.name).read_bytes()
    assert run.fetch_newest(other, 8, QUICK).step is None, "what is there is not brought again"


def test_the_manifest_is_put_last_and_removed_first(
    run: StoredRun, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(run, make_owner())
    did: list[str] = []
    for name in ("put", "write", "remove"):
        real = getattr(Storage, name)

        def noting(self: Storage, path: str, *more: object, real: Callable[..., None] = real, name: str = name) -> None:
            did.append(f"{name} {path.rpartition('/')[2]}")
            real(self, path, *more)

        monkeypatch.setattr(Storage, name, noting)
    checkpoint.save(root, 1, make_state(1), keep=1)
    upload(run, root, keep=1)
    assert did[-1] == "write manifest.json" and {"put model.safetensors", "put values.json"} < set(did[:-1])
    did.clear()
    run.remove(1)
    assert did[0] == "remove manifest.json" and len(did) == 3
    assert run.steps() == []


def test_keep_holds_in_the_storage_and_the_best_stays(run: StoredRun, root: Path) -> None:
    claim(run, make_owner())
    for step in (1, 2, 3, 4, 5):
        checkpoint.save(root, step, make_state(step), keep=2, protected=(2,) if step >= 2 else ())
        upload(run, root, keep=2)
    assert run.steps() == [2, 4, 5]


def test_keep_holds_where_an_older_one_is_put_after_a_newer_one(run: StoredRun, root: Path) -> None:
    claim(run, make_owner())
    checkpoint.save(root, 1, make_state(1), keep=2)
    upload(run, root, keep=2)
    for step in (2, 3):
        checkpoint.save(root, step, make_state(step), keep=2)
    assert upload(run, root, keep=2).uploaded == [3, 2]
    assert run.steps() == [2, 3]


def test_what_is_not_kept_any_more_is_passed_over(run: StoredRun, root: Path) -> None:
    claim(run, make_owner())
    for step in (1, 2, 3):
        checkpoint.save(root, step, make_state(step), keep=1)
    assert upload(run, root, keep=1).uploaded == [3]


def test_without_a_manifest_it_is_not_there_and_an_older_one_is_used(
    run: StoredRun, root: Path, tmp_path: Path
) -> None:
    claim(run, make_owner())
    for step in (1, 2):
        checkpoint.save(root, step, make_state(step), keep=3)
    upload(run, root)
    run.storage.remove("a%20run/checkpoints/step-2/manifest.json")
    fetched = run.fetch_newest(tmp_path / "other", -1, QUICK)
    assert fetched.step == 1
    assert "has no manifest.json: it was not put there completely" in fetched.damaged[0].reason


@pytest.mark.parametrize("how", ["changed", "cut short", "missing", "a manifest that is none"])
def test_a_damaged_one_is_named_and_put_again(run: StoredRun, root: Path, tmp_path: Path, how: str) -> None:
    claim(run, make_owner())
    for step in (1, 2):
        checkpoint.save(root, step, make_state(step), keep=3)
    upload(run, root)
    file = tmp_path / "storage" / "a%20run" / "checkpoints" / "step-2" / "model.safetensors"
    content = file.read_bytes()
    match how:
        case "changed":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "cut short":
            file.write_bytes(content[:-1])
        case "missing":
            file.unlink()
        case _:
            file = file.with_name("manifest.json")
            file.write_bytes(b"{")
    other = tmp_path / "other"
    fetched = run.fetch_newest(other, -1, QUICK)
    assert fetched.step == 1 and [damage.step for damage in fetched.damaged] == [2]
    assert file.name in fetched.damaged[0].reason
    assert [path.name for path in other.iterdir()] == ["step-1"], "nothing of a damaged one is left"
    assert upload(run, root, damaged=(2,)).uploaded == [2]
    assert run.fetch_newest(tmp_path / "third", -1, QUICK) == (2, [])


def test_a_file_that_is_damaged_in_the_run_directory_is_not_published(run: StoredRun, root: Path) -> None:
    claim(run, make_owner())
    checkpoint.save(root, 1, make_state(1), keep=3)
    file = root / "step-1" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    watched = upload(run, root)
    assert watched.uploaded == [] and watched.uploader.missing() == [1]
    assert "does not match its SHA-256" in watched.problems[0]
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        run.find_manifest(1)


def test_failures_are_tried_again_and_what_fails_for_good_is_reported_once(
    run: StoredRun, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(run, make_owner())
    checkpoint.save(root, 1, make_state(1), keep=3)
    real, num_calls = Storage.put, 0

    def fail(self: Storage, name: str, pieces: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3:
            raise StorageError("slow down")
        real(self, name, pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(Storage, "put", fail)
    watched = upload(run, root)
    assert (watched.uploaded, watched.problems) == ([1], []) and num_calls == 6
    checkpoint.save(root, 2, make_state(2), keep=3)
    monkeypatch.setattr(Storage, "put", lambda *_: (_ for _ in ()).throw(StorageError("it is down")))
    watched = Watched(run, root)
    watched.uploader.start()
    deadline_s = time.monotonic() + 10
    while not watched.problems and time.monotonic() < deadline_s:
        time.sleep(0.01)
    watched.uploader.wake()
    watched.uploader.finish()
    assert watched.uploader.wait(10)
    assert watched.problems == ["checkpoint step-2 is not in the storage: it is down"]
    assert watched.uploader.missing() == [2]
    monkeypatch.setattr(Storage, "put", real)
    assert upload(run, root).uploaded == [2], "the next attempt puts what is missing"


def test_it_can_be_left_in_the_middle(run: StoredRun, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(run, make_owner())
    checkpoint.save(root, 1, make_state(1), keep=3)
    begun = threading.Event()

    def slow(self: Storage, name: str, pieces: Callable[[], Iterator[bytes]]) -> None:
        for _ in pieces():
            begun.set()
            time.sleep(0.2)

    monkeypatch.setattr("cordee.checkpoint.uploading.PIECE_BYTES", 16)
    monkeypatch.setattr(Storage, "put", slow)
    watched = Watched(run, root)
    watched.uploader.start()
    assert begun.wait(10)
    progress = watched.uploader.progress
    assert progress is not None and progress.step == 1 and progress.done_bytes < progress.total_bytes
    watched.uploader.leave()
    assert watched.uploader.wait(5)
    assert watched.uploader.missing() == [1] and watched.problems == []


# One attempt at a time


def test_a_new_run_does_not_take_the_place_of_another(run: StoredRun) -> None:
    claim(run, make_owner())
    with pytest.raises(RunDirectoryError, match="holds a run already, of process 7 on host here"):
        claim(run, make_owner("a2", "r2"))


def test_a_living_attempt_is_not_taken_over_and_a_dead_one_is(run: StoredRun) -> None:
    claim(run, make_owner())
    with pytest.raises(RunDirectoryError, match="is written by process 7 on host here, which is alive"):
        claim(run, make_owner("a2"), is_new=False, dead=False)
    claim(run, make_owner("a2"), is_new=False, dead=True)
    with pytest.raises(TakenOverError, match="another attempt at this run took over"):
        run.beat(make_owner("a1"), 1)
    run.release(make_owner("a2"))
    claim(run, make_owner("a3"), is_new=False, dead=False)


def test_another_run_of_the_same_name_is_refused(run: StoredRun) -> None:
    claim(run, make_owner(is_ended=True))
    with pytest.raises(RunDirectoryError, match="holds another run than this run directory"):
        claim(run, make_owner("a2", "r2"), is_new=False)


def test_an_attempt_on_another_host_is_alive_while_its_beat_changes(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_run, "SILENT_S", 0.5)
    monkeypatch.setattr(stored_run, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(stored_run, "SETTLE_S", 0.02)
    first = make_owner()
    claim(run, first)
    heartbeat = Heartbeat(run, first, every_s=0.05)
    heartbeat.start()
    said: list[str] = []
    with pytest.raises(RunDirectoryError, match="which is alive"):
        run.claim(make_owner("a2"), is_new=False, is_dead=lambda _: None, on_wait=said.append)
    assert "waiting up to 0.5 s to see whether process 7 on host here" in said[0]
    heartbeat.stop()
    run.claim(make_owner("a2"), is_new=False, is_dead=lambda _: None)


def test_who_was_taken_over_puts_and_removes_nothing_any_more(run: StoredRun, root: Path) -> None:
    first = make_owner()
    claim(run, first)
    checkpoint.save(root, 1, make_state(1), keep=1)
    claim(run, make_owner("a2"), is_new=False, dead=True)
    watched = upload(run, root)
    assert run.steps() == [] and watched.uploaded == []
    assert len(watched.problems) == 1 and "nothing more of this attempt is put there" in watched.problems[0]
    lost: list[str] = []
    heartbeat = Heartbeat(run, first, every_s=0.01)
    heartbeat.on_lost(lost.append)
    heartbeat.start()
    deadline_s = time.monotonic() + 5
    while not lost and time.monotonic() < deadline_s:
        time.sleep(0.01)
    heartbeat.stop()
    assert "took over" in lost[0]


def test_two_that_begin_at_once_do_not_both_succeed(place: Storage) -> None:
    found: list[str] = []
    start = threading.Barrier(2)

    def begin(attempt: str) -> None:
        start.wait()
        try:
            QUICK(lambda: claim(StoredRun(place, "same"), make_owner(attempt, attempt)))
            found.append("has it")
        except (RunDirectoryError, TakenOverError):
            found.append("refused")

    threads = [threading.Thread(target=begin, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["has it", "refused"]


def test_checkpoints_of_nobody_are_not_taken(run: StoredRun) -> None:
    run.storage.write("a%20run/checkpoints/step-1/x", b"")
    with pytest.raises(RunDirectoryError, match="it is not known whose they are"):
        claim(run, make_owner())


def test_runs_are_found_by_name(place: Storage, tmp_path: Path) -> None:
    for name in ("a b", "ü", "100%"):
        claim(StoredRun(place, name), make_owner())
    place.write("stranger/file", b"")
    assert find_runs(place).keys() == {"a b", "ü", "100%"}
    assert is_stored(place.url, tmp_path / "a b") and not is_stored(place.url, tmp_path / "c")
    assert not is_stored("", tmp_path / "a b")
    assert run_name(tmp_path / "x" / ".." / "y") == "y"
    for name in ("", ".", ".."):
        with pytest.raises(RunDirectoryError, match="choose another"):
            StoredRun(place, name)


# Members


def test_members_find_out_whether_the_storage_is_shared(
    run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_run, "SHARED_WITHIN_S", 0.1)
    claim(run, make_owner())
    url = run.storage.url
    assert why_not_shared(url, "a run", "a1") == ""
    assert "is a copy, not shared" in why_not_shared(url, "a run", "a2")
    (tmp_path / "empty").mkdir()
    assert "is not there: the storage is not shared" in why_not_shared(str(tmp_path / "empty"), "a run", "a1")
    assert "fsspec knows" in why_not_shared("s4://x", "a run", "a1")


def test_a_marker_that_shows_late_is_waited_for(run: StoredRun) -> None:
    thread = threading.Timer(0.7, claim, (run, make_owner()))
    thread.start()
    assert why_not_shared(run.storage.url, "a run", "a1") == ""
    thread.join()


def test_nothing_is_logged_that_should_not_be(
    run: StoredRun, root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a driver says goes through one place, whatever it is."""
    claim(run, make_owner())
    checkpoint.save(root, 1, make_state(1), keep=1)

    def leak(*_: object, **__: object) -> None:
        raise RuntimeError("http://user:hunter2@host/?X-Amz-Signature=hunter2")

    monkeypatch.setattr(run.storage._files, "open", leak, raising=False)
    with caplog.at_level(logging.DEBUG):
        watched = upload(run, root)
    assert watched.problems and "***" in watched.problems[0]
    assert "hunter2" not in caplog.text and "hunter2" not in str(watched.problems)


def test_runs_without_a_storage_import_no_driver() -> None:
    """fsspec and drivers cost a second and megabytes in every process: they are imported where a storage is opened."""
    sources = Path(checkpoint.__file__).parents[1]
    for path in sources.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & {"fsspec", "s3fs", "botocore"}, path
