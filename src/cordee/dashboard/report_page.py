"""Pages that need nothing else: the modules of the dashboard with the data in them, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style></head>
<body><main id="main"><h1>{title}</h1></main>
<script type="application/json" id="data">{data}</script>
<script>
{{
{script}
}}
</script></body></html>
"""


def render_page(title: str, data: Any, script: str) -> str:
    """Return a page whose element `data` has `data` as JSON, and which runs a script of `pages` on it."""
    pages = Path(__file__).parent / "pages"
    modules = [(pages / name).read_text() for name in ("format.js", "chart.js", script)]
    # "</script>" in a name would end the element: JSON may write '<' as an escape.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return _PAGE.format(
        title=_escape(title),
        style=(pages / "style.css").read_text(),
        data=text,
        script="\n".join(_without_modules(module) for module in modules),
    )


def _without_modules(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith("import ")]
    return "\n".join(line.removeprefix("export ") for line in lines)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
