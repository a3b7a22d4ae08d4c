"""A job: everything that decides what a run computes, as one frozen value.

It is read from TOML, overridden key by key, written into the run directory as resolved, and read from there
again. Unknown keys are rejected with the nearest known one.
"""

from __future__ import annotations

import datetime
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import tomli_w

from cordee.core.errors import JobError, nearest
from cordee.core.references import LIVE_PREFIX, Use, describe, name_of
from cordee.core.settings import Checkpoint, Cluster, Data, Evaluation, Monitoring, Section, Stop, Strategy, Training

_NAMED_PARTS = ("model", "loss", "optimizer", "schedule")
_LISTED_PARTS = ("metrics", "callbacks")  # tables of parts, by names of the user's choice
_DEFAULT_PARTS = {"loss": Use("cross_entropy"), "optimizer": Use("adam", lr=0.001), "schedule": Use("constant")}
SECTIONS: dict[str, type[Section]] = {
    "training": Training,
    "cluster": Cluster,
    "stop": Stop,
    "evaluation": Evaluation,
    "checkpoint": Checkpoint,
    "monitoring": Monitoring,
}
# Sections that may be written as one bare name, and the key it stands for.
_BARE_NAMES = {**dict.fromkeys((*_NAMED_PARTS, "data"), "use"), "strategy": "name"}
# Changing these when resuming leaves what was already computed valid. Checkpoints depend neither on the
# strategy nor on the number of workers. A name that ends with a dot stands for all keys of its section.
CHANGEABLE_ON_RESUME = (
    "name",
    "python_path",
    "strategy.",
    "cluster.",
    "stop.",
    "metrics.",
    "callbacks.",
    "evaluation.",
    "checkpoint.",
    "monitoring.",
    "training.epochs",
    "training.steps",
    "training.device",
    "data.prefetch",
    "data.processes",
    "data.root",
    "data.download",
    "data.holdout_size",
)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to train, on what, how and for how long.

    Sections may be given as their structs, as tables in the shape of the job file, and the named parts also
    as a bare name or a live object: `Job(model="lenet", data="fashion-mnist", training={"epochs": 5})`.
    """

    model: Use
    data: Data
    name: str = ""
    seed: int = 0
    loss: Use = _DEFAULT_PARTS["loss"]
    optimizer: Use = _DEFAULT_PARTS["optimizer"]
    schedule: Use = _DEFAULT_PARTS["schedule"]
    metrics: dict[str, Use] = msgspec.field(default_factory=dict)  # what is measured on the test set, besides the loss
    callbacks: dict[str, Use] = msgspec.field(default_factory=dict)  # objects that are called while the run trains
    training: Training = Training()
    strategy: Strategy = Strategy()
    cluster: Cluster = Cluster()
    stop: Stop = Stop()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    monitoring: Monitoring = Monitoring()
    python_path: tuple[str, ...] = ()  # folders searched for "module:callable" before the Python path

    def __post_init__(self) -> None:
        for part in _NAMED_PARTS:
            _set(self, part, Use.coerce(part, getattr(self, part), _DEFAULT_PARTS.get(part)))
        for listed in _LISTED_PARTS:
            table = _table(listed, getattr(self, listed))
            _set(self, listed, {name: Use.coerce(f"{listed}.{name}", part) for name, part in table.items()})
        _set(self, "data", _data_section(self.data))
        _set(self, "strategy", _strategy_section(self.strategy))
        for name, section in SECTIONS.items():
            value = getattr(self, name)
            # A struct's fields were not checked when it was made in Python.
            table = msgspec.structs.asdict(value) if isinstance(value, section) else value
            _set(self, name, read_section(name, table, section))
        _set(self, "python_path", _folders(self.python_path))
        if not isinstance(self.name, str):
            raise JobError(f"name = {self.name!r} must be a text")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise JobError(f"seed = {self.seed!r} must be a whole number of at least 0")
        if not self.name:
            _set(self, "name", f"{_short(self.model.use)}-{_short(self.data.use)}")
        if any(ord(character) < 32 or character in "/\\" for character in self.name):
            raise JobError(f"name = {self.name!r} names a folder as well: leave out '/', '\\' and control characters")

    @classmethod
    def coerce(cls, job: Job | Mapping[str, Any] | str | Path, overrides: Iterable[str] = ()) -> Job:
        """Return `job` as a Job: it may be one, a table in the shape of the job file, or the path of one."""
        if isinstance(job, (str, Path)):
            return cls.load(job, overrides)
        if isinstance(job, Mapping):
            job = cls.from_dict(job)
        if not isinstance(job, Job):
            raise JobError(f"a job is a cordee.Job, a table or the path of a job file, not {type(job).__name__}")
        return job.replace(overrides) if overrides else job

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Job:
        """Read a job file and apply `overrides` of the form "a.b=c", where c is a TOML value or a bare text."""
        path = Path(path)
        table = read_toml(path, "job file")
        for override in overrides:
            apply_override(table, override)
        table.setdefault("name", path.stem)
        return cls.from_dict(table, python_path=(str(path.resolve().parent), str(Path.cwd())))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], python_path: Sequence[str] = ()) -> Job:
        """Return the job that a table in the shape of the job file describes."""
        known = msgspec.structs.fields(cls)
        for key in table:
            if key not in {field.name for field in known}:
                raise JobError(f"unknown key '{key}'{nearest(key, (field.name for field in known))}")
        for part in ("model", "data"):
            if part not in table:
                raise JobError(f'the job has no [{part}]: add it with use = "…"')
        folders = dict.fromkeys([*_folders(table.get("python_path", ())), *python_path])
        return cls(**{**table, "python_path": tuple(folders)})

    def to_dict(self) -> dict[str, Any]:
        """Return the table of the job file that makes this job again; what is not set (None) is left out."""
        table: dict[str, Any] = {"name": self.name, "seed": self.seed, "python_path": list(self.python_path)}
        for part in ("model", "data", "loss", "optimizer", "schedule", "training", "strategy", *SECTIONS):
            value = getattr(self, part)
            table[part] = value.to_dict() if isinstance(value, Use) else _flat(value)
        for listed in _LISTED_PARTS:
            table[listed] = {name: part.to_dict() for name, part in getattr(self, listed).items()}
        return table

    def to_toml(self) -> str:
        return tomli_w.dumps(_toml_ready(self.to_dict()))

    def replace(self, overrides: Iterable[str]) -> Job:
        """Return this job with `overrides` of the form "a.b=c" applied. Live objects stay live."""
        table = self.to_dict()
        for part in _NAMED_PARTS:
            table[part] = {"use": getattr(self, part).use, **getattr(self, part).args}
        for listed in _LISTED_PARTS:
            table[listed] = {name: {"use": part.use, **part.args} for name, part in getattr(self, listed).items()}
        table["data"].update({"use": self.data.use, **self.data.args})
        if self.data.collate is not None:
            table["data"]["collate"] = self.data.collate
        for override in overrides:
            apply_override(table, override)
        return Job.from_dict(table)


def changed_keys(
    before: Mapping[str, Any], after: Mapping[str, Any], changeable: Sequence[str] = CHANGEABLE_ON_RESUME
) -> list[str]:
    """Return "key was x, is y" for each difference between two job tables that forbids resuming."""
    old, new = _leaves(before), _leaves(after)
    return [
        f"{key} was {old.get(key, 'not set')!r}, is {new.get(key, 'not set')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not any(key.startswith(name) if name.endswith(".") else key == name for name in changeable)
    ]


def _folders(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(folder, str) for folder in value):
        raise JobError(f"python_path = {value!r} must be a list of folders")
    return tuple(value)


def _data_section(value: Any) -> Data:
    if isinstance(value, Data):
        value = msgspec.structs.asdict(value)
    table = dict(value) if isinstance(value, Mapping) else {"use": value}
    if "use" not in table:
        raise JobError("[data] needs the key 'use': a built-in name or 'module:callable'")
    own = {field.name for field in msgspec.structs.fields(Data)} - {"use", "args"}
    settings = {key: table.pop(key) for key in list(table) if key in own}
    use, args = table.pop("use"), {**_table("data.args", table.pop("args", {})), **table}
    for key in _path_keys(use, args):
        args[key] = str(Path(args[key]).expanduser().absolute())
    # A live object does not pass through the validation of plain values.
    collate = settings.pop("collate", None)
    checked = read_section("data", {"use": "", **settings}, Data)
    data: Data = msgspec.structs.replace(checked, use=use, args=args, collate=collate)
    return data


def _path_keys(use: Any, args: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a data set that are paths of this host: workers may have another working folder."""
    is_builtin = isinstance(use, str) and ":" not in use  # what `path` means to a user's callable is not known
    keys = ["root", *(("path", "test") if is_builtin and "root" not in args else ())]
    return [key for key in keys if isinstance(args.get(key), (str, os.PathLike)) and "://" not in os.fspath(args[key])]


def _strategy_section(value: Any) -> Strategy:
    if isinstance(value, Strategy):
        value = msgspec.structs.asdict(value)
    table: dict[str, Any] = {"name": value} if isinstance(value, str) else dict(_table("strategy", value))
    own = {key: table.pop(key) for key in ("name", "workers") if key in table}
    settings = {**_table("strategy.settings", table.pop("settings", {})), **table}
    section: Strategy = read_section("strategy", {**own, "settings": settings}, Strategy)
    return section


def _table(section: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise JobError(f"{section} = {value!r} must be a table: write [{section}] and its keys below")
    return value


def read_section(section: str, value: Any, into: type[Any]) -> Any:
    """Return a table as the struct of its section; JobError names the key that is unknown or does not fit."""
    table = _table(section, value)
    fields = {field.name: field for field in msgspec.structs.fields(into)}
    for key in table:
        if key not in fields:
            raise JobError(
                f"[{section}] has no key '{key}'{nearest(key, fields)} (it has: {', '.join(sorted(fields)) or 'none'})"
            )
    for key, given in table.items():  # one by one, so that the message can name the key and its value
        try:
            msgspec.convert(given, fields[key].type, strict=True)
        except msgspec.ValidationError as error:
            raise JobError(
                f"{section}.{key} = {given!r} does not fit: {describe(error)}{_choices(given, fields[key].type)}"
            ) from None
    return msgspec.convert(dict(table), into, strict=True)


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _choices(given: Any, annotation: Any) -> str:
    """Return which words may be given, where the annotation, or a member of its union, has some."""
    if get_origin(annotation) is dict:  # of its values
        _, annotation = get_args(annotation)
        given = list(given.values()) if isinstance(given, Mapping) else given
    members = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    names = [str(choice) for member in members if get_origin(member) is Literal for choice in get_args(member)]
    if not names:
        return ""
    names += [_KINDS[member] for member in members if member in _KINDS]
    return f"{nearest(str(given), names)} (one of: {', '.join(names)})"


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the table in a file. Raises JobError that names it, and a neighbour with nearly its name."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        raise JobError(f"no {what} {str(path)!r}{nearest(path.name, beside)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"cannot read the {what} {str(path)!r}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{path} is not valid TOML: {error}") from None


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set one key of `table`, given as "a.b=value", where the value is one of TOML or a bare text."""
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise JobError(f"--set {override!r} must have the form a.b=value, for example training.epochs=3")
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except (tomllib.TOMLDecodeError, ValueError):  # the latter: more lines, and so more values, than one
        value = text.strip()
    for key in keys[:-1]:
        inner = table.get(key, {})
        if isinstance(inner, str) and (key in _BARE_NAMES or keys[0] in _LISTED_PARTS):
            inner = {_BARE_NAMES.get(key, "use"): inner}
        if not isinstance(inner, Mapping):
            raise JobError(f"--set {override!r}: '{key}' is a value, not a table")
        table[key] = table = dict(inner)  # a copy: the table may be part of another job
    table[keys[-1]] = value


def _flat(section: Any) -> dict[str, Any]:
    table: dict[str, Any] = msgspec.structs.asdict(section)
    for extra in ("args", "settings"):
        table.update(table.pop(extra, {}))
    for key in ("use", "collate"):
        if table.get(key) is not None:
            table[key] = name_of(table[key])
    return {key: value for key, value in table.items() if value is not None}


def _toml_ready(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _toml_ready(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_toml_ready(inner) for inner in value]
    if isinstance(value, (str, int, float, bool, datetime.date, datetime.time)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # Unlike a part, an argument is not imported again by its name.
    return f"{LIVE_PREFIX}{name_of(value).removeprefix(LIVE_PREFIX)}"


def _leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            leaves.update(_leaves(value, f"{prefix}{key}."))
        else:
            leaves[prefix + key] = list(value) if isinstance(value, tuple) else value
    return leaves


def _short(use: Any) -> str:
    short = name_of(use).removeprefix(LIVE_PREFIX).rpartition(":")[2].rpartition(".")[2].strip("<>").lower()
    return "".join(c for c in short if ord(c) >= 32 and c not in "/\\") or "job"


def _set(job: Job, field: str, value: Any) -> None:
    msgspec.structs.force_setattr(job, field, value)
