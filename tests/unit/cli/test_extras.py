"""Commands whose packages are not installed say in one line which extra to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cordee.monitoring import RunDirectory, Summary

# A module that is None in sys.modules cannot be imported.
WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
sys.argv[1:] = sys.argv[2:]
from cordee.cli.entry import main
main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        with RunDirectory.create(tmp_path / "runs" / name, 'name = "x"\n') as run:
            run.write_summary(Summary(status="completed", strategy="single", steps=1))
    (tmp_path / "job.toml").write_text('name = "x"\n[model]\nuse = "mlp"\n[data]\nuse = "digits"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("starlette", ["dashboard"], "dashboard"),
        ("uvicorn", ["dashboard", "a"], "dashboard"),
        ("starlette", ["train", "job.toml", "--dashboard"], "dashboard"),
        ("optuna", ["tune", "job.toml", "--search", "optimizer.lr=log:1e-4..1e-1"], "tune"),
        ("textual", ["watch", "a"], "watch"),
        ("matplotlib", ["compare", "runs/a", "runs/b", "-o", "c.html", "--png", "c.png"], "report"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(folder: Path, missing: str, arguments: list[str], extra: str) -> None:
    master, slave = os.openpty()  # `watch` wants a terminal
    try:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, missing, *arguments],
            cwd=folder, stdin=slave, stdout=slave, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(slave)
        os.close(master)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"[{extra}]" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (folder / "runs" / "tune-x").exists()
