"""The manual holds together: links lead somewhere, pictures are those of the script, snippets name what exists."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import cordee
from cordee.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
MANUAL = sorted(DOCS.rglob("*.md"))
PAGES = [
    *MANUAL,
    *(ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    ROOT / "examples/README.md",
    ROOT / "benchmarks/README.md",
]
KINDS = ("tutorials", "how-to", "concepts", "reference")
LINK = re.compile(r"\]\(([^)\s]*)\)")
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", "_", code[0]), FENCED.sub("", text))


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as the builder and code hosts make them."""
    headings = re.findall(r"^#{1,6} (.+)$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower() for heading in headings)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}


def snippets(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, (indent, found, content) in enumerate(FENCED.findall(page.read_text())):
            if found == language:
                yield f"{name_of(page)}-{number}", re.sub(rf"^{indent}", "", content, flags=re.MULTILINE)


def test_links_lead_somewhere() -> None:
    assert [f"{name_of(page)}: {link}" for page in PAGES for link in broken_links(page)] == []


def broken_links(page: Path) -> Iterator[str]:
    """Yield the links to files and headings that are not there."""
    for link in LINK.findall(without_code(page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `name`: some words\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-name-some-words) [b](other.md#none) [c](none.md) `[d](none.md)` [e](#none)")
    assert list(broken_links(page)) == ["other.md#none", "none.md", "#none"]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"[- ] (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in MANUAL)


def test_every_page_is_of_one_kind() -> None:
    others = {page.name for page in MANUAL if page.relative_to(DOCS).parts[0] not in (*KINDS, "decisions")}
    assert others == {"index.md", "benchmarks.md"}, "a page is in the folder of its kind"
    for page in (DOCS / "concepts").glob("*.md"):
        assert "../pictures/" in page.read_text(), f"{page.name} has no drawing"


def test_pictures_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PICTURES)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import draw  # type: ignore[import-not-found]

    made = {f"{picture.name}.svg": picture.content() for picture in (function() for function in draw.PICTURES)}
    assert made == {path.name: path.read_text() for path in PICTURES.glob("*.svg")}, "run python docs/pictures/draw.py"
    text = "".join(page.read_text() for page in MANUAL)
    for name, content in made.items():
        assert f"pictures/{name}" in text, f"{name} is on no page"
        assert "<title " in content and "<desc " in content


def test_pictures_have_words_for_those_who_do_not_see_them() -> None:
    for page in PAGES:
        for words in re.findall(r"!\[([^\]]*)\]\(", without_code(page.read_text())):
            assert len(words) > 10, f"{name_of(page)}: {words!r}"


def test_python_is_python() -> None:
    for where, content in snippets("python"):
        ast.parse(content, where)


def test_settings_are_known() -> None:
    wrong = []
    for where, content in snippets("toml"):
        table = tomllib.loads(content)
        try:
            if "devices" not in table:  # of a cluster file
                cordee.Job.from_dict({"model": "mlp", "data": "digits", **table})
        except cordee.CordeeError as error:
            wrong.append(f"{where}: {error}")
    assert wrong == []


def test_commands_and_options_exist() -> None:
    known: Any = typer.main.get_command(app)
    wrong = []
    for where, content in snippets("bash"):
        for words in commands(content):
            if words[0] in ("--help", "--version", "--install-completion"):
                continue
            if words[0] not in known.commands:
                wrong.append(f"{where}: cordee {words[0]}")
                continue
            if words[0] in ("run", "worker"):  # what follows the script is the script's
                words = words[: next((at for at, each in enumerate(words) if each.endswith(".py")), len(words))]
            options = {option for parameter in known.commands[words[0]].params for option in parameter.opts}
            given = (word.partition("=")[0] for word in words[1:] if word.startswith("-") and word != "-")
            wrong += [f"{where}: {option} of cordee {words[0]}" for option in given if option not in options]
    assert wrong == []


def commands(content: str) -> Iterator[list[str]]:
    """Yield the words after `cordee` of each call of the command."""
    for line in content.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|\||[|;]", line):
            found = re.search(r"(?:^|\s)cordee (?!<)(.*)", part)
            if found and not part.lstrip().startswith("#") and "import cordee" not in part:
                yield [word for word in shlex.split(found[1], comments=True) if word not in ("&", "…")]
