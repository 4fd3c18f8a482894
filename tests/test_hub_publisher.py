"""hub.Publisher against the real huggingface_hub client and a Hub on loopback that fails on order.

Whatever happens to one request, the Hub ends up with the folder's files in one commit, or there is a clear HubError;
nothing local is touched, and no secret is said.
"""

import hashlib
import os
import traceback
from types import SimpleNamespace

import pytest
from fake_hub import (
    CHECKPOINT,
    READ_TOKEN,
    READS,
    WRITE_TOKEN,
    files_below,
    folder_with,
    in_time,
    outcome,
    publisher,
    read_everything,
    source,
)

from hub import client as hubclient

WRITES = {"revision": "GET .*/revision/main", "list": "GET .*/tree/", "preupload": "POST .*/preupload/",
          "lfs batch": "POST .*/objects/batch", "lfs put": "PUT /_lfs/", "lfs verify": "POST /_verify",
          "commit": "POST .*/commit/"}  # fmt: skip


@pytest.fixture(name="folder")
def fixture_folder(tmp_path):
    return folder_with(tmp_path / "c", CHECKPOINT)


@pytest.mark.parametrize("kind", [429, 500, 503, "reset", "lost", "truncated", "html", "slow"])
def test_a_write_fault_heals(server, folder, kind):
    """In one commit. The requests whose answers are `lost` or `truncated` were carried out."""
    writer = publisher(server)
    for i, (point, pattern) in enumerate(WRITES.items()):
        new = f"{point} {kind}".encode() * 100  # so that nothing of it is there yet
        (folder / "w.safetensors").write_bytes(new)
        commits, there = len(server.repos["models/me/model"]), server.files("models/me/model")
        server.fault(pattern, kind, headers={"Retry-After": "0"})
        receipt = in_time(lambda i=i: writer.upload(folder, f"run/{i}"))
        expected = {f"run/{i}/{name}": content for name, content in files_below(folder).items()}
        assert server.files("models/me/model") == {**there, **expected}, point
        assert receipt["files"].keys() == expected.keys()
        assert len(server.repos["models/me/model"]) == commits + 1, f"{point}: more than one commit"
        # PUT and verify have no body that the client reads
        if point in ("revision", "list") or kind != "html":
            assert server.faults[-1]["left"] == 0, f"{point} was never asked"
        server.faults.clear()


@pytest.mark.parametrize("point", [p for p in WRITES if p != "lfs verify"])
def test_a_write_fault_that_stays_is_an_error(server, folder, point):
    """(Without lfs verify: the storage says itself, at the next attempt, that it has the file.)"""
    server.fault(WRITES[point], 503, times=10_000)
    before = server.files("models/me/model")
    error = outcome(lambda: publisher(server, patience=0.2).upload(folder, "run/1"))
    assert "me/model" in str(error) and error.exit_code == 74
    assert server.files("models/me/model") == before and files_below(folder) == CHECKPOINT


def test_a_server_that_says_nothing_is_not_waited_for(server, folder, monkeypatch):
    """The client would wait for ever for the answers to these."""
    monkeypatch.setattr(hubclient, "SILENCE", 0.3)
    for pattern in ("PUT", "/commit/", "/preupload/", "/tree/", "/revision/"):
        server.fault(pattern, "slow", seconds=60)
    in_time(lambda: publisher(server).upload(folder, "run"))
    assert server.files("models/me/model")["run/manifest.json"] == CHECKPOINT["manifest.json"]
    assert not any(fault["left"] for fault in server.faults)


MAY_NOT = [
    ("", "me/model", "HF_TOKEN is not set"),
    (READ_TOKEN, "me/model", "HF_TOKEN of me can only read: make one with write access"),
    ("hf_canaryNobodyIssuedThisOne", "me/model", "not known to the Hub"),
    (WRITE_TOKEN, "somebody/model", "belongs to me, the repo to somebody"),
    (WRITE_TOKEN, "somebody/absent", "belongs to me, the repo to somebody"),
]


@pytest.mark.parametrize("token, repo, says", MAY_NOT)
def test_a_publisher_that_may_not_write_knows_at_the_start(server, monkeypatch, token, repo, says):
    server.commit("models/somebody/model", {"a": b"1"})
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    error = outcome(publisher(server, repo).check_write)
    assert says in str(error) and error.final and "--publish=False" in str(error)
    assert "canary" not in str(error)


def test_the_write_check_leaves_no_trace_and_makes_a_missing_repo_private(server):
    before = list(server.repos["models/me/model"])
    publisher(server).check_write()
    assert server.repos["models/me/model"] == before
    lines = []
    publisher(server, "me/fresh", log=lines.append).check_write()
    assert "models/me/fresh" in server.private and "made, private" in lines[0]


def test_the_write_check_survives_a_bad_moment(server):
    for pattern in ("GET .*/revision/", "POST .*/create", "POST .*/preupload"):
        server.fault(pattern, 503)
        server.fault(pattern, "lost")
    in_time(publisher(server, "me/fresh").check_write)
    assert "models/me/fresh" in server.repos


def test_what_is_published_comes_back(server, folder, tmp_path):
    writer = publisher(server)
    receipt = writer.upload(folder, "run/step7")
    assert receipt["commit"] == server.repos["models/me/model"][-1][0]
    assert receipt["bytes"] == sum(map(len, CHECKPOINT.values()))
    for name, content in CHECKPOINT.items():
        entry = receipt["files"][f"run/step7/{name}"]
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    there = {p.removeprefix("run/step7/"): size for p, (size, _) in writer.list("run").items()}
    assert there == {name: len(content) for name, content in CHECKPOINT.items()}
    writer.download("run/step7", tmp_path / "back")
    assert files_below(tmp_path / "back") == CHECKPOINT
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "c"]
    commits = len(server.repos["models/me/model"])
    assert writer.upload(folder, "run/step7")["commit"] == receipt["commit"], "nothing to do, so no commit"
    assert len(server.repos["models/me/model"]) == commits
    writer.upload(folder, "")  # the weights, at the root
    assert server.files("models/me/model")["w.safetensors"] == CHECKPOINT["w.safetensors"]


def test_an_upload_race_loses_nothing(server, folder, monkeypatch):
    """Somebody else commits between our look and our commit: 412, look again, commit onto theirs."""
    take, raced = server.take_fault, []

    def race(line):
        if "/commit/" in line and len(raced) < 2:
            raced.append(server.commit("models/me/model", {"theirs.txt": b"%d" % len(raced)}))
        return take(line)

    monkeypatch.setattr(server, "take_fault", race)
    publisher(server).upload(folder, "run")
    files = server.files("models/me/model")
    assert files["theirs.txt"] == b"1" and files["run/manifest.json"] == CHECKPOINT["manifest.json"]
    assert len(raced) == 2


@pytest.mark.parametrize("harm", ["dropped", "changed"])
def test_an_upload_that_the_hub_does_not_hold_is_an_error(server, folder, monkeypatch, harm):
    commit = server.commit
    change = {"run/w.safetensors": None if harm == "dropped" else b"w" * 3999 + b"x"}
    monkeypatch.setattr(server, "commit", lambda repo, changes: commit(repo, changes | change))
    error = outcome(lambda: publisher(server).upload(folder, "run"))
    assert "1 of 3 files are not on the Hub as they are here, e.g. run/w.safetensors" in str(error)
    assert files_below(folder) == CHECKPOINT


def test_an_upload_goes_on_where_it_was_broken_off(server, folder):
    """Files that are already in the Hub's storage are not sent again."""
    server.fault("POST .*/commit/", 503, times=10_000)
    outcome(lambda: publisher(server, patience=0.1).upload(folder, "run"))
    server.faults.clear()
    server.log.clear()
    publisher(server).upload(folder, "run")
    assert not server.requests("PUT")


@pytest.mark.parametrize("kind", [503, "reset", "corrupt", "cut"])
def test_a_checkpoint_download_heals_and_appears_whole(server, folder, tmp_path, kind):
    writer = publisher(server)
    writer.upload(folder, "run")
    server.fault("GET .*/resolve/", kind, times=2)
    in_time(lambda: writer.download("run", tmp_path / "back"))
    assert files_below(tmp_path / "back") == CHECKPOINT


def test_a_checkpoint_download_goes_on_and_never_overwrites(server, folder, tmp_path):
    publisher(server).upload(folder, "run")
    server.fault("GET .*/resolve/.*w.safetensors", 503, times=10_000)
    outcome(lambda: publisher(server, patience=0.1).download("run", tmp_path / "back"))
    assert not (tmp_path / "back").exists(), "half a checkpoint under its name"
    server.faults.clear()
    server.log.clear()
    publisher(server).download("run", tmp_path / "back")
    assert files_below(tmp_path / "back") == CHECKPOINT and len(server.requests("GET .*/resolve/")) == 1
    (tmp_path / "back" / "manifest.json").write_bytes(b"mine")
    assert "never overwrites" in str(outcome(lambda: publisher(server).download("run", tmp_path / "back")))
    assert "nothing below" in str(outcome(lambda: publisher(server).download("absent", tmp_path / "x")))


def test_delete_removes_one_folder_and_nothing_else(server, tmp_path):
    writer, folder = publisher(server), folder_with(tmp_path / "c", {"a.bin": b"1", "b/c.json": b"{}"})
    for prefix in ("run/step1", "run/step10", "run2/step1"):
        writer.upload(folder, prefix)
    server.fault("POST .*/commit/", "lost")
    server.fault("POST .*/commit/", 503)
    assert in_time(lambda: writer.delete("run/step1")) == 2
    left = {"/".join(p.split("/")[:2]) for p in writer.list()}
    assert left == {"run/step10", "run2/step1", "README.md"}
    assert writer.delete("run/step1") == 0 and writer.delete("run/step*") == 0
    for prefix in ("", "/", ".", "..", "run/", "/run", "run/../run2"):
        assert "refused" in str(outcome(lambda prefix=prefix: writer.delete(prefix)))
    assert len(writer.list("run/step10")) == 2 and files_below(folder).keys() == {"a.bin", "b/c.json"}


def test_an_empty_or_missing_folder_is_not_published(server, tmp_path):
    assert "nothing to publish" in str(outcome(lambda: publisher(server).upload(tmp_path, "run")))


def test_no_secret_in_logs_errors_or_files(server, tmp_path, caplog, capfd):
    """The token, and the signatures of storage URLs, through refusals, faults and successes."""
    caplog.set_level("DEBUG", logger="hub")
    lines, errors = [], []

    def note(call):
        try:
            in_time(call)
        except Exception as error:
            errors.append("".join(traceback.format_exception(error)))

    def attempt(patience):
        writer = publisher(server, patience=patience, log=lines.append)
        folder = folder_with(tmp_path / "c", {"a.safetensors": os.urandom(100), "m.json": b"{}"})
        note(writer.check_write)
        note(lambda: writer.upload(folder, "run"))
        note(lambda: writer.list("run"))
        note(lambda: writer.download("run", tmp_path / f"back{len(lines)}"))
        note(lambda: read_everything(source(server, tmp_path / f"cache{len(lines)}", patience, lines.append)))

    attempt(20)
    assert not errors
    for pattern in list(WRITES.values()) + list(READS.values()):
        for kind in (403, "reset"):
            server.fault(pattern, kind, times=3)
            attempt(0.05)
            server.faults.clear()
    said = "\n".join([*lines, *errors, caplog.text, *capfd.readouterr()])
    assert len(errors) > 20 and len(lines) > 2
    assert "canary" not in said and WRITE_TOKEN not in said and "X-Amz-Signature=c" not in said
    written = files_below(tmp_path)
    assert len(written) > 10 and not [n for n, content in written.items() if b"canary" in content]


def test_the_rate_of_a_trial_leaves_latency_out(server, monkeypatch):
    """4 s of it would make hours of a checkpoint that takes minutes."""
    writer, clock = publisher(server), [0.0]

    def upload(folder, prefix):
        clock[0] += 4.0 + os.path.getsize(os.path.join(folder, "trial.bin")) / 10e6

    monkeypatch.setattr("hub.publisher.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(writer, "upload", upload)
    monkeypatch.setattr(writer, "delete", lambda prefix: 0)
    assert writer.trial("drill") == pytest.approx(10e6)
