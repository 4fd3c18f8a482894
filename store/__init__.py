"""What outlives a process: checkpoints, exports, and their way to the Hub.

    store.py     Store: load, save, poll, export, publish, close; open_store: what a run goes on from
    sealed.py    the format on the disk: safetensors, JSON, a manifest with every hash
    folder.py    a run's folder: its lock, whose it is, what stays in it
    saver.py     one save in flight
    finder.py    the newest checkpoint that is whole, and loading it
    export.py    weights alone
    uploads.py   the queue to the Hub, behind the run

The invariant: a folder is a checkpoint only when every byte of it is proven, and nothing is deleted before something that
does its service is; there is no pickle anywhere.
"""

from .export import read_export, read_model
from .sealed import CheckpointError, read_state, verify
from .store import Saved, Store, open_store

__all__ = [
    "CheckpointError", "Saved", "Store", "open_store", "read_export", "read_model", "read_state",
    "verify",
]  # fmt: skip
