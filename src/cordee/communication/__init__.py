"""Communication layer: the shared-memory backend for `torch.distributed`, the secure channel, the wire format.

shared_memory/   the backend `cordee`
"""
