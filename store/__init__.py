"""What outlives a process: checkpoints, exports, and their way to the Hub.

    checkpoint.py   saves, finds and loads the checkpoints of a run
    sealed.py       the format on the disk: safetensors, JSON, a manifest with every hash
    uploads.py      the queue to the Hub, behind the run

The invariant: a folder is a checkpoint only when every byte of it is proven, and nothing is deleted before something that
does its service is; there is no pickle anywhere.
"""

__all__ = ["checkpoint", "uploads"]
