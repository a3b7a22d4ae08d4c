"""A worker's connection to the coordinator of a federated run."""

from __future__ import annotations

from typing import Literal

from cordee.cluster.member_link import MemberSpec
from cordee.cluster.members import GIVEN_UP
from cordee.communication.channel import RefusedError
from cordee.communication.messages import Message
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError
from cordee.runs.dispatched.link import DispatchLink
from cordee.runs.federated.messages import FEDERATED, LIMITS, Ping


class FederatedLink(DispatchLink):
    """Joins the run, shows that this process lives, and asks for tasks."""

    def __init__(self, spec: MemberSpec, num_returns: int = 0) -> None:
        super().__init__(spec, num_returns, Codec(FEDERATED, LIMITS))

    def _reach(self, when: Literal["ask", "answered"], message: Message) -> None:
        pass  # tests kill the processes of this kind of run from outside

    def is_given_up(self) -> bool:
        """Whether the coordinator does not know this process any more: it was taken for lost, being frozen."""
        try:
            self.ask(Ping())
        except RefusedError as error:
            return error.reason in GIVEN_UP
        except CommunicationError:
            pass
        return False
