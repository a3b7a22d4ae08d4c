"""What commands print, and how one ends that was interrupted."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from cordee.core.env import wants_colour
from cordee.core.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import RenderableType


_MOST_COLUMNS = 100


def print_text(text: str) -> None:
    """Print to stdout; that the reader has gone, as in `cordee runs | head`, is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def wrapped(start: str, text: str) -> str:
    """Return a text behind `start`, in lines as wide as the terminal; further lines begin below the text."""
    import shutil
    import textwrap

    width = max(40, min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns))
    return textwrap.fill(text, width, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def print_json(value: Any) -> None:
    """Print `value`, a struct or plain values, as indented JSON; paths in it as text."""
    import msgspec

    print_text(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode())


def print_table(table: RenderableType) -> None:
    """Print what rich lays out, as wide as the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(table)
    print_text(captured.get().rstrip("\n"))


def print_note(doing: str) -> None:
    """Print to stderr what takes a while."""
    print(f"{doing} ...", file=sys.stderr, flush=True)


def print_error(message: str) -> None:
    """Print to stderr, behind the program's name."""
    style, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() and wants_colour() else ("", "")
    print(f"{style}cordee:{plain} {message}", file=sys.stderr)


def end_interrupted() -> NoReturn:
    """End the program after Ctrl-C."""
    print_error("interrupted")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    # All files and processes are closed by now. Taking torch down as well takes half a second, and on a
    # busy machine (load 7 on 2 cores) 2-4 s, in which it would look as if Ctrl-C had not been heard.
    os._exit(INTERRUPTED)
