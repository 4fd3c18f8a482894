"""Where shards lie: a folder here, or a Hub dataset repo (hub.HubSource). What was admitted is found again by its content."""

import difflib
import hashlib
import json
import os
import re

from .shards import DataError, os_reason

PROBE = 4096  # bytes read at each end of a shard to recognise its content


def label(source) -> str:
    """A source's name in messages: the repo of a Hub source, the folder else."""
    return getattr(source, "repo", None) or str(source)


def is_val(name: str) -> bool:
    return name.rsplit("/", 1)[-1].startswith("val")


def check_name(name: str, domain: str):
    """A shard's name becomes a path on this machine: it must stay inside data/<domain>/."""
    file = name[len(f"data/{domain}/") :] if isinstance(name, str) else ""
    if name != f"data/{domain}/{file}" or not re.fullmatch(r"[^/\\:\x00-\x1f.][^/\\:\x00-\x1f]*\.npy", file):
        raise DataError(
            f"{name!r}: not of the form data/{domain}/NAME.npy, in no folder and without a leading dot: refused, rename it"
        )


def content_id(path: str) -> str:
    """Size and a hash of both ends (header included): cheap enough for 20,000 shards, and different for any file that
    was packed again."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        ends = os.pread(fd, PROBE, 0) + os.pread(fd, PROBE, max(PROBE, size - PROBE))
    finally:
        os.close(fd)
    return f"{size}-{hashlib.blake2b(ends, digest_size=8).hexdigest()}"


class FolderSource:
    """A folder of the layout above. Nothing in it is ever changed or deleted.

    A source of shards has what is here, and so has hub.HubSource, the other one: `revision`, `metadata`, `list`, `fetch`
    (which must refuse content other than `id`: a resume would go on with other data), `release`, and str() for messages.
    One whose `list` may be empty at first also has `domains()`, the names that there are."""

    revision = None

    def __init__(self, root: str):
        self.root, self.known = root, {}

    def __str__(self):
        return self.root

    def metadata(self) -> dict | None:
        """metadata.json, or None where there is none."""
        path = os.path.join(self.root, "metadata.json")
        try:
            with open(path, encoding="utf-8") as f:
                return json.load(f)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise DataError(f"{path}: {os_reason(e)}") from None
        except ValueError as e:
            raise DataError(
                f"{path}: is not JSON ({e}): pack again, or set vocab_size and delete it"
            ) from None

    def list(self, domain: str) -> dict:
        """{name: content id} of the shards of one domain."""
        folder = os.path.join(self.root, "data", domain)
        try:
            with os.scandir(folder) as entries:
                files = sorted(e.name for e in entries if not e.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{folder}: {self.why_missing(domain)}") from None
        except OSError as e:
            raise DataError(f"{folder}: {os_reason(e)}") from None
        found = {}
        for file in (f for f in files if f.endswith(".npy")):
            path = os.path.join(folder, file)
            try:
                stat = os.stat(path)
                key = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
                if self.known.get(path, (None,))[0] != key:
                    self.known[path] = (key, content_id(path))
            except OSError as e:
                raise DataError(f"{path}: {os_reason(e)}") from None
            found[f"data/{domain}/{file}"] = self.known[path][1]
        if not found:
            raise DataError(f"{folder}: holds no .npy shard{self.other_files(folder, files, domain)}")
        return found

    def why_missing(self, domain: str) -> str:
        top = os.path.join(self.root, "data")
        if not os.path.isdir(top):
            files = sorted(os.listdir(self.root))
            return "no such folder" + self.other_files(self.root, files, domain)
        there = sorted(d for d in os.listdir(top) if os.path.isdir(os.path.join(top, d)))
        return f"no such domain; {nearest(domain, there)}"

    def other_files(self, folder: str, files: list, domain: str) -> str:
        """The command that converts what lies there instead of shards."""
        kinds = [k for k in (".bin", ".txt", ".jsonl", ".py") if any(f.endswith(k) for f in files)]
        if not kinds:
            return "; make shards with `python data.py pack`"
        extra = " --vocab_size=50257" if kinds[0] == ".bin" else ""
        made = "nanoGPT or modded-nanogpt token files" if kinds[0] == ".bin" else f"{kinds[0]} files"
        command = f"python data.py pack OUT{extra} {domain}='{os.path.join(folder, '*' + kinds[0])}'"
        return f"; there are {made}: convert them with `{command}`, then set data=OUT"

    def fetch(self, name: str, revision: str | None = None, id: str | None = None) -> str:
        """The path of a shard whose content is still what was admitted. A renamed file is found by its content."""
        path = os.path.join(self.root, name)
        try:
            if id is None or content_id(path) == id:
                return path
        except FileNotFoundError:
            domain = name.split("/")[1] if name.count("/") == 2 else ""
            try:
                here = self.list(domain) if id and domain else {}
            except DataError:
                here = {}
            for other, content in here.items():
                if content == id:
                    return os.path.join(self.root, other)
            raise DataError(f"{path}: no such file, and no other shard has its content: restore it") from None
        except OSError as e:
            raise DataError(f"{path}: {os_reason(e)}") from None
        raise DataError(
            f"{path}: was replaced since this run admitted it (content {content_id(path)}, expected {id}): restore "
            "it, and add new data under a new name"
        )

    def release(self, name: str):
        """Nothing is cached, so nothing is deleted."""


def nearest(domain: str, there: list[str]) -> str:
    near = difflib.get_close_matches(domain, there, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}data/ holds {', '.join(there) or 'no folder'}; set domains"


def survey(source, domains: list[str]) -> dict:
    """The shards that the source holds now: {"revision": …, "found": {domain: {name: content id}}}"""
    found = {}
    for domain in domains:
        found[domain] = source.list(domain)
        if not found[domain]:
            why = f"holds no .npy shard; {nearest(domain, source.domains())}"
            raise DataError(f"{label(source)}: domain {domain!r} {why}")
        for name in found[domain]:
            check_name(name, domain)
    return {"revision": source.revision, "found": found}


def agreed(agree, what: str, make):
    """make() on every rank; if it fails anywhere, all ranks stop."""
    problem = result = None
    try:
        result = make()
    except Exception as e:
        problem = e
    agree.verdict(problem, what)
    return result
