"""The job: from TOML, tables and live objects, with overrides, and back to TOML."""

from __future__ import annotations

import datetime
import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.core import Job, Use
from cordee.core.errors import JobError
from cordee.core.job import changed_keys
from cordee.core.references import resolve
from cordee.core.settings import Checkpoint, Data, Evaluation, Monitoring, Section, Stop, Strategy, Training

DESIGN = """
name = "lenet-fashion"
seed = 0
[model]
use = "lenet"
[data]
use = "fashion-mnist"
[optimizer]
use = "adam"
lr = 0.001
[training]
batch_size = 128
epochs = 5
reproducible = false
lr_scale = "none"
precision = "fp32"
accumulate = 1
clip_norm = 0.0
[strategy]
name = "auto"
workers = 2
[stop]
accuracy = 0.90
time = "10m"
[checkpoint]
every_steps = 200
keep = 3
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Job:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return Job.load(path, overrides)


def small(tmp_path: Path, *overrides: str) -> Job:
    return load(tmp_path, '[model]\nuse = "mlp"\nhidden = [8]\n[data]\nuse = "iris"\n', *overrides)


class MyNet:
    pass


# From and to TOML --------------------------------------------------------------------------------------------


def test_the_job_file_of_the_design(tmp_path: Path) -> None:
    job = load(tmp_path, DESIGN)
    assert (job.name, job.seed, job.model, job.data.use) == ("lenet-fashion", 0, Use("lenet"), "fashion-mnist")
    assert job.optimizer == Use("adam", lr=0.001)
    assert job.training == Training(batch_size=128, epochs=5)
    assert job.strategy == Strategy(name="auto", workers=2)
    assert job.stop == Stop(accuracy=0.9, time="10m")
    assert job.stop.time_s == 600


def test_a_job_survives_the_round_trip(tmp_path: Path) -> None:
    job = load(tmp_path, DESIGN, "strategy.batch_norm=sync", "data.train_limit=10", "model.deep.er=[1, 2]")
    assert load(tmp_path, job.to_toml()) == job
    assert Job.from_dict(job.to_dict()) == job


def test_dates_and_paths_among_the_arguments_survive(tmp_path: Path) -> None:
    data = {"use": "my:data", "since": datetime.date(2024, 1, 2), "at": datetime.time(3, 4), "file": Path("/a/b")}
    again = load(tmp_path, Job(model="mlp", data=data).to_toml())
    assert again.data.args == {"since": datetime.date(2024, 1, 2), "at": datetime.time(3, 4), "file": "/a/b"}


def test_the_default_name(tmp_path: Path) -> None:
    assert small(tmp_path).name == "job", "that of the file"
    assert Job(model="mlp", data="iris").name == "mlp-iris"
    assert Job(model=lambda: 0, data="my.module:Data").name == "lambda-data"
    assert Job(model="./a/b", data="iris").name == "ab-iris", "the model is what will be complained about"


def test_a_root_is_kept_as_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert small(tmp_path, "data.root=files").data.args["root"] == str(tmp_path / "files")
    assert Job(model="mlp", data=Data(use="mnist", args={"root": Path("x")})).data.args["root"] == str(tmp_path / "x")


def test_the_job_is_not_there_or_not_toml(tmp_path: Path) -> None:
    small(tmp_path)
    with pytest.raises(JobError, match=r"no job file .*jobs.toml'; did you mean 'job.toml'\?"):
        Job.load(tmp_path / "jobs.toml")
    with pytest.raises(JobError, match="cannot read the job file"):
        Job.load(tmp_path)
    with pytest.raises(JobError, match=r"is not valid TOML: .*line 2"):
        load(tmp_path, "name = 'x'\n[model\n")
    (tmp_path / "job.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(JobError, match="cannot read the job file"):
        Job.load(tmp_path / "job.toml")


def test_settings_of_a_part_that_is_not_named_are_those_of_the_usual_one(tmp_path: Path) -> None:
    job = small(tmp_path, "optimizer.lr=0.5", "loss.label_smoothing=0.1", "schedule.warmup_steps=5")
    assert job.optimizer == Use("adam", lr=0.5)
    assert job.loss == Use("cross_entropy", label_smoothing=0.1)
    assert job.schedule == Use("constant", warmup_steps=5)
    assert small(tmp_path, "optimizer.weight_decay=0.1").optimizer == Use("adam", lr=0.001, weight_decay=0.1)


@pytest.mark.parametrize("part", ["model", "data"])
def test_model_and_data_are_needed(tmp_path: Path, part: str) -> None:
    other = {"model": "data", "data": "model"}[part]
    with pytest.raises(JobError, match=rf"the job has no \[{part}\]"):
        load(tmp_path, f'[{other}]\nuse = "x"')
    with pytest.raises(JobError, match=rf"\[{part}\] needs the key 'use'"):
        load(tmp_path, f'[{other}]\nuse = "x"\n[{part}]\na = 1')


# Overrides ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("training.epochs=3", lambda job: job.training.epochs == 3),
        ("training.reproducible=true", lambda job: job.training.reproducible is True),
        ("optimizer.lr=1e-2", lambda job: job.optimizer.args["lr"] == 0.01),
        ("model.hidden=[4, 5]", lambda job: job.model.args["hidden"] == [4, 5]),
        ("model.deep.er=1", lambda job: job.model.args["deep"] == {"er": 1}),
        ('name="quoted = text"', lambda job: job.name == "quoted = text"),
        ("name=bare text", lambda job: job.name == "bare text"),
        ("model.a=x=y", lambda job: job.model.args["a"] == "x=y"),
        ("model.a=", lambda job: job.model.args["a"] == ""),
        ("model.a=1\nb=2", lambda job: job.model.args["a"] == "1\nb=2"),
        ("stop.time=10m", lambda job: job.stop.time_s == 600),
        ("stop.time=90", lambda job: job.stop.time_s == 90),
        ("data.augment=['flip']", lambda job: job.data.augment == ("flip",)),
        ("model=lenet", lambda job: job.model == Use("lenet")),
        ("optimizer=sgd", lambda job: job.optimizer == Use("sgd")),
        (" seed =7", lambda job: job.seed == 7),
        ("strategy=single", lambda job: job.strategy == Strategy(name="single")),
        ("strategy.batch_norm=sync", lambda job: job.strategy.settings == {"batch_norm": "sync"}),
    ],
)
def test_overrides_are_toml_values_or_bare_texts(tmp_path: Path, override: str, found: Any) -> None:
    assert found(small(tmp_path, override))
    assert found(Job(model="mlp", data="iris").replace([override])), "and the same from Python"


def test_the_last_override_wins(tmp_path: Path) -> None:
    assert small(tmp_path, "seed=1", "seed=2").seed == 2


def test_a_bare_name_becomes_a_table_when_a_key_below_it_is_set(tmp_path: Path) -> None:
    text = 'model = "mlp"\ndata = "iris"\nstrategy = "single"\n'
    job = load(tmp_path, text, "model.hidden=[3]", "data.prefetch=0", "strategy.workers=2")
    assert job.model == Use("mlp", hidden=[3])
    assert (job.data.use, job.data.prefetch) == ("iris", 0)
    assert job.strategy == Strategy(name="single", workers=2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epochs", "must have the form a.b=value"),
        ("=3", "must have the form a.b=value"),
        ("training..epochs=3", "must have the form a.b=value"),
        ("model.hidden.x=3", "'hidden' is a value, not a table"),
        ("seed.x=3", "seed = {'x': 3} must be a whole number"),
        ("training.epoch=3", r"\[training\] has no key 'epoch'; did you mean 'epochs'\?"),
        ("trainig.epochs=3", r"unknown key 'trainig'; did you mean 'training'\?"),
        ("training.epochs=many", "training.epochs = 'many' does not fit"),
        ("name=5", "name = 5 must be a text"),
    ],
)
def test_overrides_that_make_no_sense(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        small(tmp_path, override)


def test_overriding_leaves_the_job_it_came_from_alone() -> None:
    job = Job(model=Use(MyNet, deep={"er": 1}), data={"use": "my:data", "deep": {"er": 1}}, training={"epochs": 2})
    other = job.replace(["model.deep.er=2", "data.deep.er=2", "training.epochs=3"])
    assert (other.model.args["deep"], other.data.args["deep"], other.training.epochs) == ({"er": 2}, {"er": 2}, 3)
    assert (job.model.args["deep"], job.data.args["deep"], job.training.epochs) == ({"er": 1}, {"er": 1}, 2)
    assert other.model.use is MyNet


def test_overriding_keeps_arguments_that_are_none() -> None:
    job = Job(model=Use(MyNet, a=None), data={"use": "my:data", "b": None}).replace(["seed=1"])
    assert (job.model.args, job.data.args) == ({"a": None}, {"b": None})


# What is wrong with a job ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"sed": 1}, r"unknown key 'sed'; did you mean 'seed'\?"),
        ({"training": {"epoch": 1}}, r"\[training\] has no key 'epoch'; did you mean 'epochs'\? \(it has: accum"),
        ({"stop": {"acuracy": 1}}, r"\[stop\] has no key 'acuracy'; did you mean 'accuracy'\?"),
        ({"evaluation": {"every": 1}}, r"\[evaluation\] has no key 'every'; did you mean 'every_"),
        ({"checkpoint": {"kep": 1}}, r"\[checkpoint\] has no key 'kep'; did you mean 'keep'\?"),
        ({"monitoring": {"tensorbord": 1}}, r"\[monitoring\] has no key 'tensorbord'; did you mean 'tensorboard'\?"),
        ({"training": {"zzz": 1}}, r"\[training\] has no key 'zzz' \(it has:"),
        ({"training": {"epochs": "3"}}, "training.epochs = '3' does not fit: expected 'int', got 'str'"),
        ({"training": {"epochs": 2.5}}, "training.epochs = 2.5 does not fit"),
        ({"training": {"epochs": True}}, "training.epochs = True does not fit"),
        ({"training": {"batch_size": [1]}}, "training.batch_size = .1. does not fit"),
        ({"training": {"precision": "fp33"}}, r"'fp33'; did you mean 'fp32'\? \(one of: auto, fp32, bf16, fp16\)"),
        ({"training": {"device": "gpu"}}, r"training.device = 'gpu' does not fit.*\(one of: auto, cpu, cuda\)"),
        ({"training": 5}, r"training = 5 must be a table: write \[training\]"),
        ({"strategy": 5}, r"strategy = 5 must be a table"),
        ({"strategy": {"workers": "two"}}, "strategy.workers = 'two' does not fit"),
        ({"strategy": {"workers": 0}}, "strategy.workers = 0 must be at least 1"),
        ({"strategy": {"settings": 3}}, "strategy.settings = 3 must be a table"),
        ({"data": {"use": "iris", "args": 3}}, "data.args = 3 must be a table"),
        ({"data": {"use": "iris", "prefetch": "x"}}, "data.prefetch = 'x' does not fit"),
        ({"data": {"use": "iris", "augment": ["rotate"]}}, r"data.augment = \['rotate'\] does not fit"),
        ({"data": {"use": "iris", "test_fraction": 1}}, "data.test_fraction = 1.0 must be at least 0 and below 1"),
        ({"seed": -1}, "seed = -1 must be a whole number"),
        ({"seed": 1.5}, "seed = 1.5 must be a whole number"),
        ({"seed": True}, "seed = True must be a whole number"),
        ({"name": "a/b"}, "name = 'a/b' names a folder as well"),
        ({"name": "a\nb"}, "names a folder as well"),
        ({"python_path": "src"}, "python_path = 'src' must be a list of folders"),
        ({"python_path": 5}, "python_path = 5 must be a list of folders"),
        ({"python_path": [1]}, r"python_path = \[1\] must be a list of folders"),
        ({"training": {"epochs": 2, "steps": 3}}, r"contradict each other: remove one .* set stop.steps = 3"),
        ({"training": {"batch_size": 2, "accumulate": 3}}, "accumulate = 3 cuts a batch of 2 into empty parts"),
        ({"training": {"batch_size": 0}}, "training.batch_size = 0 must be at least 1"),
        ({"training": {"epochs": 0}}, "training.epochs = 0 must be at least 1"),
        ({"training": {"steps": 0}}, "training.steps = 0 must be at least 1"),
        ({"training": {"clip_norm": -1}}, "training.clip_norm = -1.0 must be at least 0"),
        ({"training": {"clip_norm": math.nan}}, "training.clip_norm = nan must be at least 0"),
        ({"training": {"threads": -1}}, "training.threads = -1 must be at least 0"),
        ({"stop": {"accuracy": 90}}, r"stop.accuracy = 90.0 must be above 0 and at most 1 \(0.9 is 90 %\)"),
        ({"stop": {"time": "soon"}}, "stop.time = 'soon' is not a length of time"),
        ({"stop": {"time": 0}}, "stop.time = 0.0 must be longer than nothing"),
        ({"stop": {"time": math.nan}}, "stop.time = nan must be longer than nothing"),
        ({"stop": {"loss": math.nan}}, "stop.loss = nan is never reached"),
        ({"stop": {"patience": 0}}, "stop.patience = 0 must be at least 1"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep = 0 must be at least 1"),
        ({"monitoring": {"every_steps": 0}}, "monitoring.every_steps = 0 must be at least 1"),
        ({"evaluation": {"batch_size": 0}}, "evaluation.batch_size = 0 must be at least 1"),
    ],
)
def test_mistakes_name_the_key_the_value_and_a_way_out(table: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Job.from_dict({"model": "mlp", "data": "iris", **table})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Job(model="m", data="d", training=Training(precision="fp8")), "training.precision = 'fp8'"),  # type: ignore[arg-type]
        (lambda: Job(model="m", data="d", training=Training(epochs="3")), "training.epochs = '3' must be at least"),  # type: ignore[arg-type]
        (lambda: Job(model="m", data="d", evaluation=Evaluation(every_steps=2.5)), "evaluation.every_steps = 2.5"),  # type: ignore[arg-type]
        (lambda: Job(model="m", data=Data(use="d", augment=("rotate",))), "data.augment"),  # type: ignore[arg-type]
        (lambda: Job(model="m", data="d", strategy=Strategy(name=3)), "strategy.name = 3"),  # type: ignore[arg-type]
        (lambda: Job(model="m", data="d", python_path="src"), "python_path = 'src'"),  # type: ignore[arg-type]
    ],
)
def test_sections_made_in_python_are_checked_as_well(make: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        make()


def test_a_job_without_epochs_or_steps_trains_for_one_epoch() -> None:
    assert Training().num_epochs == 1
    assert Training(epochs=3).num_epochs == 3
    assert Training(steps=3).num_epochs is None


# Live objects ------------------------------------------------------------------------------------------------


def test_live_objects_stay_live_and_are_written_by_name(tmp_path: Path) -> None:
    job = Job(model=Use(MyNet, width=3), data=(1, 2), loss=lambda outputs, targets: 0)
    assert job.model.use is MyNet
    table = job.to_dict()
    assert table["model"] == {"use": f"{__name__}:MyNet", "width": 3}
    assert table["data"]["use"] == "live:tuple"
    assert table["loss"]["use"].startswith("live:")
    again = load(tmp_path, job.to_toml())
    assert resolve("model", again.model.use, {}) is MyNet
    with pytest.raises(JobError, match="made in Python from an object that has no importable name"):
        resolve("loss", again.loss.use, {})


def test_live_arguments_are_not_mistaken_for_texts_later(tmp_path: Path) -> None:
    job = Job(model=Use(MyNet, activation=MyNet), data="iris")
    assert load(tmp_path, job.to_toml()).model.args["activation"] == f"live:{__name__}:MyNet"


def test_a_resolved_job_finds_its_modules_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "net_at_home.py").write_text("class Net: ...")
    (home / "job.toml").write_text('model = "net_at_home.py:Net"\ndata = "iris"\n')
    monkeypatch.chdir(home)
    (elsewhere / "job.toml").write_text(Job.load("job.toml").to_toml())
    monkeypatch.chdir(elsewhere)
    job = Job.load("job.toml")
    assert job.python_path[:1] == (str(home),)
    assert resolve("model", job.model.use, {}, python_path=job.python_path).__name__ == "Net"


# Resuming ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "changes"),
    [
        ("optimizer.lr=0.5", ["optimizer.lr was 0.001, is 0.5"]),
        ("model.hidden=[9]", ["model.hidden was [8], is [9]"]),
        ("model.dropout=0.5", ["model.dropout was 'not set', is 0.5"]),
        ("seed=3", ["seed was 0, is 3"]),
        ("data.prefetching=1", ["data.prefetching was 'not set', is 1"]),
        ("training.batch_size=8", ["training.batch_size was 32, is 8"]),
        ("training.epochs=9", []),
        ("training.device=cpu", []),
        ("stop.accuracy=0.5", []),
        ("checkpoint.keep=9", []),
        ("strategy.workers=9", []),
        ("data.root=/x", []),
        ("name=other", []),
    ],
)
def test_changes_that_forbid_resuming(tmp_path: Path, override: str, changes: list[str]) -> None:
    before, after = small(tmp_path).to_dict(), small(tmp_path, override).to_dict()
    assert changed_keys(before, after) == changes
    assert len(changed_keys(after, before)) == len(changes)


def test_a_list_is_a_tuple_and_a_whole_number_a_float() -> None:
    assert changed_keys({"model": {"a": (1, 2)}}, {"model": {"a": [1.0, 2]}}) == []


# Any job -----------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
NUMBERS = st.floats(allow_nan=False, width=32)
PLAIN = st.recursive(
    st.one_of(TEXTS, st.booleans(), st.integers(-(2**63), 2**63 - 1), NUMBERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
KEYS = st.text("abcdefgh_", min_size=1, max_size=8).map(lambda key: f"my_{key}")
NAMES = st.text(st.characters(codec="utf-8", min_codepoint=32, exclude_characters="/\\"), min_size=1, max_size=8)


def table_of(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


COUNTS = st.integers(1, 100)
PART = st.dictionaries(KEYS, PLAIN, max_size=3).map(lambda args: {"use": "a:b", **args})
JOBS = st.fixed_dictionaries(
    {"model": PART, "data": PART},
    optional={
        "name": NAMES,
        "seed": st.integers(0, 2**62),
        "loss": PART,
        "optimizer": PART,
        "schedule": PART,
        "python_path": st.lists(TEXTS, max_size=3, unique=True),
        "training": table_of(
            batch_size=st.integers(100, 200),
            epochs=COUNTS,
            reproducible=st.just(False),
            lr_scale=st.sampled_from(["none", "linear", "sqrt"]),
            precision=st.sampled_from(["fp32", "bf16"]),
            accumulate=st.integers(1, 32),
            clip_norm=st.floats(0, 100),
            device=st.sampled_from(["auto", "cpu", "cuda"]),
            threads=COUNTS,
        )
        | st.fixed_dictionaries(
            {"reproducible": st.just(True)}, optional={"shards": COUNTS, "lr_scale": st.just("none")}
        ),
        "strategy": st.dictionaries(KEYS, PLAIN, max_size=2).flatmap(
            lambda settings: table_of(name=NAMES, workers=COUNTS).map(lambda own: {**settings, **own})
        ),
        "stop": table_of(
            accuracy=st.floats(0.01, 1),
            loss=NUMBERS,
            time=st.one_of(st.floats(0.1, 1e6), st.sampled_from(["10m", "1h30m"])),
            steps=COUNTS,
            patience=COUNTS,
        ),
        "evaluation": table_of(every_epochs=COUNTS, every_steps=COUNTS, batch_size=COUNTS),
        "checkpoint": table_of(every_steps=COUNTS, keep=COUNTS),
        "monitoring": table_of(every_steps=COUNTS, tensorboard=st.booleans()),
    },
)


@given(JOBS)
def test_any_job_survives_the_round_trip(table: dict[str, Any]) -> None:
    job = Job.from_dict(table)
    again = Job.from_dict(tomllib.loads(job.to_toml()))
    assert again == job
    assert again.to_toml() == job.to_toml()
    assert changed_keys(job.to_dict(), again.to_dict()) == []


@pytest.mark.parametrize("section", [Training, Stop, Evaluation, Checkpoint, Monitoring, Strategy])
def test_sections_are_frozen_and_take_keywords_only(section: type[Section]) -> None:
    with pytest.raises(AttributeError):
        setattr(section(), msgspec.structs.fields(section)[0].name, 1)
    with pytest.raises(TypeError):
        section(1)  # type: ignore[call-arg]
