"""Save, verify, load and export the state of a run."""

from cordee.checkpoint.export import export
from cordee.checkpoint.optimizer import load_optimizer_state, optimizer_state, pack_values, unpack_values
from cordee.checkpoint.reading import (
    Loaded,
    list_checkpoints,
    load,
    load_first_whole,
    load_newest,
    looks_whole,
    read_piece,
    refuse_link,
)
from cordee.checkpoint.sharing import (
    Comparison,
    Digest,
    digest_state,
    receive_state,
    send_state,
    share_state,
    share_value,
)
from cordee.checkpoint.state import State, buffer_names, load_model_state, model_state, weights_sha256
from cordee.checkpoint.writing import CheckpointWriter, Copies, Draft, Folder, Request, Saved, Store, remove_stale, save

__all__ = [
    "CheckpointWriter",
    "Comparison",
    "Copies",
    "Digest",
    "Draft",
    "Folder",
    "Loaded",
    "Request",
    "Saved",
    "State",
    "Store",
    "buffer_names",
    "digest_state",
    "export",
    "list_checkpoints",
    "load",
    "load_first_whole",
    "load_model_state",
    "load_newest",
    "load_optimizer_state",
    "looks_whole",
    "model_state",
    "optimizer_state",
    "pack_values",
    "read_piece",
    "receive_state",
    "refuse_link",
    "remove_stale",
    "save",
    "send_state",
    "share_state",
    "share_value",
    "unpack_values",
    "weights_sha256",
]
