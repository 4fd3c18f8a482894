"""Where a run goes on: the newest checkpoint that is whole, here or on the Hub, and its way into live tensors."""

import os
from functools import partial

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from .folder import by_serial, serial_of, step_of
from .sealed import CheckpointError, compare, layout_of, read_manifest, read_state, saved_tensors, verify
from .uploads import patiently


class Finder:
    """Looks for the newest checkpoint of a Folder's run. `hub` is rank 0's OnHub, where there is one."""

    def __init__(self, folder, agree, hub, published: bool, resume: str, log):
        self.folder, self.agree, self.hub, self.published = folder, agree, hub, published
        self.resume, self.log = resume, log
        self.damaged: list[str] = []
        self.silent = ""  # why the Hub could not be asked
        self.proven: str | None = None  # the checkpoint here whose hashes all ranks have compared

    def newest(self) -> tuple[str | None, list[str]]:
        """(the folder of the newest complete and intact checkpoint of this run, the same on all ranks, or None where there
        is none at all; names of what was here, if it is one of those). CheckpointError where all are damaged."""
        self.proven = None
        if self.resume == "never":
            return None, []
        self.damaged, self.silent, there, ahead = [], "", [], []
        here = self.agree.broadcast(by_serial(os.listdir(self.folder.path)) if self.agree.rank == 0 else [])
        if self.published:
            there, ahead, self.silent = patiently(self._ask_hub, self.agree)
        # What another machine has trained beyond the steps here, then the newest first. Of two alike, the one here.
        found = [(n in ahead, serial_of(n), False, n) for n in there]
        found += [(False, serial_of(n), True, n) for n in here]
        for _, _, local, name in sorted(found, reverse=True):
            path = os.path.join(self.folder.path, name)
            if not (self._usable(path) if local else patiently(partial(self._fetch, name), self.agree)):
                continue
            if self.silent:
                self.log(f"going on with what is here: the Hub could not be asked: {self.silent}")
            self.proven = path if local else None
            return path, here if local else []  # else what is here was overtaken
        none = f"run {self.folder.run_id} has no checkpoint in {self.folder.path}"
        if self.silent:
            raise CheckpointError(f"{none}, and the Hub could not be asked for one: {self.silent}")
        damaged = self.damaged + self.folder.were_set_aside() if self.agree.rank == 0 else []
        if damaged := self.agree.broadcast(damaged):
            text = f"run {self.folder.run_id} has checkpoints, but none is usable: {', '.join(damaged)}"
            raise CheckpointError(f"{text}. Restore one, or begin a new run with --resume=never (these stay)")
        if self.resume == "must":
            raise CheckpointError(f"--resume=must: {none}")
        return None, []

    def _usable(self, path: str) -> bool:
        """All ranks: whether a folder is an intact checkpoint of this run; says loudly why not."""
        name, run_id, answer = os.path.basename(path), self.folder.run_id, ["ok", ""]
        owner = run_id
        try:
            manifest = read_manifest(path)
            if manifest.get("name") != name:
                raise CheckpointError(f"{path} is a renamed copy of {manifest.get('name')}")
            owner = manifest["run_id"]
            if owner == run_id:
                verify(path, self.agree.rank, self.agree.world)
        except CheckpointError as e:
            answer = ["damaged", str(e)]
        except OSError as e:  # which may pass: it keeps its name
            answer = ["unreadable", f"{path}: {e}"]
        bad = [a for a in self.agree.gather(answer) if a[0] != "ok"]
        if bad:
            self.damaged.append(name)
            self.log(f"DAMAGED CHECKPOINT, falling back to an older one: {bad[0][1]}")
            if self.agree.rank == 0 and owner == run_id and all(a[0] == "damaged" for a in bad):
                self.folder.set_aside(name)
            self.agree.barrier()
        elif owner != run_id:
            self.log(f"skipping {path}: it belongs to run {owner}, this is {run_id}")
        return not bad and owner == run_id

    def _ask_hub(self) -> tuple[list[str], list[str], str]:
        """Rank 0: (names of the run's checkpoints on the Hub, those that another machine put there beyond the steps here,
        ""), or ([], [], why it could not be asked). Serial numbers can't tell: each machine counts on from what it saw."""
        try:
            names = self.hub.names()
        except OSError as e:
            return [], [], str(e)
        self.folder.serial = max([self.folder.serial, *map(serial_of, names)])
        last = max(map(step_of, self.folder.mine()), default=-1)
        return names, [n for n in names if not self.hub.has(n) and step_of(n) > last], ""

    def _fetch(self, name: str) -> bool:
        """Rank 0: download a checkpoint of this run; False where it is damaged."""
        if os.path.exists(os.path.join(self.folder.path, name)):
            self.folder.set_aside(name)
        self.log(f"downloading checkpoint {name} from the Hub: nothing as new is intact here")
        try:
            self.hub.fetch(name)
            return True
        except CheckpointError as e:
            self.damaged.append(f"{name} (Hub)")
            self.log(f"DAMAGED CHECKPOINT on the Hub, falling back to an older one: {e}")
            return False
        except OSError as e:  # to go on behind it would train twice, and rotate it away there
            text = f"{name} on the Hub is newer than what is intact here, and could not be downloaded: {e}"
            raise CheckpointError(f"{text}. Try again, or go on from here with --publish=False") from None

    def load(self, path: str, shared: dict, own: dict, group) -> tuple[dict, dict, bool]:
        """(manifest, state, whether `own` was filled): see Store.load."""
        agree, problem, mine = self.agree, None, {}
        try:
            manifest = read_manifest(path) if path == self.proven else verify(path, agree.rank, agree.world)
            state = read_state(path)
            compare(saved_tensors(os.path.join(path, "tensors")), shared, path)
            file = os.path.join(path, f"own/rank-{agree.rank:05d}.safetensors")
            fits = manifest["world"] == agree.world and manifest["layout"] == layout_of(shared)
            if fits and os.path.exists(file):
                mine = load_file(file)
        except CheckpointError as e:
            problem = e
        except (OSError, ValueError, KeyError) as e:
            problem = CheckpointError(f"{path}: {type(e).__name__}: {e}")
        agree.verdict(problem, "load")
        try:
            reader = HuggingFaceStorageReader(os.path.join(path, "tensors"))
            dcp.load({k: v.detach() for k, v in shared.items()}, storage_reader=reader, process_group=group)
        except CheckpointException as e:
            problem = CheckpointError(f"{path} could not be read: {e.failures}")
        agree.verdict(problem, "load")
        form, saved = ({k: (v.dtype, v.shape) for k, v in part.items()} for part in (own, mine))
        fits = all(agree.gather(bool(fits and form == saved)))
        if fits:
            for key, tensor in own.items():
                tensor.detach().copy_(mine[key])
        return manifest, state, fits
