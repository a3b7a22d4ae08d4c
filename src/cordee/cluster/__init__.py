"""Who trains together, and the engines that start them."""

from cordee.cluster.team import Team

__all__ = ["Team"]
