"""Ctrl-C and SIGTERM as requests, by signals that this process sends to itself."""

from __future__ import annotations

import os
import signal

import pytest

from cordee.core.interrupts import InterruptFlag


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_the_first_signal_raises_the_flag(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    asked: list[None] = []
    with InterruptFlag(lambda: asked.append(None)) as flag:
        assert not flag() and not InterruptFlag.any_raised
        os.kill(os.getpid(), number)
        assert flag() and InterruptFlag.any_raised and len(asked) == 1
    assert signal.getsignal(number) is before
    with InterruptFlag(lambda: None):
        assert not InterruptFlag.any_raised


def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_does_not() -> None:
    with InterruptFlag(lambda: None):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
