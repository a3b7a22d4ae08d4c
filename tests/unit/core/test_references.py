"""Parts by name: what a name leads to, and what a signature and its annotations accept."""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from cordee.core.errors import JobError
from cordee.core.references import Use, bind, construct, name_of, resolve


@pytest.fixture(autouse=True)
def unchanged_imports() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]
    sys.path[:] = path


# Use ---------------------------------------------------------------------------------------------------------


def test_a_part_may_be_a_name_a_table_or_a_live_object() -> None:
    assert Use.coerce("model", "mlp") == Use("mlp")
    assert Use.coerce("model", {"use": "mlp", "hidden": [3]}) == Use("mlp", hidden=[3])
    assert Use.coerce("model", len) == Use(len)
    given = Use("mlp", hidden=[3])
    assert Use.coerce("model", given) is given


def test_a_table_without_use_names_the_section() -> None:
    with pytest.raises(JobError, match=r"\[model\] needs the key 'use'"):
        Use.coerce("model", {"hidden": [3]})


def test_parts_compare_by_what_they_use_and_how() -> None:
    assert Use("mlp", a=1) == Use("mlp", a=1)
    assert hash(Use("mlp", a=1)) == hash(Use("mlp", a=1))
    assert Use("mlp", a=1) != Use("mlp", a=2)
    assert Use("mlp") != "mlp"
    assert repr(Use("mlp", a=1)) == "Use('mlp', a=1)"


def test_arguments_cannot_be_changed_afterwards() -> None:
    with pytest.raises(TypeError):
        Use("mlp", a=1).args["a"] = 2  # type: ignore[index]


# name_of -----------------------------------------------------------------------------------------------------


class Outer:
    class Inner:
        pass

    @classmethod
    def from_class(cls) -> Outer:
        return cls()

    def from_instance(self) -> None: ...


def test_names_that_can_be_imported_again() -> None:
    assert name_of(Outer) == f"{__name__}:Outer"
    assert name_of(Outer.Inner) == f"{__name__}:Outer.Inner"
    assert name_of(Outer.from_class) == f"{__name__}:Outer.from_class"
    assert name_of(random.Random) == "random:Random"


def test_what_cannot_be_imported_again_is_only_described() -> None:
    class Local: ...

    assert name_of(lambda: 0).startswith("live:")
    assert name_of(Local).startswith("live:") and name_of(Local).endswith("Local")
    assert name_of(functools.partial(int, 3)) == "live:partial"
    assert name_of(Outer()) == "live:Outer"
    assert name_of(Outer().from_instance).startswith("live:"), "its object would be lost"


def test_a_function_hidden_behind_another_of_its_name_is_only_described() -> None:
    @functools.wraps(test_names_that_can_be_imported_again)
    def wrapper() -> None: ...

    assert name_of(wrapper).startswith("live:")


def test_what_a_script_defines_is_named_by_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main = sys.modules["__main__"]
    made = type("Net", (), {"__module__": "__main__"})
    monkeypatch.setattr(main, "Net", made, raising=False)
    monkeypatch.setattr(main, "__file__", str(tmp_path / "train.py"), raising=False)
    assert name_of(made) == f"{tmp_path / 'train.py'}:Net"
    monkeypatch.delattr(main, "__file__")  # a notebook
    assert name_of(made) == "live:__main__.Net"


# resolve -----------------------------------------------------------------------------------------------------

BUILTINS: dict[str, Callable[..., Any]] = {"lenet": dict, "resnet": list}


def test_built_in_names_and_live_callables() -> None:
    assert resolve("model", "lenet", BUILTINS) is dict
    assert resolve("model", len, BUILTINS) is len


def test_module_and_callable() -> None:
    assert resolve("model", "random:Random", BUILTINS) is random.Random
    assert resolve("model", f"{__name__}:Outer.Inner", BUILTINS).__qualname__ == "Outer.Inner"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            "lenett",
            r"model.use = 'lenett' is not known; did you mean 'lenet'\? \(known: lenet, resnet, or any 'module:c",
        ),
        ("zzz", r"model.use = 'zzz' is not known \(known:"),
        ("no_such_module:Net", "no module 'no_such_module'"),
        ("os.no_such_module:Net", "no module 'os.no_such_module'"),
        ("random:Randon", r"'random' has no 'Randon'; did you mean 'Random'\?"),
        ("math:pi", "names a float, which cannot be called"),
        ("live:__main__.<lambda>", "run it again from that program, or name the part as 'module:callable'"),
        ("no_such_file.py:Net", "no file 'no_such_file.py'"),
        (":Net", "Empty module name"),
        ("random:", "'random' has no ''"),
        (5, "5 cannot be called"),
    ],
)
def test_what_leads_nowhere_says_why(use: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        resolve("model", use, BUILTINS)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_module_beside_the_job_with_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "my_sizes.py", "WIDTH = 3")
    write(
        tmp_path / "my_net.py", "import my_sizes\ndef Net():\n    import my_later\n    return my_sizes.WIDTH, my_later"
    )
    write(tmp_path / "my_later.py", "")
    net = resolve("model", "my_net:Net", {}, python_path=[str(tmp_path)])
    assert net()[0] == 3


def test_a_file_with_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "my_sizes2.py", "WIDTH = 4")
    path = write(tmp_path / "my-net.py", "import my_sizes2\nclass Net:\n    width = my_sizes2.WIDTH")
    net = resolve("model", f"{path}:Net", {})
    assert net.width == 4
    assert resolve("model", "my-net.py:Net", {}, python_path=[str(tmp_path)]) is net, "imported once"


def test_the_jobs_folder_is_searched_before_the_python_path(tmp_path: Path) -> None:
    write(tmp_path / "a" / "twice_there.py", "def Net(): return 'a'")
    write(tmp_path / "b" / "twice_there.py", "def Net(): return 'b'")
    sys.path.insert(0, str(tmp_path / "a"))
    assert resolve("model", "twice_there:Net", {}, python_path=[str(tmp_path / "b")])() == "b"


@pytest.mark.parametrize("use", ["{folder}/random.py:Net", "{folder}/colorsys.py:Net", "neighbour:Net"])
def test_a_file_named_like_a_standard_module_does_not_shadow_it(tmp_path: Path, use: str) -> None:
    sys.modules.pop("colorsys", None)  # not imported yet, unlike random
    for name in ("random", "colorsys", "neighbour"):
        write(tmp_path / f"{name}.py", "class Net: ...")
    assert resolve("model", use.format(folder=tmp_path), {}, python_path=[str(tmp_path)]).__name__ == "Net"
    import colorsys

    assert hasattr(colorsys, "rgb_to_hsv")
    assert sys.modules["random"] is random


@pytest.mark.parametrize("use", ["{folder}/broken_net.py:Net", "broken_net:Net"])
def test_a_module_that_fails_names_file_and_line(tmp_path: Path, use: str) -> None:
    path = write(tmp_path / "broken_net.py", "import math\n\nmath.sqrt(-1)\nclass Net: ...")
    for _ in range(2):  # the second try must not find the half of it that was imported
        with pytest.raises(JobError) as caught:
            resolve("model", use.format(folder=tmp_path), {}, python_path=[str(tmp_path)])
        assert f"raised ValueError: math domain error (at {path}:3)" in str(caught.value)
        assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Net(:\n", "SyntaxError.*broken_too.py, line 1"),
        (
            "import no_such_package\n",
            r"ModuleNotFoundError: .*'no_such_package' \(at .*broken_too.py:1\)",
        ),
        ("import sys\nsys.exit(3)\n", r"raised SystemExit: 3 \(at .*broken_too.py:2\)"),
    ],
)
def test_other_ways_for_a_module_to_fail(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "broken_too.py", text)
    with pytest.raises(JobError, match=message):
        resolve("model", f"{path}:Net", {})


# bind --------------------------------------------------------------------------------------------------------


def net(
    width: int,
    rate: float = 0.5,
    sizes: tuple[int, ...] = (),
    kind: Literal["a", "b"] = "a",
    name: str | None = None,
    flag: bool = False,
    either: list[int] | tuple[int, ...] = (),
    anything: Any = None,
) -> dict[str, Any]:
    return dict(locals())


def test_arguments_are_converted_to_their_annotations() -> None:
    made = bind("model", net, {"width": 3, "rate": 1, "sizes": [4, 5], "kind": "b", "either": [1], "anything": [1]})()
    assert made["sizes"] == (4, 5)
    assert isinstance(made["rate"], float)
    assert (made["width"], made["kind"], made["either"], made["anything"]) == (3, "b", [1], [1])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"width": "3"}, "model.width = '3' does not fit: expected 'int', got 'str'"),
        ({"width": 3.0}, "model.width = 3.0 does not fit"),
        ({"width": True}, "model.width = True does not fit"),
        ({"width": 3, "sizes": [1, "x"]}, r"model.sizes = \[1, 'x'\] does not fit"),
        ({"width": 3, "sizes": 4}, "model.sizes = 4 does not fit: expected 'array', got 'int'"),
        ({"width": 3, "kind": "c"}, "model.kind = 'c' does not fit"),
        ({"width": 3, "flag": 1}, "model.flag = 1 does not fit"),
        ({"width": 3, "name": 4}, "model.name = 4 does not fit"),
        ({}, "model needs 'width': set model.width"),
        ({"width": 3, "widht": 4}, r"model has no setting 'widht'; did you mean 'width'\? \(it takes: width, rate,"),
        ({"width": 3, "anything": "live:Tensor"}, "model.anything = 'live:Tensor': this job was made in Python"),
    ],
)
def test_what_does_not_fit_names_the_key(args: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        bind("model", net, args)


def test_what_cordee_provides_goes_where_it_is_asked_for() -> None:
    provided = {"width": 7, "input_shape": (1,)}
    assert bind("model", net, {}, provided)()["width"] == 7
    assert bind("model", net, {"width": 3}, provided)()["width"] == 3, "the user's own comes first"


def test_the_first_parameter_of_an_optimizer_is_left_to_the_caller() -> None:
    def sgd(params: list[int], lr: float) -> tuple[list[int], float]:
        return params, lr

    bound = bind("optimizer", sgd, {"lr": 1}, {"params": inspect.Parameter.empty})
    assert bound([1, 2]) == ([1, 2], 1.0)
    with pytest.raises(JobError, match=r"no setting 'param' \(it takes: lr\)"):
        bind("optimizer", sgd, {"param": 1, "lr": 1}, {"params": inspect.Parameter.empty})


def test_open_ended_signatures_take_everything() -> None:
    def make(width: int = 1, **others: Any) -> dict[str, Any]:
        return {"width": width, **others}

    assert bind("data", make, {"width": 2, "colour": "red"})() == {"width": 2, "colour": "red"}
    with pytest.raises(JobError, match=r"data\.width"):
        bind("data", make, {"width": "two"})


def test_positional_only_parameters_cannot_be_named() -> None:
    def make(first: int = 1, /, *, second: int = 2) -> tuple[int, int]:
        return first, second

    assert bind("data", make, {"second": 5})() == (1, 5)
    with pytest.raises(JobError, match="no setting 'first'"):
        bind("data", make, {"first": 5})


def test_a_class_is_checked_by_its_init() -> None:
    class Net:
        def __init__(self, sizes: tuple[int, ...]) -> None:
            self.sizes = sizes

    assert bind("model", Net, {"sizes": [1]})().sizes == (1,)
    with pytest.raises(JobError, match=r"model.sizes = 'x' does not fit"):
        bind("model", Net, {"sizes": "x"})


def test_no_settings_and_no_signature() -> None:
    with pytest.raises(JobError, match=r"no setting 'a' \(it takes no settings\)"):
        bind("model", lambda: 0, {"a": 1})
    assert bind("model", dict, {"a": 1})() == {"a": 1}, "a builtin whose signature is not known is not checked"


def test_what_a_part_raises_becomes_a_message() -> None:
    def refuse() -> None:
        raise ValueError("no such thing")

    with pytest.raises(JobError, match=rf"loss.use = 'my:loss' raised ValueError: no such thing \(at {__file__}:"):
        construct("loss", "my:loss", refuse)

    def mistake() -> None:
        raise JobError("loss.a is wrong")

    with pytest.raises(JobError, match=r"^loss.a is wrong$"):
        construct("loss", "my:loss", mistake)
