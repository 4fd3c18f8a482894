"""The queue to the Hub, with a Hub in memory: training never waits, nothing local is lost, only own names are touched.

The real client against the fake server is in test_publish.py.
"""

import errno
import json
import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from checkpoint_tools import MemoryHub, all_bits, damage, names_in, open_folder, save, state_for
from conftest import tiny_settings
from workers import run

import schedule
from hub import HubError
from store import CheckpointError, saver, uploads, verify
from store.folder import ROTATED, by_serial

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def hub():
    return MemoryHub()


def until(condition, seconds=20):
    """Wait for something that the upload thread does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def idle(c, seconds=20):
    """Wait until the queue is empty."""
    until(lambda: not c.uploads.pending, seconds)


def send(c, *steps, kind="latest"):
    """Save steps, each of which is on the Hub before the next."""
    for step in steps:
        save(c, step, kind=kind)
        idle(c)


def on_hub(hub, run_id) -> list[str]:
    return sorted({k.split("/")[1] for k in hub.files if k.startswith(run_id + "/")})


def test_what_is_saved_gets_to_the_hub_and_old_ones_go_there_too(hub, tmp_path):
    """Verified, with receipts on disk; keep-last-2 per kind; other runs' and other people's files are not touched."""
    foreign = ["README.md", "other/step-00000001-latest-0001/manifest.json", "old/ckpt_s0001.model.pt"]
    hub.files = {k: b"theirs" for k in foreign}
    c, lines = open_folder(tmp_path, publisher=hub)
    for step in range(1, 5):
        for kind in ("latest", "milestone"):
            send(c, step, kind=kind)
    save(c, 5, kind="final")
    assert c.close(timeout=10) == []
    kept = [(n.split("-")[2], int(n.split("-")[1])) for n in on_hub(hub, c.run_id)]
    assert sorted(kept) == [("final", 5), ("latest", 3), ("latest", 4), ("milestone", 3), ("milestone", 4)]
    assert all(hub.files[k] == b"theirs" for k in foreign)
    receipts = json.loads((tmp_path / "published.json").read_text())
    assert len(receipts) == 9 and all("commit" in r for r in receipts.values())
    assert sum("verified" in line for line in lines) == 9


def test_what_an_upload_took_reaches_the_budget_with_the_next_receipt(hub, tmp_path):
    """The end of a launch reserves that time; it would be an assumption for ever."""
    c, _ = open_folder(tmp_path, publisher=hub)
    send(c, 1)
    assert c.uploads.seconds > 0
    c.uploads.seconds = 12.5
    hub.gate.clear()  # the second one waits
    save(c, 2)
    c.poll()
    save(c, 3)
    budget = schedule.Budget(tiny_settings(job_hours=1.0), 0.0)
    budget.saved(c.poll()[0])
    assert budget.cost("upload") == 12.5
    hub.gate.set()
    idle(c)


def test_training_never_waits_for_the_hub_and_newer_saves_replace_waiting_ones(hub, tmp_path):
    """The Hub hangs in its first upload. Of what waits, every milestone is sent, but only the newest `latest`."""
    c, _ = open_folder(tmp_path, publisher=hub)
    hub.gate.clear()
    began = time.monotonic()
    save(c, 1, 2, 3)
    save(c, 4, 5, kind="milestone")
    save(c, 6, 7, 8, 9)
    assert time.monotonic() - began < 25 and len(c.poll()) == 9
    latest = [int(n.split("-")[1]) for n in names_in(tmp_path) if "latest" in n]
    # 1 is being uploaded: never rotated; 2 and 3 gave way to keep + 2 younger ones
    assert latest == [1, 6, 7, 8, 9]
    assert c.uploads.active in c.uploads.pending, "close would not wait for it"
    hub.gate.set()
    assert c.close(timeout=10) == []
    sent = [int(call.split("step-")[1].split("-")[0]) for call in hub.calls if call.startswith("upload")]
    assert sorted(sent) == [1, 4, 5, 9]


def test_a_hub_that_fails_is_tried_again_and_nothing_local_is_deleted_for_it(hub, tmp_path):
    hub.failing = 12  # the pauses between tries have an upper bound
    c, lines = open_folder(tmp_path, publisher=hub, keep=1)
    send(c, 1, kind="milestone")
    assert c.uploads.failures == 12 and sum("UPLOAD FAILED" in line for line in lines) == 12
    hub.failing = 10**9
    save(c, 2, 3, kind="final")
    began = time.monotonic()
    assert len(c.close(timeout=0.3)) == 2 and time.monotonic() - began < 10
    assert any("NOT on the Hub" in line for line in lines) and len(names_in(tmp_path)) == 3
    hub.failing = 0
    c, _ = open_folder(tmp_path, publisher=hub, keep=1)  # the next launch sends what this one could not
    c.newest()
    assert c.close(timeout=10) == []
    assert len(on_hub(hub, c.run_id)) == 3


def test_local_rotation_waits_for_the_hub_but_not_for_ever(hub, tmp_path):
    """While the Hub has nothing of a kind, keep + 2 local checkpoints of it stay; with a newer one there, keep do."""
    hub.failing = 10**9
    c, lines = open_folder(tmp_path, publisher=hub, keep=1)
    save(c, *range(1, 8), kind="milestone")
    left = [int(n.split("-")[1]) for n in names_in(tmp_path)]
    assert left[-3:] == [5, 6, 7] and len(left) <= 4, "one more while it is being uploaded"
    assert any("although the Hub has no copy" in line for line in lines)
    hub.failing = 0
    idle(c)
    save(c, 8, kind="milestone")
    assert [int(n.split("-")[1]) for n in names_in(tmp_path)][-1] == 8 and len(names_in(tmp_path)) <= 2
    c.close(timeout=10)


def full_disk_scenario(rank, world, folder, victim):
    """One rank's disk holds 9 checkpoints and the Hub refuses all: saves of all kinds; which failed, what is left."""
    hub, write = MemoryHub(), saver.write_tensors
    hub.failing = 10**9
    c, lines = open_folder(folder, rank, world, publisher=hub, keep=1)

    def limited(path, *rest):
        if rank == victim and len(names_in(folder)) >= 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return write(path, *rest)

    saver.write_tensors = limited
    try:
        for step in range(1, 6):
            for kind in ("latest", "best", "milestone"):
                save(c, step, kind=kind)
    finally:
        saver.write_tensors = write
    c.close()
    return c.failures, names_in(folder), sum("to make room" in line for line in lines)


@pytest.mark.parametrize("world, victim", [(1, 0), (2, 1)])
def test_a_disk_filled_by_what_the_hub_refuses_is_freed(tmp_path, world, victim):
    """One save fails, on whichever rank; then the newest `keep` of each kind are left, and the next saves fit."""
    answers = run(full_disk_scenario, world=world, folder=str(tmp_path), victim=victim)
    for failures, names, _ in answers:
        assert [f.split(":")[0] for f in failures] == ["step 4 (latest)"] and "No space left" in failures[0]
        steps = {kind: [int(n.split("-")[1]) for n in names if kind in n] for kind in ROTATED}
        assert steps == {"latest": [3, 5], "best": [3, 4, 5], "milestone": [3, 4, 5]}
    assert [said for _, _, said in answers] == [6, 0][:world], "what rank 0 deletes it says"


def test_checkpoints_of_another_run_are_not_published(hub, tmp_path):
    before, _ = open_folder(tmp_path)
    save(before, 1)
    before.close()
    c, _ = open_folder(tmp_path, publisher=hub, resume="never")
    assert c.run_id != before.run_id and not c.uploads.pending
    assert c.close(timeout=10) == [] and not hub.files


def test_a_younger_one_on_the_hub_is_enough(tmp_path):
    c, lines = open_folder(tmp_path, publisher=MemoryHub(), keep=1)
    names = [f"step-0000000{i}-latest-000{i}" for i in (1, 2, 3)]
    assert not c.uploads.may_delete(names[0], names)
    c.uploads.hub.receipts[f"{c.run_id}/{names[1]}"] = {}
    assert c.uploads.may_delete(names[0], names) and not c.uploads.may_delete(names[2], names[2:])


def test_names_go_by_the_number_of_the_save_however_long_it_is():
    old, new = "step-00000007-best-9999", "step-100000000-latest-10000"
    assert by_serial([new, old, "step-7-best-0001", "step-00000007-best-99"]) == [old, new]


def test_a_hub_that_stores_something_else_is_not_believed(hub, tmp_path):
    """One wrong byte there: no receipt, nothing is deleted in trust of it, and the upload is repeated."""
    hub.corrupt = True
    c, lines = open_folder(tmp_path, publisher=hub, keep=1)
    save(c, 1, 2)
    until(lambda: c.uploads.failures >= 2)
    assert not c.uploads.hub.receipts and len(names_in(tmp_path)) == 2
    assert any("differs" in line for line in lines)
    hub.corrupt = False
    assert c.close(timeout=10) == [] and c.uploads.hub.receipts


def test_a_second_process_that_publishes_the_same_run_is_noticed(hub, tmp_path):
    c, lines = open_folder(tmp_path, publisher=hub)
    send(c, 1)
    hub.files[f"{c.run_id}/step-00000009-latest-0009/manifest.json"] = b"{}"
    save(c, 2)
    until(lambda: c.uploads.failures)
    assert any("another process publishes run" in line for line in lines)
    assert c.close(timeout=0.1)


def test_a_run_whose_local_files_are_gone_resumes_from_the_hub(hub, tmp_path):
    """Found by the folder's name; a damaged newest there falls back to the one before; bits are the saved ones."""
    c, _ = open_folder(tmp_path / "a" / "nova" / "checkpoints", publisher=hub, keep=3)
    send(c, 1, 2, 3)
    c.close()
    victim = next(k for k in sorted(hub.files) if "00000003" in k and k.endswith("safetensors"))
    hub.files[victim] = hub.files[victim][:-1] + b"?"
    again, lines = open_folder(tmp_path / "b" / "nova" / "checkpoints", publisher=hub, keep=3)
    assert again.run_id == c.run_id and any("nothing local" in line for line in lines)
    path = again.newest()
    assert "00000002" in path and any("DAMAGED CHECKPOINT on the Hub" in line for line in lines)
    shared, own = state_for(0, 1, seed=19)
    assert again.load(path, shared, own)[0]["step"] == 2
    assert all_bits(shared) == all_bits(state_for(0, 1, seed=2)[0])
    save(again, 4)
    assert names_in(tmp_path / "b" / "nova" / "checkpoints")[-1].endswith("-0004")  # no serial number twice
    again.close(timeout=10)
    other, _ = open_folder(tmp_path / "c" / "different" / "checkpoints", publisher=hub)
    assert other.run_id != c.run_id and other.newest() is None
    new, _ = open_folder(tmp_path / "d" / "nova" / "checkpoints", publisher=hub, resume="never")
    assert new.run_id != c.run_id and new.newest() is None


def test_a_copy_under_another_name_on_the_hub_is_not_taken(hub, tmp_path):
    c, _ = open_folder(tmp_path / "a" / "nova", publisher=hub)
    save(c, 1)
    c.close(timeout=10)
    for key, content in list(hub.files.items()):
        hub.files[key.replace("step-00000001-latest-0001", "step-00000009-latest-0009")] = content
    again, lines = open_folder(tmp_path / "b" / "nova", publisher=hub)
    assert again.newest().endswith("step-00000001-latest-0001")
    assert any("step-00000009-latest-0009 on the Hub is step-00000001-latest-0001" in line for line in lines)
    again.close(timeout=10)


def test_a_local_checkpoint_is_preferred_and_a_damaged_one_is_replaced_from_the_hub(hub, tmp_path):
    c, _ = open_folder(tmp_path, publisher=hub)
    send(c, 1)
    c.close()
    c, _ = open_folder(tmp_path, publisher=hub)
    assert c.newest() and not any(call.startswith("download") for call in hub.calls)
    c.close()
    damage(str(tmp_path / names_in(tmp_path)[0]), random.Random(1))
    c, lines = open_folder(tmp_path, publisher=hub)
    verify(c.newest())
    assert any("downloading" in line for line in lines)
    assert any(n.startswith("damaged-") for n in os.listdir(tmp_path))


def test_a_hub_that_does_not_answer_at_the_start_is_not_a_fresh_start(tmp_path):
    """Whether there is a checkpoint is unknown then: the run stops."""

    class Dead(MemoryHub):
        def list(self, prefix=""):
            raise OSError("no route to the Hub")

    with pytest.raises((CheckpointError, OSError), match="no route"):
        open_folder(tmp_path, publisher=Dead())
    c, _ = open_folder(tmp_path, publisher=Dead(), resume="never")
    assert c.newest() is None


@pytest.fixture(name="left_behind")
def fixture_left_behind(tmp_path):
    """(folder, hub): a machine's folder with save 1, which is on the Hub, where another machine went on to 2 and 3."""
    hub, folders = MemoryHub(), [tmp_path / machine / "nova" / "checkpoints" for machine in "ab"]
    for steps, folder in zip(((1,), (2, 3)), folders, strict=True):
        c, _ = open_folder(folder, publisher=hub, keep=3)
        c.newest()
        send(c, *steps)
        c.close()
    return folders[0], hub


def step_of(path) -> int:
    return int(os.path.basename(path).split("-")[1])


def test_what_was_never_published_does_not_hide_what_another_machine_did(tmp_path):
    """A loses the Hub after step 1 and saves 2 and 3; B goes on from 1 to 90: fewer saves, more work."""
    hub, folders = MemoryHub(), [tmp_path / machine / "nova" / "checkpoints" for machine in "ab"]
    a, _ = open_folder(folders[0], publisher=hub, keep=1)
    send(a, 1)
    hub.failing = 10**9
    save(a, 2, 3)
    a.close()
    hub.failing = 0
    b, _ = open_folder(folders[1], publisher=hub, keep=1)
    assert step_of(b.newest()) == 1
    send(b, 90)
    b.close()
    a, _ = open_folder(folders[0], publisher=hub, keep=1)
    assert step_of(a.newest()) == 90
    save(a, 91)
    a.close(timeout=10)
    assert [step_of(n) for n in a.uploads.hub.names()] == [91]
    assert {step_of(prefix) for prefix in a.uploads.hub.receipts} == {1, 91}, "nor 2 or 3 for a while"
    again, _ = open_folder(folders[0], publisher=hub, keep=1)
    assert step_of(again.newest()) == 91, "the newest by its number again"


@pytest.mark.parametrize("harmed, step", [((), 3), ((3,), 2), ((2, 3), 1)])
def test_a_machine_that_comes_back_goes_on_from_what_another_has_published_since(left_behind, harmed, step):
    """Else it trains the same steps again, and rotates the newer ones away. What is damaged there is passed over."""
    folder, hub = left_behind
    for key in [k for k in hub.files if any(f"step-0000000{n}" in k for n in harmed)]:
        hub.files[key] = b"?" + hub.files[key][1:]
    c, lines = open_folder(folder, publisher=hub, keep=3)
    path = c.newest()
    verify(path)
    assert step_of(path) == step
    assert sum("DAMAGED CHECKPOINT on the Hub" in line for line in lines) == len(harmed)
    save(c, 9)
    assert names_in(folder)[-1].endswith("-latest-0004"), "a number of the other machine was used twice"
    c.close(timeout=10)


def test_a_newer_one_that_cannot_be_downloaded_is_not_gone_behind(left_behind, monkeypatch):
    folder, hub = left_behind
    hub.failing = 1
    c, _ = open_folder(folder, publisher=hub)
    with pytest.raises(CheckpointError, match="0003 on the Hub is newer.*503 from the Hub.*--publish=False"):
        c.newest()
    c.close(timeout=10)


def test_a_hub_that_does_not_answer_stops_no_run_that_has_a_checkpoint_here(left_behind, monkeypatch):
    folder, hub = left_behind
    c, lines = open_folder(folder, publisher=hub)

    def dead(prefix=""):
        raise OSError("no route to the Hub")

    monkeypatch.setattr(hub, "list", dead)
    path = c.newest()
    assert step_of(path) == 1 and any("going on with what is here" in line for line in lines)
    damage(path, random.Random(1))
    with pytest.raises(CheckpointError, match="could not be asked for one: no route"):
        c.newest()


def test_write_access_must_be_proven_unless_the_hub_is_silent_and_the_run_is_here(left_behind, tmp_path):
    folder, lines = left_behind[0], []

    class Silent(MemoryHub):
        final = False

        def check_write(self):
            raise HubError("given up after 240 s", final=self.final)

    publisher = Silent()
    uploads.check_write(publisher, str(folder), "auto", lines.append)
    assert "Going on all the same" in lines[0]
    refused = ((tmp_path / "new", "auto", False), (folder, "never", False), (folder, "auto", True))
    for where, resume, publisher.final in refused:
        with pytest.raises(HubError):
            uploads.check_write(publisher, str(where), resume, lines.append)


def test_the_newest_of_a_run_is_taken_from_the_hub_where_the_local_one_is_damaged(hub, tmp_path):
    """Not the one before it, which is intact here: what the Hub holds was trained, and paid."""
    c, _ = open_folder(tmp_path, publisher=hub)
    send(c, 1, 2)
    c.close()
    damage(str(tmp_path / names_in(tmp_path)[1]), random.Random(1))
    c, lines = open_folder(tmp_path, publisher=hub)
    assert step_of(c.newest()) == 2 and any("downloading" in line for line in lines)


def test_a_fresh_start_says_which_other_runs_the_hub_holds(left_behind, tmp_path):
    """On an empty disk, another name of out_dir is all that parts it from going on."""
    c, lines = open_folder(tmp_path / "c" / "other" / "checkpoints", publisher=left_behind[1])
    said = next(line for line in lines if "a fresh start" in line)
    assert "also holds run nova-2" in said and said.endswith("--out_dir=…/nova") and c.newest() is None


def test_an_export_is_published_beside_its_report(hub, tmp_path):
    c, _ = open_folder(tmp_path / "checkpoints", publisher=hub)
    shared, _ = state_for(0, 1)
    c.export({"a": shared["model.a"]}, {"d": 1})
    (tmp_path / "report.json").write_text("{}")
    c.publish({"report.json": str(tmp_path / "report.json")})
    assert c.close(timeout=10) == []
    assert set(hub.files) == {"model.safetensors", "config.json", "manifest.json", "report.json"}


def test_the_newest_goes_first_when_time_is_short(hub, tmp_path):
    """It is what the next machine goes on from; a milestone that was saved before it can wait for the next launch."""
    c, _ = open_folder(tmp_path / "checkpoints", publisher=hub)
    hub.gate.clear()
    save(c, 1, 2, 3, kind="milestone")
    save(c, 4)
    c.export({"a": torch.zeros(2)}, {"d": 1})
    c.publish({})
    until(lambda: hub.calls)  # the first is on its way
    c.uploads.close(timeout=0)
    hub.gate.set()
    until(lambda: len(hub.calls) == 6)
    names = names_in(tmp_path / "checkpoints")
    assert [call.rpartition("/")[2] for call in hub.calls[:2]] == [names[0], names[3]]
    c.close(timeout=10)


class Refusing(MemoryHub):
    """Says no for good to whatever is `refused`, and 503 to the first `failing` of the others."""

    refused = "step-"

    def upload(self, folder, prefix):
        if self.refused in prefix or not prefix:
            self.calls.append(f"upload {prefix}")
            raise HubError("status 403: storage quota exceeded", final=True)
        return super().upload(folder, prefix)


def test_the_end_does_not_wait_for_a_hub_that_refuses_everything(tmp_path, monkeypatch):
    """Hours of eight GPUs: each upload has one more attempt, without the pauses between launches' retries."""
    hub = Refusing()
    c, lines = open_folder(tmp_path / "checkpoints", publisher=hub)
    save(c, 1, kind="milestone")
    until(lambda: c.uploads.failures)
    monkeypatch.setattr(uploads.Uploads, "RETRY", (60.0, 900.0))
    save(c, 2, kind="final")
    c.export({"a": torch.zeros(2)}, {"d": 1})
    c.publish({})
    began, tried = time.monotonic(), len(hub.calls)
    left = c.close(timeout=100)
    assert time.monotonic() - began < 20 and len(hub.calls) - tried <= 5
    assert [p.rpartition("/")[2] for p in sorted(left)] == ["export", *names_in(tmp_path / "checkpoints")]
    said = next(line for line in lines if "NOT on the Hub: " in line)
    assert "export" in said and "the same command publishes them later" in said and ", ," not in said
    assert any("UPLOAD FAILED" in line and ": export: " in line for line in lines)


def test_a_refusal_of_one_does_not_give_up_the_others(tmp_path):
    hub = Refusing()
    hub.refused, hub.failing = "milestone", 3
    c, _ = open_folder(tmp_path, publisher=hub)
    save(c, 1, kind="milestone")
    save(c, 2)
    save(c, 3, kind="final")
    assert [p.rpartition("/")[2] for p in c.close(timeout=20)] == names_in(tmp_path)[:1]
    assert len(on_hub(hub, c.run_id)) == 2


def stopped_wait_scenario(rank, world, folder):
    """A Hub that hangs; the last rank alone has a signal after a second. (what is left, seconds until it left)"""
    hub = MemoryHub()
    c, _ = open_folder(folder, rank, world, publisher=hub)
    hub.gate.clear()
    save(c, 1)
    began = time.monotonic()
    left = c.close(40, stop=lambda: rank == world - 1 and time.monotonic() > began + 1)
    seconds = time.monotonic() - began
    hub.gate.set()
    return len(left), seconds


@pytest.mark.parametrize("world", [1, 2])
def test_a_signal_on_any_rank_ends_the_wait_on_all(tmp_path, world):
    for left, seconds in run(stopped_wait_scenario, world=world, folder=str(tmp_path)):
        assert left == 1 and 1 < seconds < 15


def two_ranks_scenario(rank, world, folder):
    """Rank 0 uploads; close and resume are agreed. The hub lives in rank 0's memory only."""
    hub = MemoryHub()
    c, lines = open_folder(folder, rank, world, publisher=hub)
    assert (c.uploads is None) == (rank > 0)
    save(c, 1)
    threading.Timer(1.5, hub.gate.set).start()
    hub.gate.clear()
    left = c.close(timeout=20)
    if rank == 0:
        os.rename(folder, folder + ".gone")
    dist.barrier()
    c, _ = open_folder(folder, rank, world, publisher=hub)
    shared, own = state_for(rank, world, seed=5)
    state, own_loaded = c.load(c.newest(), shared, own)
    same = all_bits(shared) == all_bits(state_for(rank, world, seed=1)[0])
    c.close()
    return left, state["step"], own_loaded, same


def test_two_ranks_close_and_resume_from_the_hub_together(tmp_path):
    answers = run(two_ranks_scenario, world=2, folder=str(tmp_path / "nova"))
    assert answers == [([], 1, True, True)] * 2
