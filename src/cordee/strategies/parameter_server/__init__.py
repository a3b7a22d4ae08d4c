"""`parameter_server`: parameters on servers in slices, workers that push gradients and pull parameters."""

from cordee.strategies.parameter_server.settings import ParameterServerSettings
from cordee.strategies.parameter_server.strategy import ParameterServer

__all__ = ["ParameterServer", "ParameterServerSettings"]
