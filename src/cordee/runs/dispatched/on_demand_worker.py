"""A worker of a run with work on demand, whatever the work is: it joins, works, and joins again if it was given up."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cordee.cluster.member_link import MemberSpec, open_timeline
from cordee.cluster.members import REPLACED
from cordee.communication.channel import RefusedError
from cordee.core.errors import CommunicationError
from cordee.monitoring import setup_logging
from cordee.monitoring.timeline import Timeline
from cordee.runs.dispatched.link import DispatchLink

log = logging.getLogger("cordee.worker")

Link = TypeVar("Link", bound=DispatchLink)


@dataclass(frozen=True)
class Attempt(Generic[Link]):
    """One membership of a worker, from its joining to its end."""

    link: Link
    stack: contextlib.ExitStack  # is closed at the end
    leave_asked: threading.Event
    timeline: Timeline

    def join(self) -> None:
        self.timeline.enter("joining")
        self.link.join()


class _GivenUpError(Exception):
    """This worker was taken for lost, and may join again."""


def work_until_ended(
    spec: MemberSpec, make_link: Callable[[MemberSpec, int], Link], work: Callable[[Attempt[Link]], None]
) -> Exception | None:
    """Call `work` until the run ends; return why this worker could not continue, if it could not."""
    leave_asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: leave_asked.set())  # a spot instance, Slurm, Kubernetes
    # The launcher asks, when it is time; one that it did not start is asked by its user.
    interrupted = (lambda number, frame: leave_asked.set()) if spec.is_external else signal.SIG_IGN
    signal.signal(signal.SIGINT, interrupted)
    with setup_logging(spec.log_file):
        num_returns = 0
        while True:
            with make_link(spec, num_returns) as link:
                problem = _work_once(spec, link, leave_asked, work)
            if not isinstance(problem, _GivenUpError):
                return problem
            log.warning("this worker was given up because it could not be heard; it joins again")
            num_returns += 1


def _work_once(
    spec: MemberSpec, link: Link, leave_asked: threading.Event, work: Callable[[Attempt[Link]], None]
) -> Exception | None:
    """Work; return why this worker could not continue, or that it was given up and may join again."""
    with contextlib.ExitStack() as stack:
        timeline = stack.enter_context(contextlib.closing(open_timeline(spec, link)))
        timeline.enter("loading")
        try:
            work(Attempt(link, stack, leave_asked, timeline))
            link.leave()
        except Exception as error:
            is_replaced = isinstance(error, RefusedError) and error.reason == REPLACED
            if isinstance(error, CommunicationError) and not is_replaced and link.is_given_up():
                return _GivenUpError()
            log.exception("%s cannot continue", spec.name)
            link.fail(error)
            return error
    return None
