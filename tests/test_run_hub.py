"""The whole product with a Hub: data read from a repo, checkpoints and export published, a run that moves house.

Real processes and the real client against a local Hub; `pytest tests/test_run.py` has the same runs without one.
"""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from fake_hub import WRITE_TOKEN, FakeHub
from test_run import command, fixture_world, losses, status, train  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow
REPO, PUBLISH = "models/me/model", ("--hf_model_repo=me/model", "--hub_patience=20")


@pytest.fixture(name="hub_world", scope="module")
def fixture_hub_world(world):  # noqa: F811
    """(folder, environment) as test_run's, where HF_ENDPOINT is a Hub that holds the same data as the repo me/tokens."""
    folder, environ = world
    names = ["metadata.json", "data/code/s.npy", "data/math/s.npy"]
    with FakeHub() as server:
        server.commit("datasets/me/tokens", {name: (folder / name).read_bytes() for name in names})
        server.commit("models/me/model", {"README.md": b"hello"})
        here = {"HF_ENDPOINT": server.url, "HF_TOKEN": WRITE_TOKEN, "HF_HOME": str(folder / "cache")}
        yield folder, environ | here | {"HF_HUB_DISABLE_XET": "1"}, server


def test_a_run_reads_from_the_hub_publishes_and_goes_on_elsewhere(hub_world):
    """Same losses from repo and folder; the first machine is lost after step 6, the second continues to the bit."""
    *here, server = hub_world
    train(here, "whole")
    arguments = ("--data=me/tokens", *PUBLISH, f"--cache_dir={here[0] / 'shards'}")
    output = train(here, "nova", "--stop_at=6", *arguments, expect=3)
    assert status(here, "nova")["saved"] == 6, output[-2000:]
    assert any("00000006" in name for name in server.files(REPO))
    for folder in ("nova", "shards", "cache"):
        shutil.rmtree(here[0] / folder, ignore_errors=True)
    output = train(here, "nova", *arguments)
    assert "bit-exact" in output and "from the Hub" in output
    assert losses(here, "nova") == losses(here, "whole"), "the curve's beginning came with the checkpoint"
    there, export = server.files(REPO), here[0] / "nova" / "export"
    for name in ("model.safetensors", "config.json", "report.json"):
        assert there[name] == (export / name).read_bytes(), name
    assert any("final" in name for name in there) and "README.md" in there
    assert WRITE_TOKEN not in output


def test_the_drill_uploads_something_small_and_leaves_no_trace(hub_world):
    """Its checkpoints stay here; 16 MB go to the Hub, are verified, and are gone again. A Hub that refuses fails it."""
    *here, server = hub_world
    before, commits = server.files(REPO), len(server.requests("/commit/"))
    output = train(here, "drilled", "--drill", *PUBLISH)
    assert "MB/s" in output and "drill passed" in output
    assert server.files(REPO) == before
    assert len(server.requests("/commit/")) - commits == 3, "two commits bring the trial, one takes it away"
    seconds = json.loads((here[0] / "drilled" / "drill" / "status.json").read_text())["drill"]
    assert seconds["upload of a checkpoint"] > 0 and not os.path.exists(here[0] / "drilled" / "checkpoints")
    server.fault("PUT|/commit/", 503, times=10_000)
    output = train(here, "refused", "--drill", "--hf_model_repo=me/model", "--hub_patience=1", expect=74)
    server.faults.clear()
    assert "HubError" in output and "drill passed" not in output


def test_a_finished_run_given_again_publishes_what_is_not_there(hub_world):
    """What the Hub did not take in the first launch's time, or was never asked to: no step is trained for it."""
    *here, server = hub_world
    server.commit("models/me/late", {"README.md": b"hello"})
    train(here, "late")
    output = train(here, "late", "--hf_model_repo=me/late", "--hub_patience=20")
    assert "is complete" in output and "step 000" not in output
    there, export = server.files("models/me/late"), here[0] / "late" / "export"
    assert there["model.safetensors"] == (export / "model.safetensors").read_bytes()
    assert any("-final-" in name for name in there) and status(here, "late")["unpublished"] == []


@pytest.mark.parametrize("answer, signalled", [(403, False), (503, True)])
def test_a_finished_run_does_not_wait_for_uploads_that_cannot_succeed(hub_world, answer, signalled):
    """Up to four hours of eight GPUs: it ends by itself where the Hub refuses for good, and at a signal in any case."""
    folder, environ, server = hub_world
    server.fault("/commit/", answer, times=100_000)
    words = command(folder, f"hopeless{answer}", *PUBLISH[:1], "--hub_patience=2", "--sample_tokens=0")
    log = folder / f"log{answer}"
    with open(log, "wb") as out:
        place = dict(env=environ, cwd=folder, start_new_session=True)
        child = subprocess.Popen(words, stdout=out, stderr=out, **place)
    try:
        end = time.monotonic() + 120
        while "talk to them" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.1)
        if signalled:
            time.sleep(3)
            assert child.poll() is None, log.read_text()[-2000:]
            child.send_signal(signal.SIGTERM)
        assert child.wait(45) == 0, log.read_text()[-3000:]
    finally:
        child.kill()
        server.faults.clear()
    said = status((folder, environ), f"hopeless{answer}")
    assert said["status"] == "done" and "export" in said["unpublished"] and len(said["unpublished"]) > 1
    assert "the same command publishes them later" in log.read_text()
