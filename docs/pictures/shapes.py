"""What pictures are made of: boxes with words, lines and arrows, as an SVG that follows the reader's theme.

Each picture brings its own background, and follows the light or dark theme of the reader's system. Nothing is told by
colour alone: every shape has a word in it or beside it. Title and description are read out by screen readers.
"""

from __future__ import annotations

from html import escape

STYLE = """
text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; }
.small { font-size: 12px; } .head { font-weight: 600; }
.ground { fill: #fbfbf9; } .line { stroke: #57606a; stroke-width: 1.5; fill: none; } .tip { fill: #57606a; }
.box { stroke: #57606a; stroke-width: 1.5; } .plain { fill: #ffffff; }
.blue { fill: #cfe3fb; } .green { fill: #cdebd3; }
.yellow { fill: #fbe6b5; } .purple { fill: #e6d9f7; } .red { fill: #fbd3cf; } .grey { fill: #e7e9ec; }
.gone { stroke-dasharray: 5 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .ground { fill: #161b22; } .line { stroke: #9aa4af; } .tip { fill: #9aa4af; }
  .box { stroke: #9aa4af; } .plain { fill: #0d1117; } .blue { fill: #1d3f66; } .green { fill: #1f4a2b; }
  .yellow { fill: #54431a; } .purple { fill: #41305e; } .red { fill: #5e2a26; } .grey { fill: #30363d; }
}
"""


class Picture:
    """Shapes on a ground of a given size; each method adds one."""

    def __init__(self, name: str, width: int, height: int, title: str, description: str) -> None:
        self.name = name
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{width}" height="{height}" rx="8"/>',
        ]

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{style}">{escape(words, quote=False)}</text>'
        )

    def box(
        self, x: float, y: float, w: float, h: float, words: str = "", color: str = "plain", *, s: str = ""
    ) -> None:
        """Draw a box with its words in the middle, a line of text for each line."""
        self.parts.append(f'<rect class="box {color}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4"/>')
        lines = words.split("\n") if words else []
        for number, line in enumerate(lines):
            height = y + h / 2 + 5 + 17 * (number - (len(lines) - 1) / 2)
            self.text(x + w / 2, height, line, anchor="middle", style=s)

    def line(self, *points: tuple[float, float], style: str = "") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="line {style}" points="{path}"/>')

    def arrow(self, *points: tuple[float, float], style: str = "") -> None:
        """Draw a line through the points with a tip at its end. Its last piece is level or upright."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        self.line(*points[:-1], (x - 6 * dx, y - 6 * dy), style=style)
        tip = [(x, y), (x - 8 * dx + 5 * dy, y - 8 * dy + 5 * dx), (x - 8 * dx - 5 * dy, y - 8 * dy - 5 * dx)]
        self.parts.append(f'<polygon class="tip" points="{" ".join(f"{a:g},{b:g}" for a, b in tip)}"/>')

    def content(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"
