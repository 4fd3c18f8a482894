"""Checkpoints and exports on their way to the Hub and back: the store, hub.Publisher, the real client, a Hub that fails.

The properties: training never waits for the Hub; what counts as published is there, byte for byte; nothing local goes
away because an upload failed; nobody else's files are touched; a run whose machine is gone goes on from the Hub.
"""

import hashlib
import json
import os
import time
import traceback

import pytest
from checkpoint_tools import all_bits, digest_of, names_in, open_folder, save, state_for
from fake_hub import READ_TOKEN, WRITE_TOKEN, files_below, in_time, outcome, publisher
from test_uploads import idle, send
from workers import free_port

from store import read_export

pytestmark = pytest.mark.usefixtures("quick_retries")

REPO = "models/me/model"
KINDS = (429, 500, 503, "reset", "lost", "cut", "truncated", "html", "slow")


def on_hub(server, run_id) -> dict[str, dict[str, str]]:
    """{checkpoint: {file: sha256}} of a run, as the Hub holds it."""
    found = {}
    for path, content in server.files(REPO).items():
        if path.startswith(f"{run_id}/"):
            _, name, file = path.split("/", 2)
            found.setdefault(name, {})[file] = hashlib.sha256(content).hexdigest()
    return found


def steps(names) -> list[tuple[str, int]]:
    return sorted((n.split("-")[2], int(n.split("-")[1])) for n in names)


def test_the_run_goes_on_while_the_hub_is_slow(server, tmp_path):
    """Four saves are finished before the first is on the Hub; then the last two are, whole."""
    server.fault("PUT", "slow", times=1, seconds=60)
    c, lines = open_folder(tmp_path, publisher=publisher(server))
    c.uploads.hub.publisher.patience = 30.0
    for step in range(1, 5):
        in_time(lambda step=step: save(c, step))
    assert len(c.poll()) == 4 and not on_hub(server, c.run_id) and not c.uploads.hub.receipts
    assert in_time(lambda: c.close(timeout=0.1)), "it does not wait beyond its time"
    again, _ = open_folder(tmp_path, publisher=publisher(server))
    in_time(again.newest)
    assert in_time(lambda: again.close(timeout=25)) == []
    there = on_hub(server, again.run_id)
    assert ("latest", 4) in steps(there)
    for name, files in there.items():
        if os.path.isdir(tmp_path / name):
            assert files == digest_of(str(tmp_path / name))


@pytest.mark.parametrize("seed", range(2))
def test_an_unreliable_hub_ends_up_with_the_same_bytes(server, tmp_path, seed):
    """A third of all requests fail. Keep-last-2 per kind here and there; other people's files stay as they were."""
    theirs = {
        "README.md": b"hello",
        "other/x/manifest.json": b"{}",
        "old_ckpts/gpt_s0010.model.pt": b"pickle",
    }
    server.commit(REPO, theirs)
    met = server.unreliable(seed, 0.3, KINDS)
    c, lines = open_folder(tmp_path, publisher=publisher(server))
    digests = {}
    for step in range(1, 4):
        for kind in ("latest", "milestone"):
            in_time(lambda step=step, kind=kind: save(c, step, kind=kind), 60)
            digests |= {n: digest_of(str(tmp_path / n)) for n in names_in(tmp_path)}
            idle(c, 60)
    save(c, 4, kind="final")
    digests |= {n: digest_of(str(tmp_path / n)) for n in names_in(tmp_path)}
    assert in_time(lambda: c.close(timeout=60), 90) == []
    there = on_hub(server, c.run_id)
    wanted = [("final", 4), ("latest", 2), ("latest", 3), ("milestone", 2), ("milestone", 3)]
    assert steps(there) == wanted == steps(names_in(tmp_path))
    assert there == {name: digests[name] for name in there}
    assert {k: v for k, v in server.files(REPO).items() if not k.startswith(c.run_id)} == theirs
    assert len(met) > 10


def test_a_lost_answer_makes_no_second_commit(server, tmp_path):
    server.fault("POST .*/commit/", "lost")
    c, _ = open_folder(tmp_path, publisher=publisher(server))
    save(c, 1)
    assert in_time(lambda: c.close(timeout=20)) == []
    assert len(server.repos[REPO]) == 3  # empty, README, the checkpoint


@pytest.mark.parametrize("trouble", ["the Hub is down", "the token can only read", "nobody answers"])
def test_nothing_local_goes_away_because_an_upload_failed(server, tmp_path, monkeypatch, trouble):
    """The last checkpoints and the export stay, and say so; the next launch sends them."""
    writer = publisher(server, patience=0.2)
    c, lines = open_folder(tmp_path / "checkpoints", publisher=writer, keep=1)
    if trouble == "the Hub is down":
        server.fault("/preupload/|/commit/", 503, times=10_000)
    elif trouble == "the token can only read":
        monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    else:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    shared, _ = state_for(0, 1)
    export = str(tmp_path / "export")
    c.export({"a": shared["model.a"]}, {"d": 1})
    save(c, 1, 2, 3)
    save(c, 4, kind="final")
    c.publish({})
    before = digest_of(tmp_path / "checkpoints") | digest_of(export)
    left = in_time(lambda: c.close(timeout=1.0))
    assert any("UPLOAD FAILED" in line for line in lines) and any("NOT on the Hub" in line for line in lines)
    assert any("final" in name for name in left) and "export" in left
    kept = [("final", 4), ("latest", 1), ("latest", 2), ("latest", 3)]
    assert steps(names_in(tmp_path / "checkpoints")) == kept, "keep=1 waits for the Hub"
    after = digest_of(tmp_path / "checkpoints") | digest_of(export)
    assert {k: v for k, v in after.items() if not k.startswith("published")} == before
    assert on_hub(server, c.run_id) == {}

    c.uploads.thread.join(30)  # as if that process had ended
    server.faults.clear()
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    again, lines = open_folder(tmp_path / "checkpoints", publisher=publisher(server), keep=1)
    in_time(again.newest)
    again.publish({})
    assert in_time(lambda: again.close(timeout=25)) == [], lines
    there = steps(on_hub(server, c.run_id))
    assert ("final", 4) in there and ("latest", 3) in there
    assert ("final", 4) in steps(names_in(tmp_path / "checkpoints"))
    for name, digest in digest_of(export).items():
        assert hashlib.sha256(server.files(REPO)[name]).hexdigest() == digest


@pytest.mark.parametrize("harm", ["dropped", "changed"])
def test_rotation_waits_for_proof(server, tmp_path, monkeypatch, harm):
    """A Hub that answers yes but does not keep the file: no receipt, no older checkpoint deleted here or there."""
    c, lines = open_folder(tmp_path, publisher=publisher(server), keep=1)
    send(c, 1)
    first = on_hub(server, c.run_id)
    commit, name = server.commit, names_in(tmp_path)[0].replace("1-latest-0001", "2-latest-0002")

    def careless(repo, changes):
        victims = [p for p in changes if p.endswith(".safetensors") and changes[p] is not None]
        return commit(repo, changes | {p: None if harm == "dropped" else changes[p] + b"!" for p in victims})

    monkeypatch.setattr(server, "commit", careless)
    save(c, 2)
    while c.uploads.failures < 2:
        time.sleep(0.01)
    assert f"{c.run_id}/{name}" not in c.uploads.hub.receipts
    assert {k: v for k, v in on_hub(server, c.run_id).items() if k in first} == first
    assert ("latest", 2) in steps(names_in(tmp_path))
    monkeypatch.setattr(server, "commit", commit)
    assert in_time(lambda: c.close(timeout=25)) == []
    assert on_hub(server, c.run_id) == {name: digest_of(str(tmp_path / name))}


@pytest.mark.parametrize("seed", range(2))
def test_a_run_goes_on_from_the_hub_on_another_machine(server, tmp_path, seed):
    """Through an unreliable Hub; the newest checkpoint there was damaged since: the one before it, bit for bit."""
    c, _ = open_folder(tmp_path / "a" / "nova" / "checkpoints", publisher=publisher(server), keep=3)
    send(c, 1, 2, 3)
    assert in_time(lambda: c.close(timeout=20)) == []
    victim = next(p for p in sorted(server.files(REPO)) if "00000003" in p and p.endswith(".safetensors"))
    content = server.files(REPO)[victim]
    server.commit(REPO, {victim: content[:-1] + bytes([content[-1] ^ 1])})
    server.unreliable(seed, 0.3, KINDS)
    folder = tmp_path / "b" / "nova" / "checkpoints"
    again, lines = in_time(lambda: open_folder(folder, publisher=publisher(server), keep=3), 60)
    path = in_time(again.newest, 60)
    assert again.run_id == c.run_id and "00000002" in path
    assert any("DAMAGED CHECKPOINT on the Hub" in line for line in lines)
    shared, own = state_for(0, 1, seed=19)
    state, own_loaded = again.load(path, shared, own)
    assert state["step"] == 2 and own_loaded
    assert all_bits(shared) == all_bits(state_for(0, 1, seed=2)[0])
    save(again, 4)
    assert in_time(lambda: again.close(timeout=40), 60) == []
    assert ("latest", 4) in steps(on_hub(server, c.run_id))


def test_a_silent_hub_at_the_start_is_not_a_fresh_start(server, tmp_path):
    server.fault("/revision/|/tree/", 503, times=10_000)
    error = outcome(lambda: open_folder(tmp_path, publisher=publisher(server, patience=0.2)))
    assert "given up" in str(error)


def test_a_repo_without_checkpoints_is_a_fresh_start(server, tmp_path):
    server.commit(REPO, {"old_ckpts/gpt_s0000010.model.pt": b"pickle", "gpt_s0000020.meta.pt": b"pickle"})
    c, lines = open_folder(tmp_path / "nova" / "checkpoints", publisher=publisher(server))
    assert any("old_ckpts/gpt_s0000010.model.pt" in line and "not supported" in line for line in lines)
    assert in_time(c.newest) is None
    c.close(timeout=5)
    assert not server.requests("/resolve/"), "a file of a stranger was fetched"


def test_the_export_is_published_beside_other_files_and_verified(server, tmp_path):
    """At the root of the repo, where from_pretrained-like readers look; README.md stays."""
    c, _ = open_folder(tmp_path / "checkpoints", publisher=publisher(server))
    shared, _ = state_for(0, 1)
    export = str(tmp_path / "export")
    c.export({"a": shared["model.a"]}, {"d": 1})
    (tmp_path / "export" / "report.json").write_text(json.dumps({"loss": 1.5}))
    c.publish({})
    assert in_time(lambda: c.close(timeout=20)) == []
    files = server.files(REPO)
    assert files["README.md"] == b"hello" and files["report.json"] == b'{"loss": 1.5}'
    assert {n: hashlib.sha256(files[n]).hexdigest() for n in digest_of(export)} == digest_of(export)
    publisher(server).download("", tmp_path / "back")
    config, tensors = read_export(str(tmp_path / "back"))
    assert config["d"] == 1 and (tensors["a"] == shared["model.a"].full_tensor()).all()


def test_no_secret_is_written_or_said(server, tmp_path, monkeypatch, capfd):
    """Token and signed URLs, through saves, failing uploads, refused tokens and a resume: in no file, line or error."""
    said = []
    for trouble in (None, 403, 401, 503, "reset"):
        folder = tmp_path / str(trouble) / "nova" / "checkpoints"
        c, lines = open_folder(folder, publisher=publisher(server, patience=0.2, log=said.append))
        if trouble:
            server.fault("PUT|/commit/|/_verify|/tree/", trouble, times=10_000)
        save(c, 1)
        c.close(timeout=1.0 if trouble else 20)
        said += lines
        server.faults.clear()
    server.fault("/tree/", 403, times=10_000)
    refused = outcome(lambda: open_folder(tmp_path / "x", publisher=publisher(server)))
    said += traceback.format_exception(refused)
    server.faults.clear()
    writer = publisher(server, log=said.append)
    c, lines = open_folder(tmp_path / "elsewhere" / "nova" / "checkpoints", publisher=writer)
    assert c.newest()
    c.close(timeout=20)
    said += [*lines, *capfd.readouterr()]
    assert any("UPLOAD FAILED" in line for line in said)
    assert "canary" not in "\n".join(said)
    written = files_below(tmp_path)
    assert len(written) > 20 and not [name for name, content in written.items() if b"canary" in content]
