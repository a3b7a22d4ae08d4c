"""The page of the Python interface says what the docstrings say."""

from __future__ import annotations

from python_page import PAGE, with_made


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert with_made(page) == page, "run python tests/unit/python_page.py"
