"""What is read from the environment, and that it is read nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cordee.core import env, fault_points
from cordee.core.errors import JobError

SOURCES = Path(__file__).parents[3] / "src" / "cordee"


def test_data_folders() -> None:
    assert env.data_folders({}) == []
    assert env.data_folders({"CORDEE_DATA": "/a::/b"}) == [Path("/a"), Path("/b")]
    assert env.data_folders({"CORDEE_DATA": "~/d"}) == [Path.home() / "d"]


def test_cache_folder() -> None:
    assert env.cache_folder({}) == Path.home() / ".cache" / "cordee"
    assert env.cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/cordee")
    assert env.cache_folder({"XDG_CACHE_HOME": "/x", "CORDEE_CACHE": "/c"}) == Path("/c")


def test_runs_folder() -> None:
    assert env.runs_folder({}) == Path("runs")
    assert env.runs_folder({"CORDEE_RUNS": "/r"}) == Path("/r")


def test_tracebacks_are_for_those_who_ask() -> None:
    assert not env.wants_traceback({})
    assert env.wants_traceback({"CORDEE_TRACEBACK": "1"})


def test_gloo_is_replaced_for_those_who_ask() -> None:
    assert not env.wants_gloo_replaced({})
    assert not env.wants_gloo_replaced({"CORDEE_REPLACE_GLOO": "0"})
    assert env.wants_gloo_replaced(env.gloo_replacement_environment())
    with pytest.raises(JobError, match="CORDEE_REPLACE_GLOO='yes': it must be 1 or 0"):
        env.wants_gloo_replaced({"CORDEE_REPLACE_GLOO": "yes"})


def test_messages_are_lost_in_tests_only() -> None:
    assert env.lost_messages({}) == 0.0
    assert env.lost_messages(fault_points.ask_to_lose(0.25)) == 0.25
    for text in ("half", "0.5", "-0.1", "nan"):
        with pytest.raises(JobError, match=f"CORDEE_LOSE_MESSAGES='{text}'"):
            env.lost_messages({"CORDEE_LOSE_MESSAGES": text})


def test_colour() -> None:
    assert env.wants_colour({"TERM": "xterm"})
    assert not env.wants_colour({"NO_COLOR": "1"})
    assert not env.wants_colour({"TERM": "dumb"})


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCES)))
def test_no_other_file_reads_the_environment(path: Path) -> None:
    if path == SOURCES / "core" / "env.py":
        return
    tree = ast.parse(path.read_text())
    # Giving a new process its environment is not reading it.
    written = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "update"}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in written}
    assert not names & {"environ", "getenv", "environb"}


def test_a_process_that_runs_alone_has_no_place() -> None:
    assert env.place({}) is None
    assert env.place({"LOCAL_RANK": "0"}) is None


def test_the_place_that_a_launcher_gives() -> None:
    meeting = {"MASTER_ADDR": "host", "MASTER_PORT": "1234"}
    full = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **meeting}
    assert env.place(full) == env.Place(3, 4, 1, 2)
    assert env.place({"RANK": "1", "WORLD_SIZE": "2", **meeting}) == env.Place(1, 2, 1, 1)
    assert env.place({"RANK": "0", "WORLD_SIZE": "1"}) == env.Place(0, 1, 0, 1), "alone, it need not meet anybody"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE=None"),
        ({"WORLD_SIZE": "2"}, "RANK=None"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 of WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "no MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}, "no MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_a_place_that_makes_no_sense(environ: dict[str, str], message: str) -> None:
    with pytest.raises(JobError, match=message):
        env.place(environ)


def test_what_cordee_run_gives_a_script_is_understood() -> None:
    place = env.Place(1, 2, 1, 2)
    assert env.place(env.script_environment(place, 5555)) == place


def test_the_roles_of_ps_lite() -> None:
    numbers = {
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "3",
        "DMLC_PS_ROOT_PORT": "99",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
    }
    assert env.store_role({}) is None and env.store_role(numbers) is None
    role = env.store_role({"DMLC_ROLE": "server", **numbers})
    assert role == env.StoreRole("server", 2, 3, "10.0.0.1", 99) and role.address == "tcp://10.0.0.1:99"
    for wrong, message in (
        ({**numbers, "DMLC_ROLE": "boss"}, "DMLC_ROLE='boss': it must be scheduler, server or worker"),
        ({**numbers, "DMLC_ROLE": "worker", "DMLC_NUM_SERVER": "0"}, "DMLC_NUM_SERVER='0': it must be a number from 1"),
        ({**numbers, "DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": ""}, "no DMLC_PS_ROOT_URI: where is the scheduler"),
    ):
        with pytest.raises(JobError, match=message):
            env.store_role(wrong)


def test_where_a_store_is_and_its_key() -> None:
    assert (env.store_address({}), env.store_key_text({}), env.store_key_file({}), env.store_updaters({})) == (
        "",
        "",
        None,
        [],
    )
    found = env.store_environment("tcp://h:1", "secret")
    assert env.store_address(found) == "tcp://h:1" and env.store_key_text(found) == "secret"
    assert env.store_key_file({"CORDEE_STORE_KEY_FILE": "~/k"}) == Path.home() / "k"
    assert env.store_updaters({"CORDEE_STORE_UPDATERS": "a,b.c"}) == ["a", "b.c"]
