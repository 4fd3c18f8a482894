"""hub.py against the real huggingface_hub client and a Hub on loopback that fails on order.

The property behind most tests: whatever happens to one request, the result is right or a clear HubError, never a hang
and never wrong data.
"""

import hashlib
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT
from fake_hub import DATA, READS, SHARDS, folder_with, in_time, outcome, publisher, read_everything, source
from workers import free_port

from hub import HubSource
from hub import client as hubclient
from hub.cache import receipt_of

READ = {n: c for n, c in DATA.items() if n.startswith("data/")}
NAME, CONTENT = "data/code/0.npy", DATA["data/code/0.npy"]


def commit_of(server) -> str:
    return server.repos["datasets/me/data"][-1][0]


def asked(server):
    """Wait until a file is asked for."""
    while not server.requests("GET .*/resolve/"):
        time.sleep(0.01)


def used(reader, name) -> Path:
    """Fetched and released."""
    path = Path(reader.fetch(name))
    reader.release(name)
    return path


BODY = ("cut", "truncated", "corrupt")
KINDS = (429, 500, 503, "reset", *BODY, "html", "slow")


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_fault_heals(server, tmp_path, kind):
    """Each fault once at each endpoint: the data is right all the same."""
    for point, pattern in READS.items():
        if point == "head" and kind in BODY:
            continue
        server.fault(pattern, kind, headers={"Retry-After": "0"})
        reader = source(server, tmp_path / point)
        assert Path(in_time(lambda reader=reader: reader.fetch(NAME))).read_bytes() == CONTENT, point
        assert reader.list("code").keys() == SHARDS.keys(), point
        assert server.faults[-1]["left"] == 0, f"{point} was never asked"


def test_many_faults_in_a_row_heal(server, tmp_path):
    for pattern in READS.values():
        for kind in (503, "reset", "html"):
            server.fault(pattern, kind)
    server.fault("GET .*/resolve/", "corrupt", times=2)
    reader = source(server, tmp_path)
    assert in_time(lambda: read_everything(reader)) == READ


@pytest.mark.parametrize("kind", [429, 503, "reset", "corrupt", "html", "drip", "slow"])
@pytest.mark.parametrize("point", ["list", "get"])
def test_a_fault_that_stays_is_an_error_not_a_hang(server, tmp_path, kind, point):
    """drip: a byte a second for ever; slow: no answer within this test. Both look alive to a socket."""
    server.fault(READS[point], kind, times=10_000, seconds=1.0 if kind == "drip" else 60)
    reader = source(server, tmp_path, patience=0.25)
    error = outcome(lambda: reader.fetch(min(reader.list("code"))))
    assert "me/data" in str(error) and "given up after" in str(error)
    assert not error.final and error.exit_code == 74
    assert not list(tmp_path.rglob("*.npy")), "a file that is not right was left under its name"


def test_a_slow_transfer_that_moves_is_waited_for(monkeypatch):
    """Progress renews patience, as long as it is faster than MIN_RATE; the same bytes again are no progress."""
    now = [0.0]
    monkeypatch.setattr(hubclient.time, "monotonic", lambda: now[0])
    patience, enough = hubclient.Patience(100), 100 * hubclient.MIN_RATE
    for step in range(1, 50):
        now[0] += 60
        patience.seen(step * enough)
        assert patience.left == 100
    now[0] += 60
    patience.seen(49 * enough)
    assert patience.left == 40
    patience.seen(enough)  # started over
    now[0] += 60
    patience.seen(50 * enough - 1)
    assert patience.left < 0


def test_a_listing_that_breaks_off_is_not_a_short_listing(server, tmp_path):
    server.page = 2
    server.fault("GET .*/tree/", 404, headers={"X-Error-Code": "EntryNotFound"}, skip=1)
    assert source(server, tmp_path).list("code").keys() == SHARDS.keys()


def test_retry_after_is_honoured_within_patience(server, tmp_path):
    lines = []
    server.fault(READS["list"], 429, headers={"Retry-After": "1"})
    source(server, tmp_path / "a", log=lines.append).list("code")
    assert re.search(r"listing at \w+: status 429; again in 1\.0 s", lines[0])
    server.fault(READS["list"], 429, headers={"RateLimit": '"api";r=0;t=3600'})
    error = outcome(lambda: source(server, tmp_path / "b").list("code"))
    says = "status 429; the Hub asks to wait 3600 s, longer than the (20|19) s left of hub_patience=20: "
    assert re.search(says, str(error))
    assert "given up after" not in str(error), "nobody waited so long"


def test_retry_after_may_be_a_date():
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    assert 90 < hubclient._asked_to_wait({"retry-after": later}) <= 100
    assert hubclient._asked_to_wait({"retry-after": "soon"}) is None
    assert hubclient._asked_to_wait({}) is None


ABSENT = [
    ("me/nothing", "main", None, "status 404.*no dataset repo of this name.*datasets/me/nothing"),
    ("me/data", "no-such-branch", None, "status 404.*no such branch, tag or commit"),
    ("me/data", "main", "data/code/9.npy", "data/code/9.npy is not in the repo at commit"),
    ("a/b/c", "main", None, "owner/name"),
]
REFUSALS = [
    (401, "", "a token was sent"),
    (403, "GatedRepo", "accept its terms at http.*/datasets/me/data"),
    (403, "", "status 403"),
    (404, "EntryNotFound", "no such file at this commit"),
]


@pytest.mark.parametrize("repo, revision, name, says", ABSENT)
def test_what_does_not_exist_is_refused_at_once(server, tmp_path, repo, revision, name, says):
    reader = HubSource(repo, tmp_path, revision, 64.0, 240.0, print)
    error = outcome(lambda: reader.fetch(name) if name else reader.list("code"))
    assert re.search(says, str(error)) and error.final and error.exit_code == 65
    assert len(server.log) <= 2


@pytest.mark.parametrize("status, code, says", REFUSALS)
def test_refusals_are_final_and_say_what_to_do(server, tmp_path, status, code, says):
    reader = source(server, tmp_path)
    found = reader.list("code")
    server.fault("/resolve/", status, times=100, headers={"X-Error-Code": code})
    error = outcome(lambda: reader.fetch(NAME, reader.revision, found[NAME]))
    assert re.search(says, str(error)) and error.final
    assert len(server.requests("/resolve/")) == 1, "a refusal was asked again"


def test_a_public_dataset_needs_no_token_and_a_private_one_says_so(server, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert source(server, tmp_path / "a").metadata() == {"vocab_size": 257}
    server.private.add("datasets/me/data")
    error = outcome(lambda: source(server, tmp_path / "b").metadata())
    assert "private" in str(error) and "HF_TOKEN is not set" in str(error)


def test_large_files_come_from_another_host_whose_refusals_heal(server, tmp_path):
    """Storage URLs are signed and expire: their 403 is not the Hub's. The token does not go there."""
    server.cdn = True
    server.fault("GET /_cdn/", 403)
    reader = source(server, tmp_path)
    assert in_time(lambda: read_everything(reader)) == READ
    assert len(server.requests("GET /_cdn/")) == len(DATA)
    assert not server.requests("GET .*/resolve/.*npy")


def test_a_full_disk_is_said_at_once(server, tmp_path, monkeypatch):
    reader = source(server, tmp_path)
    reader.list("code")

    def full(*_, **__):
        raise OSError(28, "No space left on device", "/cache/x")

    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", full)
    error = outcome(lambda: reader.fetch("data/code/0.npy"))
    assert "No space left" in str(error) and error.final and error.exit_code == 74


EVIL = ["data/code/../../../evil.npy", "data/code/..\\evil.npy", "data/./x.npy", "data//code/x.npy"]
EVIL += ["data/code/a\x00.npy", "/etc/evil.npy", "..", "~root/evil.npy", ""]


@pytest.mark.parametrize("name", EVIL)
def test_a_file_name_that_leads_out_of_the_cache_is_refused(server, tmp_path, name):
    error = outcome(lambda: source(server, tmp_path).fetch(name, "0" * 40, "0" * 64))
    assert "refused" in str(error) and error.exit_code == 65 and not server.log
    if name.startswith("data/"):
        server.commit("datasets/me/data", {name: b"evil"})
        assert "refused" in str(outcome(lambda: source(server, tmp_path / "c").list("code")))
        server.commit("models/me/model", {f"run/{name}": b"evil"})
        error = outcome(lambda: publisher(server).download("run", tmp_path / "deep" / "down"))
        assert "refused" in str(error)
    assert not [p for p in tmp_path.rglob("*") if "evil" in p.name]


def test_a_shard_is_read_as_its_commit_had_it(server, tmp_path):
    """Overwritten, deleted, renamed afterwards: what was admitted is what is read."""
    reader = source(server, tmp_path)
    first, names = reader.revision, reader.list("code")
    renamed = {"data/code/2.npy": None, "data/code/two.npy": SHARDS["data/code/2.npy"]}
    server.commit("datasets/me/data", {NAME: b"new", "data/code/1.npy": None, **renamed})
    assert reader.list("code") == names, "the pin moved by itself"
    for name, id in names.items():
        assert Path(reader.fetch(name, first, id)).read_bytes() == SHARDS[name]
    assert reader.pin() != first
    now = reader.list("code")
    assert set(now) == {NAME, "data/code/3.npy", "data/code/two.npy"}
    assert Path(reader.fetch(NAME, reader.revision, now[NAME])).read_bytes() == b"new"
    assert Path(reader.fetch(NAME, first, names[NAME])).read_bytes() == CONTENT
    assert now["data/code/two.npy"] == names["data/code/2.npy"], "a rename keeps the content id"


def test_list_names_shards_only_and_pages(server, tmp_path):
    server.page = 7
    server.commit("datasets/me/data", {f"data/many/{i:03}.npy": b"%d" % i for i in range(40)})
    server.commit("datasets/me/data", {f"data/code/{n}": b"x" for n in (".hidden.npy", "a.txt", "sub/x.npy")})
    reader = source(server, tmp_path)
    assert list(reader.list("many")) == [f"data/many/{i:03}.npy" for i in range(40)]
    assert reader.list("code").keys() == SHARDS.keys()
    assert reader.list("nothing") == {} and reader.domains() == ["code", "many", "math"]


def test_a_start_lists_once_and_a_shard_is_got_once(server, tmp_path):
    reader = source(server, tmp_path)
    read_everything(reader)
    read_everything(reader)
    assert len(server.requests("/revision/")) == 1 and len(server.requests("/tree/")) == 1
    assert len(server.requests("GET .*/resolve/")) == len(DATA)
    server.log.clear()
    for _ in range(8):  # the other ranks, and a restart, know the commit
        read_everything(source(server, tmp_path, revision=reader.revision))
    assert not server.log


def test_offline_with_a_warm_cache_works(server, tmp_path, monkeypatch):
    warm = source(server, tmp_path)
    expected, commit = read_everything(warm), warm.revision
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")  # nobody is there
    assert read_everything(source(server, tmp_path, patience=0.2, revision=commit)) == expected
    error = outcome(lambda: source(server, tmp_path, patience=0.2).list("code"))
    assert "HF_HUB_OFFLINE=1" in str(error), "a branch may have moved: not in silence"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lines = []
    assert read_everything(source(server, tmp_path, log=lines.append)) == expected
    assert "as last seen" in lines[0]
    error = outcome(lambda: source(server, tmp_path / "cold").list("code"))
    assert "HF_HUB_OFFLINE" in str(error) and error.final


def cached(cache) -> set[str]:
    return {p.name.split(".")[0] for p in Path(cache).rglob("*.npy")}


def test_the_cache_keeps_its_bound_and_deletes_the_oldest(server, tmp_path):
    server.commit("datasets/me/data", {f"data/big/{i}.npy": bytes([i]) * 100_000 for i in range(8)})
    reader = source(server, tmp_path, cache_gb=350e-6)
    for i in range(8):
        used(reader, f"data/big/{i}.npy")
        size = sum(p.stat().st_size for p in tmp_path.rglob("*.npy"))
        assert size <= 350_000, "more than cache_gb"
    assert cached(tmp_path) == {"5", "6", "7"}
    receipts = {p.name: p for p in tmp_path.rglob("*.receipt")}
    for age, i in ((30, 6), (20, 7), (10, 5)):
        os.utime(next(p for n, p in receipts.items() if n.startswith(f".{i}.")), (time.time() - age,) * 2)
    used(reader, "data/big/6.npy")  # used again: now the youngest
    reader.fetch("data/big/0.npy")
    assert cached(tmp_path) == {"5", "6", "0"}
    assert len(receipts) == 3 and len(list(tmp_path.rglob("*.receipt"))) == 3


def test_the_cache_deletes_only_what_it_fetched_and_nobody_uses(server, tmp_path):
    server.commit("datasets/me/data", {f"data/big/{i}.npy": bytes([i]) * 100_000 for i in range(4)})
    other, lines = source(server, tmp_path, cache_gb=0), []
    held = Path(other.fetch("data/big/0.npy"))  # another rank of this node still reads it
    foreign = folder_with(held.parent, {"mine.npy": b"z" * 10**6, "1.0123456789abcdef.npy": b"z" * 10**6})
    reader = source(server, tmp_path, cache_gb=0, log=lines.append)
    for i in range(1, 4):
        used(reader, f"data/big/{i}.npy")
    assert held.read_bytes() == b"\0" * 100_000
    assert {p.name for p in foreign.glob("*.npy")} == {"mine.npy", "1.0123456789abcdef.npy", held.name}
    assert len(lines) == 1 and "raise cache_gb" in lines[0], "warned not at all, or again and again"
    other.release("data/big/0.npy")
    assert not held.exists()


def test_a_file_that_the_cache_did_not_fetch_is_not_overwritten(server, tmp_path):
    path = used(source(server, tmp_path), NAME)
    receipt_of(path).unlink()
    path.write_bytes(b"precious")
    assert "did not fetch it" in str(outcome(lambda: source(server, tmp_path).fetch(NAME)))
    assert path.read_bytes() == b"precious"


def test_half_a_file_in_the_cache_is_fetched_again(server, tmp_path):
    reader = source(server, tmp_path)
    path = used(reader, NAME)
    reader.list("code")
    path.write_bytes(path.read_bytes()[:10])  # as after a power failure
    next(tmp_path.rglob("listings/*")).write_bytes(b"")
    assert source(server, tmp_path).list("code").keys() == SHARDS.keys()
    assert Path(source(server, tmp_path).fetch(NAME)).read_bytes() == CONTENT


def test_threads_that_want_one_shard_fetch_it_once(server, tmp_path):
    """The prefetch thread and the step meet."""
    server.fault("GET .*/resolve/", "slow", seconds=0.5)
    reader = source(server, tmp_path, cache_gb=0)
    reader.list("code")
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(reader.fetch, [NAME] * 4, timeout=30))
    assert len(got) == 4 and len(set(got)) == 1
    assert len(server.requests("GET .*/resolve/")) == 1 and len(reader.cache.pins) == 1
    reader.release(NAME)
    assert not reader.cache.pins and not cached(tmp_path), "a lock leaked"


def test_a_transfer_survives_that_another_thread_closes_the_session(server, tmp_path):
    """As the client does for all threads when one of them reaches nobody."""
    server.fault("GET .*/resolve/", "drip", seconds=0.001)
    reader = source(server, tmp_path, revision=commit_of(server))
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(reader.fetch, NAME)
        asked(server)
        time.sleep(0.2)
        hubclient.client().close_session()
        assert Path(got.result(30)).read_bytes() == CONTENT
    assert len(server.requests("GET .*/resolve/")) == 1, "it was broken off and repeated"


FETCH = """
import hashlib, sys
sys.path.insert(0, {root!r})
import hub
reader = hub.HubSource("me/data", {cache!r}, {revision!r}, 64.0, 20.0, print)
for name in {names!r}:
    print(hashlib.sha256(open(reader.fetch(name), "rb").read()).hexdigest(), flush=True)
"""


def fetch_in_a_process(server, cache, names):
    code = FETCH.format(root=ROOT, cache=str(cache), revision=commit_of(server), names=names)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_processes_of_a_node_fetch_each_shard_once(server, tmp_path):
    """Whoever comes first fetches; the others wait for the file. The order in which they ask does not matter."""
    names = sorted(SHARDS)
    server.fault("GET .*/resolve/", "slow", times=100, seconds=0.2)
    ranks = [fetch_in_a_process(server, tmp_path, names[i:] + names[:i]) for i in range(2)]
    for i, rank in enumerate(ranks):
        expected = [hashlib.sha256(SHARDS[n]).hexdigest() for n in names[i:] + names[:i]]
        assert rank.communicate(timeout=60)[0].split() == expected and rank.returncode == 0
    assert len(server.requests("GET .*/resolve/")) == len(names)


def test_a_killed_fetcher_is_replaced(server, tmp_path):
    """The kernel frees its lock; what it left behind is neither used nor in the way."""
    server.fault("GET .*/resolve/", "drip", seconds=0.05)
    victim = fetch_in_a_process(server, tmp_path, [NAME])
    while not list(tmp_path.rglob("*.part")) or not server.requests("GET .*/resolve/"):
        assert victim.poll() is None
        time.sleep(0.02)
    reader = source(server, tmp_path, revision=commit_of(server))
    with ThreadPoolExecutor(1) as waiter:
        got = waiter.submit(reader.fetch, NAME)
        time.sleep(0.2)
        assert not got.done(), "two processes fetched one shard"
        victim.kill()
        victim.communicate()
        assert Path(got.result(30)).read_bytes() == CONTENT
    assert not list(tmp_path.rglob("*.part"))


def test_a_waiter_gives_up_on_a_fetcher_that_does_not_move(server, tmp_path):
    server.fault("GET .*/resolve/", "slow", seconds=60)
    first, second = (source(server, tmp_path, p, revision=commit_of(server)) for p in (2.0, 0.3))
    with ThreadPoolExecutor(1) as fetcher:
        fetcher.submit(first.fetch, NAME)
        asked(server)
        assert "another process of this machine" in str(outcome(lambda: second.fetch(NAME)))


def test_scrub_hides_what_looks_like_a_secret():
    text = hubclient.scrub(
        "PUT https://s3.example/x?X-Amz-Signature=abc&y=1 with Bearer zzz.yyy and hf_abcdefghijk, then https://h/a"
    )
    assert text == "PUT https://s3.example/x?*** with Bearer *** and hf_***, then https://h/a"


def test_importing_hub_imports_no_client():
    code = "import sys, hub; assert not {'huggingface_hub', 'torch', 'httpx2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
