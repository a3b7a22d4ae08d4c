"""Events in, sinks out: progress on the screen, the run directory and what is in it."""

from cordee.monitoring.events import AnyEvent, UnreadableLine
from cordee.monitoring.jsonl import JsonlSink, follow, read_events, read_lines
from cordee.monitoring.logs import WorkerLog, setup_logging
from cordee.monitoring.monitor import Monitor, Sink
from cordee.monitoring.progress import ProgressSink
from cordee.monitoring.report import render_result, render_runs
from cordee.monitoring.run_directory import RunDirectory, new_run_path
from cordee.monitoring.run_list import RunInfo, find_run, inspect_run, list_runs
from cordee.monitoring.summary import Summary
from cordee.monitoring.tensorboard import TensorBoardSink

__all__ = [
    "AnyEvent",
    "JsonlSink",
    "Monitor",
    "ProgressSink",
    "RunDirectory",
    "RunInfo",
    "Sink",
    "Summary",
    "TensorBoardSink",
    "UnreadableLine",
    "WorkerLog",
    "find_run",
    "follow",
    "inspect_run",
    "list_runs",
    "new_run_path",
    "read_events",
    "read_lines",
    "render_result",
    "render_runs",
    "setup_logging",
]
