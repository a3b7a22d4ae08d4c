"""The table of events in docs/reference/monitoring.md, made of the structs. Run as a script, it writes the table."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from cordee.monitoring.events import EVENT_TYPES, RunEnded

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "monitoring.md"
BEGIN, END = "<!-- events: made by tests/unit/monitoring/event_table.py -->\n", "<!-- end of events -->\n"
FIELD = re.compile(r"^    (\w+): .*?(?:  # (.*))?$", re.MULTILINE)


def render() -> str:
    """Return the table."""
    rows = ["| `type` | fields | when |", "|---|---|---|"]
    for kind, struct in EVENT_TYPES.items():
        when = " ".join((inspect.getdoc(struct) or "").split())
        rows.append(f"| `{kind}` | {'' if struct is RunEnded else _fields(struct)} | {when} |")
    return "\n".join(rows) + "\n"


def _fields(struct: type) -> str:
    fields = FIELD.findall(inspect.getsource(struct))
    return ", ".join(f"`{name}`" + (f" ({comment})" if comment else "") for name, comment in fields)


def with_table(page: str) -> str:
    """Return the page with the table as it has to be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + render() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
