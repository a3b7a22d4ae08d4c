"""Two revisions side by side: exported into folders, and each with an environment in which it is the one imported."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare.processes import run_command

REPOSITORY = Path(__file__).resolve().parents[2]
# Read by Cordée or by torch: what the caller has set must not decide what is compared.
HIDDEN_VARIABLES = ("PYTHON", "CORDEE_", "DMLC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
INSTALL_TIMEOUT_S = 1800.0
IMPORT_TIMEOUT_S = 300.0


class CheckoutError(Exception):
    """A revision that is not there, or that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """One side of the comparison."""

    side: str  # before or after
    revision: str  # as the user gave it
    commit: str  # what it stands for; of a folder its path
    folder: Path
    python: str
    environment: dict[str, str]

    def describe(self) -> str:
        return self.commit if self.revision in self.commit else f"{self.revision} ({self.commit[:12]})"


def check_out_both(before: str, after: str, folder: Path) -> tuple[Checkout, Checkout]:
    """Export both into `folder` and make them importable, each by itself.

    Both use the packages of this interpreter, unless their requirements differ: then each has a virtual environment.
    Raises CheckoutError if a revision is unknown or cannot be imported.
    """
    sides = {"before": before, "after": after}
    # Both are looked up before either is exported: a typing mistake should not take a second to be reported.
    found = {side: _find(revision) for side, revision in sides.items()}
    for side, origin in found.items():
        _export(origin, folder / side)
    is_alike = _requirements(folder / "before") == _requirements(folder / "after")
    if not is_alike:
        print("the requirements differ: a virtual environment is made for each side, which takes minutes", flush=True)
    made = []
    for side, revision in sides.items():
        checkout = _install(side, revision, str(found[side]), folder / side, needs_own_packages=not is_alike)
        _check_import(checkout)
        made.append(checkout)
    return made[0], made[1]


def _find(revision: str) -> str | Path:
    """Return the commit that `revision` names, or the folder, if it is the path of a checkout."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        return answer.stdout.strip()
    path = Path(revision)
    if (path / "pyproject.toml").is_file() and (path / "src").is_dir():
        return path.resolve()
    raise CheckoutError(
        f"{revision!r} is neither a revision of {REPOSITORY} nor the folder of a checkout: "
        f"give a branch, a tag, a commit, or a path such as '.'"
    )


def _export(origin: str | Path, folder: Path) -> None:
    if isinstance(origin, Path):
        folder.mkdir(parents=True)
        # A copy: the comparison should not see what is edited while it runs.
        shutil.copytree(origin / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
            if (origin / name).is_file():
                shutil.copy(origin / name, folder / name)
        return
    packed = subprocess.run(["git", "archive", origin], cwd=REPOSITORY, capture_output=True, check=False)
    if packed.returncode != 0:
        raise CheckoutError(f"git archive {origin}: {packed.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    if not (folder / "pyproject.toml").is_file() or not (folder / "src").is_dir():
        raise CheckoutError(f"{origin} has no pyproject.toml and src/: it cannot be compared")


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    return project


def _requirements(folder: Path) -> tuple[list[str], list[str]]:
    """Return what a checkout says about the packages it needs: its dependencies and its constraints."""
    constraints = folder / "constraints.txt"
    lines = constraints.read_text().splitlines() if constraints.is_file() else []
    pins = [line.split("#")[0].strip() for line in lines]
    return sorted(_project(folder).get("dependencies", [])), sorted(pin for pin in pins if pin)


def _install(side: str, revision: str, commit: str, folder: Path, *, needs_own_packages: bool) -> Checkout:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(HIDDEN_VARIABLES)}
    environment |= {"CORDEE_CACHE": str(folder / "cache"), "NO_COLOR": "1"}
    python = sys.executable
    if needs_own_packages:
        python = _make_environment(side, folder, environment)
    else:
        _write_metadata(folder)
        environment["PYTHONPATH"] = str(folder / "src")
    return Checkout(
        side=side, revision=revision, commit=commit, folder=folder, python=python, environment=environment
    )  # fmt: skip


def _make_environment(side: str, folder: Path, environment: dict[str, str]) -> str:
    python = folder / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["-c", str(folder / "constraints.txt")] if (folder / "constraints.txt").is_file() else []
    for command in ([sys.executable, "-m", "venv", str(folder / "venv")], [*pip, *constraints, str(folder)]):
        print(f"{side}: {' '.join(command)}", flush=True)
        ended = run_command(command, environment=environment, folder=folder, timeout_s=INSTALL_TIMEOUT_S)
        if ended.exit_code != 0:
            raise CheckoutError(f"{side}: {' '.join(command)} failed:\n{ended.last_words()}")
    return str(python)


def _write_metadata(folder: Path) -> None:
    """Write what pip would leave about the package, for its entry points.

    torch loads the entry point of every installed `cordee` when it is imported. Without this it would find that of the
    one in this interpreter's environment, whose module the checkout may no longer have. The first one on the path wins.
    """
    metadata = folder / "src" / "cordee-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cordee\nVersion: 0\n")
    lines = []
    for group, entries in _project(folder).get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join([*lines, ""]))


def _check_import(checkout: Checkout) -> None:
    command = [checkout.python, "-c", "import cordee, torch; print(cordee.__file__)"]
    ended = run_command(command, environment=checkout.environment, folder=checkout.folder, timeout_s=IMPORT_TIMEOUT_S)
    if ended.exit_code != 0:
        raise CheckoutError(f"{checkout.revision} cannot be imported:\n{ended.last_words()}")
    imported = Path(ended.stdout.split()[-1])
    if not imported.is_relative_to(checkout.folder):
        raise CheckoutError(f"{checkout.revision} is in {checkout.folder}, but {imported} is imported")
