"""`cordee new`: the examples, which the package carries, as the first files of one's own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from cordee.core.errors import JobError, StorageError, nearest


class Template(NamedTuple):
    """Files of `examples` that belong together; the first is what is run."""

    summary: str
    files: tuple[str, ...]
    command: str = "cordee train {}"  # how the first file is run


TEMPLATES = {
    "digits": Template("a job file: an MLP on handwritten digits, which need no download", ("digits.toml",)),
    "images": Template("a job file: LeNet on Fashion-MNIST", ("fashion_mnist.toml",)),
    "own": Template("a job file with a model, a Dataset and a loss of your own", ("own.toml", "own.py")),
    "parquet": Template(
        "a job file for rows of Parquet files, and a script that writes such files",
        ("parquet.toml", "parquet_files.py"),
        "python parquet_files.py && cordee train {}",
    ),
    "text": Template(
        "a job file: a small GPT on text files, and a script that writes such files",
        ("text.toml", "text_files.py"),
        "python text_files.py && cordee train {}",
    ),
    "federated": Template("a job file: 20 clients that keep their data, simulated on two workers", ("federated.toml",)),
    "online": Template(
        "a job file for data that keeps arriving, and a script that writes such data",
        ("online.toml", "online_feed.py"),
        "(python online_feed.py incoming & cordee train {})",  # in brackets: `cd FOLDER &&` comes before both
    ),
    "server": Template("a job file: two workers and parameter servers, asynchronous", ("server.toml",)),
    "loop": Template("a training loop of your own, on any number of workers", ("own_loop.py",), "cordee run -n 2 {}"),
}


class Made(NamedTuple):
    """What was written, and how it is run."""

    files: list[Path]
    command: str


def write_template(name: str, folder: Path) -> Made:
    """Write the files of a template into a folder. Raises JobError for an unknown name, and if a file is there."""
    if name not in TEMPLATES:
        raise JobError(f"there is no template {name!r}{nearest(name, TEMPLATES)}: it is one of {', '.join(TEMPLATES)}")
    template, source = TEMPLATES[name], examples_folder()
    targets = [folder / file for file in template.files]
    if there := [str(path) for path in targets if path.exists()]:
        exist = "exists" if len(there) == 1 else "exist"
        raise JobError(f"{' and '.join(there)} {exist} already: choose another folder, as in `cordee new FOLDER`")
    contents = [(source / file).read_text() for file in template.files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(targets, contents, strict=True):
            path.write_text(content.replace("examples/", ""))  # commands in comments are those of the repository's root
    except OSError as error:
        raise StorageError(f"cannot write into {folder}: {error.strerror}") from error
    command = template.command.format(template.files[0])
    return Made(targets, command if folder == Path() else f"cd {shlex.quote(str(folder))} && {command}")


def examples_folder() -> Path:
    """Return where the examples are: in an installed package inside of it, in a checkout at its root."""
    package = Path(__file__).parents[1]
    inside = package / "examples"
    return inside if inside.is_dir() else package.parents[1] / "examples"
