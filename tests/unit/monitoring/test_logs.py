"""The log of a worker: there while the run lasts, gone from logging afterwards."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from cordee.core.errors import RunDirectoryError
from cordee.monitoring import setup_logging


def test_messages_go_to_the_file_only_while_the_block_lasts(tmp_path):
    logger, path = logging.getLogger("cordee.trainer"), tmp_path / "logs" / "worker-0.log"
    with setup_logging(path):
        logger.info("inside")
        logger.debug("detail")
    logger.warning("after")
    text = path.read_text()
    assert "INFO    cordee.trainer: inside" in text
    assert "detail" not in text
    assert "after" not in text
    assert logging.getLogger("cordee").handlers == []
    assert logging.getLogger("cordee").level == logging.NOTSET


def test_verbose_records_debug_messages_and_a_resumed_run_appends(tmp_path):
    path = tmp_path / "worker-0.log"
    for _ in range(2):
        with setup_logging(path, verbose=True):
            logging.getLogger("cordee").debug("detail")
    assert path.read_text().count("detail") == 2


def test_tracebacks_are_recorded(tmp_path):
    with setup_logging(tmp_path / "log"):
        try:
            raise ValueError("in the user's model")
        except ValueError:
            logging.getLogger("cordee").exception("the run failed")
    assert "ValueError: in the user's model" in (tmp_path / "log").read_text()


def test_logging_is_restored_when_the_block_fails(tmp_path):
    show = warnings.showwarning
    with pytest.raises(RuntimeError), setup_logging(tmp_path / "log"):
        raise RuntimeError
    assert logging.getLogger("cordee").handlers == []
    assert warnings.showwarning is show


def test_warnings_reach_both_the_file_and_the_screen(tmp_path):
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: shown.append(str(message))
        with setup_logging(tmp_path / "log"):
            warnings.warn("the user's model is odd", UserWarning, stacklevel=1)
    assert shown == ["the user's model is odd"]
    assert "UserWarning: the user's model is odd" in (tmp_path / "log").read_text()


def test_a_log_that_cannot_be_opened_is_the_run_directorys_fault(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunDirectoryError, match="cannot write the log"),
        setup_logging(tmp_path / "file" / "log", is_required=True),
    ):
        pass


def test_a_log_that_cannot_be_opened_later_is_said_and_stops_nothing(tmp_path, capsys):
    (tmp_path / "file").touch()
    with setup_logging(tmp_path / "file" / "log"):
        logging.getLogger("cordee").info("lost")
    assert "warning: cannot write the log" in capsys.readouterr().err


def test_a_full_disk_that_has_the_screen_as_well_stops_nothing(small_disk, fill, monkeypatch):
    with (small_disk / "screen").open("w", buffering=1) as screen, setup_logging(small_disk / "log"):
        monkeypatch.setattr(sys, "stderr", screen)
        fill(small_disk)
        logging.getLogger("cordee").info("x" * 10_000)
        logging.getLogger("cordee").info("second")
        monkeypatch.undo()
        (small_disk / "filler").unlink(missing_ok=True)


def test_a_full_disk_is_said_once_and_stops_nothing(small_disk, fill, capsys):
    logger = logging.getLogger("cordee")
    with setup_logging(small_disk / "log"):
        logger.info("first")
        fill(small_disk)
        for _ in range(200):
            logger.info("x" * 200)
    error = capsys.readouterr().err
    assert error.count("no space left on device") == 1
    assert "Traceback" not in error
    assert (small_disk / "log").read_text().startswith("2")
