"""The backend `cordee` for `torch.distributed`: one host's workers talk through shared memory.

Light to import: the modules that do the work are loaded when the first process group is formed.
"""

from cordee.communication.shared_memory.registration import BACKEND_NAME, BackendSettings, register

__all__ = ["BACKEND_NAME", "BackendSettings", "register"]
