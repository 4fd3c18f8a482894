"""huggingface_hub with one retry policy, for source.py and publisher.py: every call is patient, bounded, logged, and keeps secrets.

* What a later attempt can heal (a rate limit, a 5xx, a reset, a short, foreign or damaged body) is tried again with
  back-off and jitter; `Retry-After` is honoured. 401, 403, 404 are final, with a sentence on what to do.
* `patience` seconds without progress end a call: it runs in a thread that is given up, never waited for.
* Tokens are read by the client (HF_TOKEN, or `hf auth login`); what is said goes through `scrub`.

huggingface_hub is imported on first use: importing this file costs nothing. Which faults its version 2.4 retries, and
which it raises at once (a reset of a download, any error of a commit), was measured; here they are all treated alike.
"""

import contextlib
import errno
import functools
import hashlib
import logging
import os
import random
import re
import shutil
import tempfile
import threading
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

FIRST_WAIT = 1.0  # seconds before the first new attempt; doubles up to MAX_WAIT
MAX_WAIT = 60.0  # seconds
SILENCE = 60.0  # seconds without a byte that end a request; the Hub's own gateway gives up at about that
MIN_RATE = 64_000  # bytes/s: a transfer slower than this over `patience` seconds counts as stalled
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # what a later attempt can heal; 412: the parent commit moved
DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE)
USERS_FAULT = 65  # exit code of bad input: a dataset repo that does not exist, a file name that is an attack


class HubError(OSError):
    """The Hub could not be used; the message says what was tried and what to do. `final`: trying again is no use."""

    def __init__(self, message: str, final: bool = False, exit_code: int = 74):
        super().__init__(scrub(message))
        self.final, self.exit_code = final, exit_code


class TryAgain(Exception):
    """What a later attempt can heal. `wait`: seconds that the Hub asks to stay away, or None."""

    def __init__(self, problem: str, wait: float | None = None):
        super().__init__(problem)
        self.wait = wait


def scrub(text: str) -> str:
    """`text` without tokens and without the query of any URL (storage URLs are signed)."""
    text = str(text)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            text = text.replace(token, "***")
    text = re.sub(r"\bhf_[A-Za-z0-9]{8,}", "hf_***", text)
    text = re.sub(r"(?i)(bearer\s+)[^\s'\",;]+", r"\1***", text)
    return re.sub(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>]+", r"\1?***", text)


# --- the client ------------------------------------------------------------------------------------------------
_ours = threading.local()  # .active where Nova makes the call: others keep the client's own behaviour


@functools.cache
def client():
    """huggingface_hub, set up once: no request without a time limit, no progress bars, no log of signed URLs."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils._http import default_client_factory

    def limit(request):  # the client's default, which some of its calls ask for by name, is to wait for ever
        limits = request.extensions.get("timeout") or {}
        phases = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {phase: limits.get(phase) or SILENCE for phase in phases}

    def refuse(response):  # the policy below waits, bounded and logged; the client would do neither
        if response.status_code in TRY_AGAIN and getattr(_ours, "active", False):
            raise TryAgain(f"status {response.status_code}", _asked_to_wait(response.headers))

    def factory():
        http = default_client_factory()
        hooks = http.event_hooks
        http.event_hooks = dict(request=[*hooks["request"], limit], response=[*hooks["response"], refuse])
        # on a refused connection in any thread it would close this session, and so break the uploads of all others
        http.close = lambda: None
        return http

    huggingface_hub.set_client_factory(factory)
    if not os.environ.get("HF_HUB_VERBOSITY"):
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None:
        disable_progress_bars()
    return huggingface_hub


def _asked_to_wait(headers) -> float | None:
    """Seconds that a reply asks to stay away: the Hub's rate limit header, or Retry-After (seconds or a date)."""
    limit = client().utils.parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    text = headers.get("retry-after", "").strip()
    if text.isdigit():
        return float(text)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


# --- the one retry policy --------------------------------------------------------------------------------------
class Patience:
    """A clock that runs out after `seconds` without progress: bytes beyond the most that there ever were."""

    def __init__(self, seconds: float):
        self.seconds, self.since, self.most = seconds, time.monotonic(), 0

    def seen(self, size: int):
        if size >= self.most + MIN_RATE * max(self.seconds, 1):
            self.most, self.since = size, time.monotonic()

    @property
    def left(self) -> float:
        return self.since + self.seconds - time.monotonic()


def bounded(call, patience: Patience, size=None):
    """call() in a thread that is given up when patience runs out; size() is the bytes that arrived so far."""
    outcome = {}

    def body():
        _ours.active = True
        try:
            outcome["value"] = call()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=body, daemon=True, name="hub")
    thread.start()
    first = time.monotonic() + 1.0  # even a patience of 0 makes one attempt
    while thread.is_alive() and (patience.left > 0 or time.monotonic() < first):
        thread.join(min(0.5, max(0.02, patience.left)))
        if size is not None:
            patience.seen(size())
    if not outcome:
        raise TryAgain("no answer, or too slow")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def chain(error):
    """`error` and its causes: the client wraps what happened, up to three deep."""
    while error is not None:
        yield error
        error = error.__cause__


class Remote:
    """A repo and the calls that both sides make."""

    kind, users_fault = "model", 74  # users_fault: the exit code when the repo, or a name in it, is wrong

    def __init__(self, repo: str, log, patience: float):
        self.repo, self.log, self.patience = repo, log, patience

    @property
    def api(self):
        return client().HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="nova")

    def patiently(self, call, what: str, patience: Patience | None = None, size=None):
        """call(), again until it works; HubError when it is refused for good or patience runs out. Disk errors pass."""
        patience, wait = patience or Patience(self.patience), FIRST_WAIT
        while True:
            try:
                return bounded(call, patience, size)
            except (HubError, MemoryError):
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in DISK_TROUBLE:
                    raise
                final, problem, asked = self.diagnose(error)
            if final:
                raise HubError(f"{self.repo}: {what}: {problem}", True, self.users_fault) from None
            pause = max(wait * random.uniform(0.5, 1.0), asked or 0.0)
            if (left := patience.left) <= pause:
                end = f"given up after {patience.seconds:.0f} s without progress"
                if asked and asked >= left:
                    end = f"the Hub asks to wait {asked:.0f} s, longer than the {max(0, left):.0f} s left of "
                    end += f"hub_patience={self.patience:g}: start later, or raise hub_patience"
                raise HubError(f"{self.repo}: {what}: {problem}; {end}") from None
            self.log(scrub(f"[hub] {self.repo}: {what}: {problem}; again in {pause:.1f} s"))
            time.sleep(pause)
            wait = min(MAX_WAIT, wait * 2)

    def diagnose(self, error) -> tuple[bool, str, float | None]:
        """(is it final?, what happened and what to do, seconds that the Hub asks to wait)."""
        errors = client().errors
        for e in chain(error):
            if isinstance(e, TryAgain):
                return False, str(e), e.wait
            if isinstance(e, errors.OfflineModeIsEnabled):
                return True, "not in the cache, and HF_HUB_OFFLINE is set: unset it", None
            if isinstance(e, errors.HFValidationError):
                return True, f"{e}: a Hub repo is written owner/name", None
        responses = [e.response for e in chain(error) if getattr(e, "response", None) is not None]
        status = responses[0].status_code if responses else None
        elsewhere = responses and not str(responses[0].request.url).startswith(self.api.endpoint)
        # from the storage behind the Hub (an upload wraps that), whose signed URLs expire: a new attempt gets new ones
        if elsewhere or isinstance(error, RuntimeError):
            status = None
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if "xet" in text.lower():
            text += " (an endpoint without Xet storage needs HF_HUB_DISABLE_XET=1)"
        if status == 412:
            return False, "the repo moved on meanwhile", None  # Publisher looks again and commits onto that
        if status in (None, *TRY_AGAIN):
            return False, text, None
        return True, f"status {status}: {self.advice(error, status, text)}", None

    def advice(self, error, status: int, text: str) -> str:
        """What to do about a final status."""
        errors = client().errors
        page = f"{self.api.endpoint}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"
        token = "a token was sent" if client().get_token() else "no token was sent: HF_TOKEN is not set"
        cures = {
            errors.GatedRepoError: f"the repo is gated: accept its terms at {page} and set HF_TOKEN ({token})",
            errors.RevisionNotFoundError: f"the repo has no such branch, tag or commit: see {page}/commits/main",
            errors.RemoteEntryNotFoundError: f"the repo has no such file at this commit: see {page}",
        }
        for kind, cure in cures.items():
            if any(isinstance(e, kind) for e in chain(error)):
                return cure
        if status in (401, 404):
            private = f"or it is private ({token}): check {page}, or set HF_TOKEN"
            return f"no {self.kind} repo of this name, {private}"
        return f"{text} ({token})"

    def head(self, branch: str = "main") -> str:
        """The branch's newest commit (one request)."""
        return self.api.repo_info(self.repo, repo_type=self.kind, revision=branch).sha

    def tree(self, folder: str, revision: str) -> dict[str, tuple[int, str]]:
        """{path: (bytes, content id)} of all files below `folder`: a large file's sha256, a small one's git blob id."""
        found = {}
        options = dict(recursive=True, revision=revision, repo_type=self.kind)
        try:
            for item in self.api.list_repo_tree(self.repo, folder or None, **options):
                if hasattr(item, "blob_id"):  # a file
                    found[item.path] = (item.size, item.lfs.sha256 if item.lfs else item.blob_id)
        except client().errors.EntryNotFoundError:
            if found:
                raise TryAgain("the listing broke off") from None
        return found

    def get(self, path: str, revision: str, content: str, folder: Path, patience: Patience) -> Path:
        """One file at one commit into a new folder below `folder` (emptied first), its content checked."""

        def attempt():
            shutil.rmtree(folder, ignore_errors=True)  # left by a failed attempt or a killed process
            folder.mkdir(parents=True)
            # a folder of its own: an attempt that was given up may still write, but not under the name of this one
            options = dict(repo_type=self.kind, revision=revision, local_dir=tempfile.mkdtemp(dir=folder))
            got = Path(self.api.hf_hub_download(self.repo, path, **options))
            if content not in hashes(got):
                raise TryAgain(f"the {got.stat().st_size} bytes that arrived are not content {content[:12]}")
            return got

        return self.patiently(attempt, f"download of {path}", patience, lambda: bytes_below(folder))


# --- names, contents, files ------------------------------------------------------------------------------------
def safe_name(name: str, repo: str) -> str:
    """`name`, or HubError if it could lead out of the folder that it is joined to."""
    parts = name.split("/")
    if {"", ".", ".."} & set(parts) or re.search(r"[\\\x00-\x1f\x7f]", name) or parts[0].startswith("~"):
        text = f"file name {name!r} is refused: it could lead out of its folder; rename it in the repo"
        raise HubError(f"{repo}: {text}", final=True, exit_code=USERS_FAULT)
    return name


def hashes(path: Path) -> tuple[str, str]:
    """(sha256, git blob id) of a file: its content id is one of them."""
    sha, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
            git.update(block)
    return sha.hexdigest(), git.hexdigest()


@contextlib.contextmanager
def disk_errors():
    """Turns an error of this machine's disk into a HubError that says what to do."""
    try:
        yield
    except HubError:
        raise
    except OSError as error:
        text = f"this machine's disk: {error.strerror or error} ({error.filename}): free space, or use another folder"
        raise HubError(text, final=True) from None


def bytes_below(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # files come and go
                total += os.stat(os.path.join(base, name)).st_size
    return total


def part_of(path: Path) -> Path:
    """Where a file or folder grows until it is whole."""
    return path.with_name(path.name + ".part")
