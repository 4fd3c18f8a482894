"""A Hugging Face Hub on loopback for the real huggingface_hub client, with faults on order.

    with FakeHub() as hub:
        hub.commit("datasets/me/data", {"data/code/0.npy": b"..."})      # history grows by one commit; None deletes
        hub.fault("GET .*/resolve/", "reset", times=2)                    # the next two downloads are cut off
        os.environ["HF_ENDPOINT"] = hub.url
        hub.requests("GET .*/tree/")                                      # what was asked so far

What it models: commits, branches by name `main`, files in git (sha1 of the blob) or in LFS (sha256), paged listings, ranged
downloads, preupload -> LFS batch -> PUT -> verify -> commit with a parent, private repos, tokens that read or write. What it
does not: Xet storage (so the client must be told not to use it, see `__enter__`), pull requests, resumable multi-part PUT.
Endpoints and headers are those that huggingface_hub 2.4 sends and needs.
"""

import base64
import hashlib
import json
import os
import random
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
from concurrent.futures import Future, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import quiet

from hub import HubError, HubSource, Publisher

WRITE_TOKEN, READ_TOKEN = "hf_canaryWriteTokenForTests0001", "hf_canaryReadTokenForTests00002"
LFS_SUFFIXES = (".npy", ".safetensors", ".bin")
KINDS = ("reset", "cut", "truncated", "corrupt", "slow", "lost", "html", "drip")


class FakeHub:
    """The server and its store. repos: "datasets/owner/name" or "models/owner/name" -> [(commit sha, {path: blob id})]."""

    def __init__(self, page: int = 1000, owner: str = "me"):
        self.page, self.owner = page, owner
        self.cdn = False  # True: large files come from signed URLs of another host
        self.repos, self.blobs, self.lfs, self.private = {}, {}, set(), set()
        self.tokens = {WRITE_TOKEN: "write", READ_TOKEN: "read"}
        self.faults, self.log, self.lock = [], [], threading.RLock()

    # --- what a test does to it ------------------------------------------------------------------------------
    def commit(self, repo: str, changes: dict) -> str:
        """Add a commit that writes ({path: bytes}) or deletes ({path: None}) files; its 40-hex sha."""
        with self.lock:
            history = self.repos.setdefault(repo, [("0" * 40, {})])
            files = dict(history[-1][1])
            for path, content in changes.items():
                files.pop(path, None) if content is None else files.update({path: self.store(path, content)})
            sha = hashlib.sha1(f"{repo} {len(history)} {sorted(files.items())}".encode()).hexdigest()
            history.append((sha, files))
            return sha

    def store(self, path: str, content: bytes) -> str:
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        blob = hashlib.sha256(content).hexdigest() if path.endswith(LFS_SUFFIXES) else git
        self.blobs[blob] = content
        return blob

    def files(self, repo: str) -> dict:
        """{path: content} at the newest commit."""
        return {path: self.blobs[blob] for path, blob in self.repos[repo][-1][1].items()}

    def fault(self, pattern: str, kind, times=1, seconds=0.3, headers=None, skip=0):
        """The next `times` requests whose "METHOD path" matches, after `skip` that do not, fail with a status (int) or
        one of KINDS:
        reset: connection reset before the answer; lost: the request is carried out, then reset; cut: reset inside the
        body; truncated: the body ends early; corrupt: one byte flipped; slow: answered `seconds` late; drip: a byte
        every `seconds`; html: status 200 with a web page."""
        assert isinstance(kind, int) or kind in KINDS, kind
        fault = dict(kind=kind, left=times, seconds=seconds, headers=headers or {}, skip=skip)
        self.faults.append({"pattern": re.compile(pattern), **fault})

    def unreliable(self, seed: int, share: float, kinds) -> list:
        """From now on each request fails with this probability, in one of these ways; those met."""
        dice, met = random.Random(seed), []

        def take_fault(line):
            kind = dice.choice(kinds) if dice.random() <= share else None
            met.extend([kind] if kind else [])
            return dict(kind=kind, seconds=0.05, headers={})

        self.take_fault = take_fault
        return met

    def requests(self, pattern: str = "") -> list[str]:
        return [line for line in self.log if re.search(pattern, line)]

    # --- life ------------------------------------------------------------------------------------------------
    def __enter__(self):
        os.environ["HF_HUB_DISABLE_XET"] = "1"  # read when huggingface_hub is imported, so also:
        if "huggingface_hub" in sys.modules:
            import huggingface_hub.constants

            huggingface_hub.constants.HF_HUB_DISABLE_XET = True
        self.server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def take_fault(self, line: str) -> dict:
        with self.lock:
            for fault in self.faults:
                if fault["left"] > 0 and fault["pattern"].search(line):
                    if fault["skip"]:
                        fault["skip"] -= 1
                        continue
                    fault["left"] -= 1
                    return fault
        return dict(kind=None, seconds=0, headers={})


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that gave up is no error of ours
            super().handle_error(request, client_address)


class Refused(Exception):
    """An error answer: status, X-Error-Code, X-Error-Message."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer, sent in two pieces, waits 40 ms for an acknowledgement
    hub: FakeHub

    ROUTES = (
        (r"/api/whoami-v2", "whoami"),
        (r"/api/repos/create", "create_repo"),
        (r"/api/(?P<repo>(?:models|datasets)/[^/]+/[^/]+)(?:/revision/(?P<rev>[^/]+))?", "repo_info"),
        (r"/api/(?P<repo>\w+/[^/]+/[^/]+)/tree/(?P<rev>[^/]+)(?:/(?P<folder>.*))?", "tree"),
        (r"/api/(?P<repo>\w+/[^/]+/[^/]+)/preupload/(?P<rev>[^/]+)", "preupload"),
        (r"/api/(?P<repo>\w+/[^/]+/[^/]+)/commit/(?P<rev>[^/]+)", "make_commit"),
        (r"/_lfs/(?P<oid>\w+)", "lfs_put"),
        (r"/_verify", "lfs_verify"),
        (r"/_cdn/(?P<oid>\w+)", "cdn"),
        (r"/(?P<repo>(?:datasets/)?[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        (r"/(?P<repo>(?:datasets/)?[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def log_message(self, *_):
        pass

    def handle_any(self):
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(url.path)
        line = f"{self.command} {path}"
        self.hub.log.append(line)
        self.fault = self.hub.take_fault(line)
        kind = self.fault["kind"]
        try:
            if kind == "reset":
                return self.reset()
            if kind == "slow":
                time.sleep(self.fault["seconds"])
            if kind == "html":
                return self.reply(b"<html><body>gateway</body></html>", Content_Type="text/html")
            if isinstance(kind, int):
                return self.reply({"error": "injected"}, kind, **self.fault["headers"])
            for pattern, method in self.ROUTES:
                if match := re.fullmatch(pattern, path):
                    return getattr(self, method)(**match.groupdict())
            raise Refused(404, "EntryNotFound", f"no route {path}")
        except Refused as refused:
            status, code, message = refused.args
            self.reply({"error": message}, status, X_Error_Code=code, X_Error_Message=message)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client gave up first

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    # --- answers and their faults ----------------------------------------------------------------------------
    def reset(self):
        linger = struct.pack("ii", 1, 0)  # close with RST instead of FIN
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.wfile = self.rfile = open(os.devnull, "r+b")  # noqa: SIM115 - the handler flushes them once more
        self.connection.close()
        self.close_connection = True

    def reply(self, body=b"", status: int = 200, **headers):
        kind, body = self.fault["kind"], body if isinstance(body, bytes) else json.dumps(body).encode()
        if kind == "lost":
            return self.reset()
        self.send_response(status)
        for name, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if kind == "corrupt" and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 0xFF]) + body[middle + 1 :]
        if kind == "drip":
            for i in range(len(body)):
                self.wfile.write(body[i : i + 1])
                self.wfile.flush()
                time.sleep(self.fault["seconds"])
            return None
        if kind in ("truncated", "cut"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if kind == "cut":
                time.sleep(0.05)  # so that the half is read before the reset discards it
                return self.reset()
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        self.wfile.write(body)

    # --- permissions and lookups -----------------------------------------------------------------------------
    def role(self) -> str | None:
        """ "write", "read", or None without a token; a token that nobody issued is refused."""
        header = self.headers.get("Authorization")
        if header is None:
            return None
        role = self.hub.tokens.get(header.removeprefix("Bearer "))
        if role is None:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return role

    def may_write(self, owner: str):
        if self.role() is None:
            raise Refused(401, "", "Invalid username or password.")
        if self.role() != "write" or owner != self.hub.owner:
            raise Refused(403, "", "Forbidden: you must use a write token to upload to a repository.")

    def history(self, repo: str) -> list:
        role = self.role()
        if repo not in self.hub.repos or (repo in self.hub.private and role is None):
            raise Refused(404 if role else 401, "RepoNotFound", "Repository not found")
        return self.hub.repos[repo]

    def files(self, repo: str, rev: str | None) -> tuple[str, dict]:
        history = self.history(repo)
        found = [commit for commit in history if rev in (None, "main", commit[0])]
        if not found:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {rev}")
        return found[-1]

    def must_write(self, repo: str):
        self.history(repo)
        self.may_write(repo.split("/")[-2])

    def entry(self, path: str, blob: str) -> dict:
        content = self.hub.blobs[blob]
        entry = {"type": "file", "path": path, "oid": blob[:40], "size": len(content)}
        if len(blob) == 64:
            entry["lfs"] = {"oid": blob, "size": len(content), "pointerSize": 130}
        return entry

    # --- endpoints -------------------------------------------------------------------------------------------
    def whoami(self):
        if self.role() is None:
            raise Refused(401, "", "Invalid username or password.")
        access = {"accessToken": {"displayName": "t", "role": self.role()}}
        self.reply({"type": "user", "name": self.hub.owner, "orgs": [], "auth": access})

    def create_repo(self):
        wanted = json.loads(self.body)
        owner = wanted.get("organization") or self.hub.owner
        repo = f"{wanted.get('type') or 'model'}s/{owner}/{wanted['name']}"
        self.may_write(owner)
        url = f"{self.hub.url}/{repo.removeprefix('models/')}"
        if repo in self.hub.repos:
            return self.reply({"url": url, "error": "You already created this repo"}, 409)
        self.hub.commit(repo, {".gitattributes": b"*.npy filter=lfs\n"})
        if wanted.get("visibility") == "private" or wanted.get("private"):
            self.hub.private.add(repo)
        self.reply({"url": url})

    def repo_info(self, repo, rev):
        sha, files = self.files(repo, rev)
        name = repo.split("/", 1)[1]
        info = dict(_id="0", id=name, modelId=name, sha=sha, private=False)
        self.reply({**info, "siblings": [{"rfilename": path} for path in sorted(files)]})

    def tree(self, repo, rev, folder):
        sha, files = self.files(repo, rev)
        prefix = folder.rstrip("/") + "/" if folder else ""
        entries = {}
        for path in sorted(p for p in files if p.startswith(prefix)):
            inner = path[len(prefix) :]
            if "/" in inner and self.query.get("recursive", "").lower() != "true":
                path = prefix + inner.split("/")[0]
                entries[path] = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            else:
                entries[path] = self.entry(path, files[path])
        if prefix and not entries:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist on {rev}")
        start = int(self.query.get("cursor", 0))
        headers = {}
        if start + self.hub.page < len(entries):
            query = urllib.parse.urlencode({**self.query, "cursor": start + self.hub.page})
            headers["Link"] = f'<{self.hub.url}{urllib.parse.urlsplit(self.path).path}?{query}>; rel="next"'
        self.reply(list(entries.values())[start : start + self.hub.page], **headers)

    def resolve(self, repo, rev, path):
        sha, files = self.files(repo if repo.startswith("datasets/") else f"models/{repo}", rev)
        if path not in files:
            raise Refused(404, "EntryNotFound", "Entry not found")
        content = self.hub.blobs[files[path]]
        headers = {"X_Repo_Commit": sha, "ETag": f'"{files[path]}"', "Accept_Ranges": "bytes"}
        if len(files[path]) == 64:
            headers.update(X_Linked_Etag=f'"{files[path]}"', X_Linked_Size=len(content))
            if self.hub.cdn:
                cdn = self.hub.url.replace("127.0.0.1", "localhost")
                signed = f"{cdn}/_cdn/{files[path]}?X-Amz-Signature=canarySignature"
                return self.reply(b"", 302, Location=signed, **headers)
        self.ranged(content, headers)

    def cdn(self, oid):
        if self.headers.get("Authorization"):
            raise Refused(400, "", "the token was sent to another host")
        self.ranged(self.hub.blobs[oid], {"Accept_Ranges": "bytes"})

    def ranged(self, content, headers):
        status, part = 200, content
        if match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(match[1]), int(match[2] or len(content) - 1)
            part, status = content[start : end + 1], 206
            headers["Content_Range"] = f"bytes {start}-{end}/{len(content)}"
        self.reply(part, status, **headers)

    def preupload(self, repo, rev):
        self.must_write(repo)
        _, files = self.files(repo, rev)
        answer = []
        for path in (file["path"] for file in json.loads(self.body)["files"]):
            mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
            answer.append(dict(path=path, uploadMode=mode, shouldIgnore=False, oid=files.get(path)))
        self.reply({"files": answer})

    def lfs_batch(self, repo):
        self.must_write(repo if repo.startswith("datasets/") else f"models/{repo}")
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            item = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.blobs:
                # the real Hub's storage urls are signed: the signature must not be logged either
                href = f"{self.hub.url}/_lfs/{wanted['oid']}?X-Amz-Signature=canarySignature"
                item["actions"] = {"upload": {"href": href}, "verify": {"href": f"{self.hub.url}/_verify"}}
            objects.append(item)
        self.reply({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refused(400, "BadDigest", "sha256 mismatch")
        self.hub.blobs[oid] = self.body
        self.reply()

    def lfs_verify(self):
        wanted = json.loads(self.body)
        if len(self.hub.blobs.get(wanted["oid"], b"")) != wanted["size"]:
            raise Refused(404, "", "object is not there")
        self.reply({})

    def make_commit(self, repo, rev):
        self.must_write(repo)
        changes, parent = {}, None
        for line in self.body.splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header":
                parent = value.get("parentCommit")
            elif key == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.blobs:
                    raise Refused(400, "BadRequest", f"lfs object {value['oid']} was never uploaded")
                changes[value["path"]] = self.hub.blobs[value["oid"]]
            elif key == "deletedFile":
                changes[value["path"]] = None
            else:
                raise Refused(400, "BadRequest", f"operation {key}")
        with self.hub.lock:
            if parent and parent != self.hub.repos[repo][-1][0]:
                raise Refused(412, "PreconditionFailed", "A commit has happened since. Please try again.")
            sha = self.hub.commit(repo, changes)
        self.reply({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})


# --- what the tests of hub.py share ------------------------------------------------------------------------------
SHARDS = {f"data/code/{i}.npy": bytes([i]) * 1000 + b"tail" for i in range(4)}
DATA = {"metadata.json": b'{"vocab_size": 257}', "data/math/a.npy": b"m" * 500, **SHARDS}
CHECKPOINT = {"w.safetensors": b"w" * 4000, "shard/o.safetensors": b"o" * 3000, "manifest.json": b"{}"}
READS = {"revision": "GET .*/revision/main", "list": "GET .*/tree/",
         "head": "HEAD .*/resolve/", "get": "GET .*/resolve/"}  # fmt: skip


class Short:
    """The time module with naps in place of the client's own waits of whole seconds."""

    def __getattr__(self, name):
        return getattr(time, name)

    def sleep(self, seconds):
        time.sleep(min(seconds, 0.01))


def source(server, cache, patience=20.0, log=quiet, revision="main", cache_gb=64.0) -> HubSource:
    return HubSource("me/data", str(cache), revision, cache_gb, patience, log)


def publisher(server, repo="me/model", patience=20.0, log=quiet) -> Publisher:
    return Publisher(repo, log, patience)


def folder_with(path, files) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def files_below(folder) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def in_time(call, seconds=30):
    """call()'s result, or its exception; a failure if it hangs (`seconds` is far beyond what any call here takes)."""
    result = Future()

    def body():
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    assert wait([result], seconds).done, "it hangs"
    return result.result()


def outcome(call) -> HubError:
    with pytest.raises(HubError) as caught:
        in_time(call)
    return caught.value


def read_everything(reader) -> dict[str, bytes]:
    """What data.py does at a start, and a file of a commit that is not the listed one."""
    found = {**reader.list("code"), **reader.list("math")}
    content = {name: Path(reader.fetch(name, reader.revision, id)).read_bytes() for name, id in found.items()}
    reader._listings = {}
    assert reader.metadata() == {"vocab_size": 257}
    return content
