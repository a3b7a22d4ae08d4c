"""Outcomes of a simulation as a picture: the charts, below each other, as PNG."""

from __future__ import annotations

import functools
import io
import unicodedata
from collections.abc import Sequence
from typing import Any

from cordee.core.errors import MissingExtraError
from cordee.planner.simulator.chart import HEIGHT, WIDTH, Curve, Line, Shape, Word, charts_of
from cordee.planner.simulator.crowd import ClusterOutcome
from cordee.planner.simulator.drawing import describe
from cordee.planner.simulator.scenario import Scenario

SCALE = 2  # pixels for each unit of a chart
HEAD = 56  # units above the charts
_SIZE, _LARGE = 13, 18
_FONT = "DejaVuSans.ttf"  # on most systems
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def draw_picture(scenario: Scenario, outcomes: Sequence[ClusterOutcome]) -> bytes:
    """Return the PNG file. Raises MissingExtraError without Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise MissingExtraError("a picture", "pictures") from None
    charts = charts_of(scenario, outcomes)
    image = Image.new("RGB", (SCALE * WIDTH, SCALE * (HEAD + HEIGHT * len(charts))), "white")
    brush = ImageDraw.Draw(image)
    name, sentence = _spelt(scenario.name or scenario.strategy), _spelt(describe(scenario))
    brush.text((SCALE * 16, SCALE * 24), name, "#222", _font(_LARGE), "ls")
    brush.text((SCALE * 16, SCALE * 44), sentence, "#333", _fitting(sentence), "ls")
    for number, shapes in enumerate(charts):
        for shape in shapes:
            _draw(image, brush, shape, HEAD + number * HEIGHT)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _draw(image: Any, brush: Any, shape: Shape, top: float) -> None:
    """Draw a shape of the chart that begins `top` units below the picture's edge."""
    from PIL import Image, ImageDraw

    match shape:
        case Line(x1, x2, y):
            brush.line(_pixels([(x1, top + y), (x2, top + y)]), "#dddddd", SCALE)
        case Curve(points, colour):
            brush.line(_pixels([(x, top + y) for x, y in points]), colour, 2 * SCALE, joint="curve")
            for x, y in points:
                brush.circle((SCALE * x, SCALE * (top + y)), 3 * SCALE, colour)
        case Word(x, y, text, anchor, is_bold, colour, is_upright):
            font, stroke = _font(_SIZE), 0.4 * SCALE if is_bold else 0
            if not is_upright:
                place = (SCALE * x, SCALE * (top + y))
                brush.text(place, text, colour, font, _ANCHORS[anchor], stroke_width=stroke)
                return
            strip = Image.new("RGB", (int(font.getlength(text)) + 2, 2 * SCALE * _SIZE), "white")
            ImageDraw.Draw(strip).text((0, SCALE * _SIZE), text, colour, font, "ls")
            turned = strip.rotate(90, expand=True)
            image.paste(turned, (int(SCALE * (x - _SIZE)), int(SCALE * (top + y) - turned.height / 2)))


def _pixels(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(SCALE * x, SCALE * y) for x, y in points]


def _font(size: float) -> Any:
    from PIL import ImageFont

    if _has_letters():
        return ImageFont.truetype(_FONT, SCALE * size)
    return ImageFont.load_default(SCALE * size)


@functools.cache
def _has_letters() -> bool:
    """Return whether there is a font with all letters; Pillow's own has those of English."""
    from PIL import ImageFont

    try:
        ImageFont.truetype(_FONT, SCALE * _SIZE)
    except OSError:
        return False
    return True


def _spelt(text: str) -> str:
    if _has_letters():
        return text
    return unicodedata.normalize("NFKD", text.replace("µ", "u")).encode("ascii", "ignore").decode()


def _fitting(text: str) -> Any:
    """Return a font in which the text is not wider than the picture."""
    width = _font(_SIZE).getlength(text)
    return _font(_SIZE * min(1.0, SCALE * (WIDTH - 32) / width))
