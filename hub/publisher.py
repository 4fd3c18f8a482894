"""Writing to a model repo: a folder as one commit on a known parent.

It looks before it writes, so a commit whose answer got lost, or a race with another writer, ends well; what it reports
as published was read back from the Hub.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

from .client import HubError, Patience, Remote, bounded, client, disk_errors, hashes, part_of, safe_name

MIN_UPLOAD_RATE = 1_000_000  # bytes/s: an upload may take `patience` plus the time that this rate needs


class Publisher(Remote):
    """A model repo that checkpoints and weights go to. Blocking: the caller runs it in a thread behind the training.

    Nothing local is ever deleted here. Deleting on the Hub removes files from the newest commit; their storage is freed
    only when the owner squashes the repo's history (its settings on the Hub)."""

    def check_write(self):
        """Prove, leaving no trace, that this run may write to the repo; make it (private) if there is none."""
        hf, instead = client(), "or train with --publish=False"
        if not hf.get_token():
            text = "publishing needs a token with write access, and HF_TOKEN is not set: set it"
            raise HubError(f"{self.repo}: {text}, {instead}", final=True)

        def attempt():
            try:
                self.head()
            except hf.errors.RepositoryNotFoundError as error:
                if isinstance(error, hf.errors.GatedRepoError) or error.response.status_code != 404:
                    raise
                self.api.create_repo(self.repo, private=True, exist_ok=True)
                self.log(f"[hub] {self.repo}: made, private")
            # asks how this file would be uploaded, which only a writer may; uploads nothing
            self.api.preupload_lfs_files(self.repo, [hf.CommitOperationAdd("config.json", b"{}")])

        try:
            self.patiently(attempt, "checking write access")
        except HubError as error:
            if not error.final:
                raise
            raise HubError(f"{error}. {self._who()}, {instead}", final=True) from None

    def _who(self) -> str:
        """Whose token it is and what it may do, for an error."""
        owner, settings = self.repo.split("/")[0], f"{self.api.endpoint}/settings/tokens"
        try:
            me = bounded(self.api.whoami, Patience(min(10.0, self.patience)))
        except Exception:
            return f"HF_TOKEN is not known to the Hub: make one with write access at {settings}"
        name, role = me.get("name"), me.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            return f"HF_TOKEN of {name} can only read: make one with write access at {settings}"
        if owner not in (name, *(org.get("name") for org in me.get("orgs", []))):
            return f"HF_TOKEN belongs to {name}, the repo to {owner}: set hf_model_repo to a repo of yours"
        return f"HF_TOKEN of {name} (role {role}) lacks write access to this repo: give it at {settings}"

    @disk_errors()
    def upload(self, folder, prefix: str) -> dict:
        """Publish all files of `folder` below `prefix` ("": the root) in one commit; a receipt, once verified there."""
        start, folder, files = time.monotonic(), Path(folder), {}
        for local in sorted(p for p in folder.rglob("*") if p.is_file()):
            remote = "/".join(filter(None, (prefix, local.relative_to(folder).as_posix())))
            files[safe_name(remote, self.repo)] = (local, local.stat().st_size, hashes(local))
        if not files:
            raise HubError(f"{folder}: there is nothing to publish", final=True)
        total, what = sum(size for _, size, _ in files.values()), prefix or folder.name

        def missing(there) -> list[str]:
            return [n for n, (_, size, ids) in files.items() if there.get(n) not in [(size, i) for i in ids]]

        def attempt() -> str:
            head = self.head()
            todo = missing(self.tree(prefix, head))
            if not todo:
                return head  # an earlier attempt whose answer was lost, or an earlier run
            adds = [client().CommitOperationAdd(remote, files[remote][0]) for remote in todo]
            message = f"Upload {what}"
            return self.api.create_commit(self.repo, adds, commit_message=message, parent_commit=head).oid

        patience = Patience(self.patience + total / MIN_UPLOAD_RATE)
        commit = self.patiently(attempt, f"upload of {what}", patience)
        if bad := missing(self.patiently(lambda: self.tree(prefix, commit), f"verification of {what}")):
            text = f"{len(bad)} of {len(files)} files are not on the Hub as they are here, e.g. {min(bad)}"
            raise HubError(f"{self.repo}: after the upload, {text} (does a .gitignore there exclude it?)")
        receipt = {remote: dict(size=size, sha256=hashes[0]) for remote, (_, size, hashes) in files.items()}
        seconds = time.monotonic() - start
        return dict(repo=self.repo, prefix=prefix, commit=commit, bytes=total, seconds=seconds, files=receipt)

    def list(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        """{path in the repo: (bytes, content id)} below `prefix` at the newest commit."""
        return self.patiently(lambda: self.tree(prefix, self.head()), f"listing of {prefix or 'the repo'}")

    @disk_errors()
    def download(self, prefix: str, folder):
        """All files below `prefix` at the newest commit, checked, into `folder`: it must not exist, and appears whole."""
        folder = Path(folder)
        if folder.exists():
            raise HubError(f"{folder} exists: a download never overwrites", final=True)
        head = self.patiently(self.head, "looking up the newest commit")
        found = self.patiently(lambda: self.tree(prefix, head), f"listing of {prefix}")
        if not found:
            raise HubError(f"{self.repo}: there is nothing below {prefix!r}", final=True)
        staging, part = part_of(folder), folder.with_name(folder.name + ".file")
        for path, (_, content) in found.items():
            target = staging / safe_name(path, self.repo).removeprefix(prefix).lstrip("/")
            if target.exists() and content in hashes(target):
                continue  # of a download that was interrupted
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.get(path, head, content, part, Patience(self.patience)), target)
        shutil.rmtree(part, ignore_errors=True)
        os.replace(staging, folder)

    def trial(self, prefix: str) -> float:
        """Publish 16 MB of random bytes below the folder `prefix`, verify them there, delete them: bytes per second. A small
        part goes first by itself: what it takes is latency, of which a checkpoint of 65 GB has no more."""
        small, size, seconds = 500_000, 16_000_000, []
        for n in (small, size):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "trial.bin").write_bytes(os.urandom(n))
                start = time.monotonic()
                self.upload(folder, f"{prefix}/{n}")
                seconds.append(time.monotonic() - start)
        self.delete(prefix)
        return (size - small) / max(seconds[1] - seconds[0], 0.1 * seconds[1])

    def delete(self, prefix: str) -> int:
        """Remove the files below the folder `prefix`, and nothing else, from the newest commit; how many there were."""
        safe_name(prefix, self.repo)  # refuses "", "/", "a/", "..": never the whole repo
        count = 0

        def attempt():
            nonlocal count
            head = self.head()
            paths = sorted(p for p in self.tree(prefix, head) if p.startswith(prefix + "/"))
            if paths:
                count = len(paths)
                gone = [client().CommitOperationDelete(p, is_folder=False) for p in paths]
                self.api.create_commit(self.repo, gone, commit_message=f"Delete {prefix}", parent_commit=head)

        self.patiently(attempt, f"deletion of {prefix}")
        return count
