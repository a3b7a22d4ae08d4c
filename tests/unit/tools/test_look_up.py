"""What there is to name, what keys mean, and first jobs to change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cordee.cli.app import app
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.strategies.table import STRATEGIES
from cordee.tools.explain import all_keys, explain_key
from cordee.tools.look_up import KINDS, look_up
from cordee.tools.new import TEMPLATES, write_template


def test_every_key_has_a_meaning() -> None:
    keys = list(all_keys())
    assert [key.name for key in keys if not key.meaning or not key.values] == []
    assert {"seed", "training.lr_scale", "data.prefetch", "model.use", "stop.time"} <= {key.name for key in keys}


@pytest.mark.parametrize(
    ("name", "values", "default"),
    [
        ("training.lr_scale", "'none', 'linear' or 'sqrt'", "'none'"),
        ("training.reproducible", "true or false", "false"),
        ("stop.steps", "whole number, or not set", "not set"),
        ("strategy.workers", "whole number", "1"),
        ("data.use", "text", "required"),
        ("checkpoint.storage", "text", "''"),
        ("strategy.topk", "number", "0.01"),
        ("strategy.segment_bytes", "whole number", "262144"),
        ("data.collate", "text", "not set"),
    ],
)
def test_a_key_is_explained(name: str, values: str, default: str) -> None:
    (key,) = explain_key(name)
    assert (key.name, key.values, key.default) == (name, values, default)


def test_values_and_defaults_are_said_without_names_of_the_source() -> None:
    for key in all_keys():
        assert not re.search(r"[A-Z_]{3}|<<|\bAny\b", key.values + key.default), key
    compressions = [key.values for key in explain_key("strategy.compression")]
    assert "'none', 'fp16', 'bf16', 'int8', 'int4', 'topk' or 'topk_2bit'" in compressions


def test_a_section_and_a_key_without_its_section() -> None:
    assert {key.name for key in explain_key("stop")} >= {"stop.accuracy", "stop.time"}
    assert [key.name for key in explain_key("lr_scale")] == ["training.lr_scale"]
    (staleness,) = explain_key("staleness")
    assert STRATEGIES[staleness.owner].run_kind == "dispatched"


def test_an_unknown_key_has_a_nearest() -> None:
    with pytest.raises(JobError, match=r"no key 'training.lr_scal'; did you mean 'training.lr_scale'"):
        explain_key("training.lr_scal")


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_a_line(kind: str) -> None:
    listed = look_up(kind)
    assert len(listed) >= 4
    assert [name for name, text in listed.items() if not text] == []


def test_an_unknown_list() -> None:
    with pytest.raises(JobError, match="no list of 'model'; did you mean 'models'"):
        look_up("model")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_whole_and_is_not_written_twice(name: str, tmp_path: Path) -> None:
    made = write_template(name, tmp_path / "new")
    assert [path.name for path in made.files] == list(TEMPLATES[name].files)
    assert made.files[0].name in made.command
    for path in made.files:
        assert "examples/" not in path.read_text()
        if path.suffix == ".toml":
            Job.load(path)
    made.files[0].write_text("mine")
    with pytest.raises(JobError, match=r"exists? already"):
        write_template(name, tmp_path / "new")
    assert made.files[0].read_text() == "mine"


def test_the_template_that_needs_a_feed_starts_it(tmp_path: Path) -> None:
    made = write_template("online", tmp_path / "my feed")
    assert made.command == f"cd '{tmp_path / 'my feed'}' && (python online_feed.py incoming & cordee train online.toml)"
    programs = [path.name for path in made.files if path.suffix == ".py"]
    assert all(program in made.command for program in programs)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("cordee list mo", ["models"]),
        ("cordee explain training.lr", ["training.lr_scale"]),
        ("cordee explain stop", ["stop", "stop.accuracy"]),
        ("cordee new --template on", ["online"]),
    ],
)
def test_the_shell_completes_names(words: str, completed: list[str]) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_CORDEE_COMPLETE": "complete_bash"}
    said = CliRunner().invoke(app, prog_name="cordee", env=asked).stdout.split()
    assert said[: len(completed)] == completed


def test_an_unknown_template() -> None:
    with pytest.raises(JobError, match="no template 'digit'; did you mean 'digits'"):
        write_template("digit", Path())
