"""Checkpoints: what is saved is what was there, what is loaded is what was saved, and whose folder it is.

Values are compared as bytes. Damage is in test_checkpoint_damage.py, kills and failing disks are in
test_checkpoint_faults.py.
"""

import json
import os
import pickle
import random
import re
import shutil
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_tools import (
    MemoryHub,
    Ranks,
    all_bits,
    damage,
    digest_of,
    names_in,
    open_folder,
    reference,
    save,
    saved_once,
    state_for,
)
from conftest import ROOT, tiny_settings
from workers import Rank, run

import settings
from store import CheckpointError, read_export, read_model, uploads, verify
from store.export import export
from store.folder import check_shared_folder

pytestmark = pytest.mark.usefixtures("one_rank_group")


def save_scenario(rank, world, folder, replicas=1):
    c, _ = open_folder(folder, rank, world)
    shared, own = state_for(rank, world, replicas=replicas)
    c.save(5, "latest", shared, own, {"step": 5, "loss": 0.1 + 0.2}, wait=True)
    receipts, failures = c.poll(), c.failures
    c.close()
    return receipts, failures, all_bits(own)


def load_scenario(rank, world, folder, replicas=1):
    """Loads over other values; (whether all bits are the reference's, state, own_loaded, own's bits)."""
    c, _ = open_folder(folder, rank, world)
    shared, own = state_for(rank, world, seed=99, replicas=replicas)
    state, own_loaded = c.load(c.newest(), shared, own)
    expected, _ = state_for(rank, world, replicas=replicas)
    c.close()
    return all_bits(shared) == all_bits(expected), state, own_loaded, all_bits(own)


LAYOUTS = [dict(world=w, replicas=r) for w, r in ((1, 1), (2, 1), (4, 1), (4, 2))]  # the last: HSDP


@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
def test_any_world_size_loads_any_other_bit_for_bit(tmp_path, saved):
    """Uneven shards, ranks without rows, every dtype, NaN, HSDP; `own` only where the layout is the same."""
    results = run(save_scenario, folder=str(tmp_path), **saved)
    assert all(not failures and len(receipts) == 1 for receipts, failures, _ in results)
    for target in LAYOUTS:
        loaded = run(load_scenario, folder=str(tmp_path), **target)
        for (equal, state, own_loaded, own), was in zip(loaded, results * 4, strict=False):
            assert equal and state == {"step": 5, "loss": 0.1 + 0.2}, (saved, target)
            assert own_loaded == (saved == target) and (not own_loaded or own == was[2])


def test_every_file_opens_without_torch_and_holds_the_values(tmp_path):
    """JSON and safetensors only, put together by hand with numpy: nothing in a checkpoint needs an unpickler."""
    run(save_scenario, world=2, folder=str(tmp_path))
    (name,) = names_in(tmp_path)
    values, seen = {}, set()
    for file in digest_of(tmp_path / name):
        data = (tmp_path / name / file).read_bytes()
        if file.endswith(".json"):
            json.loads(data)
            continue
        assert file.endswith(".safetensors")
        n = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + n])
        offsets = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
        for key, entry in header.items():
            seen.add((file, key))
            start, end = entry["data_offsets"]
            if entry["dtype"] == "F32" and key in offsets:
                piece = np.frombuffer(data[8 + n + start : 8 + n + end], "<f4").reshape(entry["shape"])
                values.setdefault(key, []).append((offsets[key]["saved_offsets"], piece))
    for key, whole in reference().items():
        if whole.dtype == torch.float32:
            pieces = [p for _, p in sorted(values[key], key=lambda item: item[0])]
            assert np.concatenate(pieces).tobytes() == whole.numpy().tobytes(), key
    assert len(seen) > 2 * 5


def test_sources_never_touch_pickle():
    """The checkpoint files neither unpickle nor write what only an unpickler reads."""
    unpickles = r"torch\.(load|save)\b|import pickle|pickle\.|shelve|\beval\(\w+\)|exec\(|FileSystemWriter"
    files = [Path(ROOT, "sample.py"), *Path(ROOT, "store").glob("*.py")]
    assert len(files) > 6 and not [f for f in files if re.search(unpickles, f.read_text("utf-8"))]


def test_an_evil_pickle_in_any_place_is_refused_unopened(tmp_path):
    """A pickle that would run code, under every name of a checkpoint: it is refused and does not run."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "PWNED"),)

    saved_once(tmp_path / "run")
    (name,) = names_in(tmp_path / "run")
    for file in digest_of(tmp_path / "run" / name):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "run" / name, copy)
        (copy / file).write_bytes(pickle.dumps(Evil()))
        with pytest.raises(CheckpointError):
            read_model(str(copy))
        shutil.rmtree(copy)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    "part, value, says",
    [
        ("shared", 3.0, "not a tensor"),
        ("own", 7, "not a tensor"),
        ("shared", None, "not a tensor"),
        ("shared", torch.empty(2, device="meta"), "can't be saved"),
        ("shared", torch.zeros(2, dtype=torch.complex64), "can't be saved"),
        ("state", float("nan"), "not JSON"),
        ("state", torch.zeros(1), "not JSON"),
        ("kind", "newest", "kind"),
    ],
)
def test_what_cannot_be_saved_is_an_error_at_once(tmp_path, part, value, says):
    """DCP would write a Python number in silence and then fail to load it."""
    c, _ = open_folder(tmp_path)
    call = {"shared": {"w": torch.ones(2)}, "own": {}, "state": {}, "kind": "latest"}
    call[part] = value if part == "kind" else {**call[part], "x": value}
    with pytest.raises(CheckpointError, match=says):
        c.save(1, call["kind"], call["shared"], call["own"], call["state"])
    assert not names_in(tmp_path)


def disagree_scenario(rank, world, folder):
    """Rank 1 alone passes a number, then another step: no rank may go on alone."""
    c, _ = open_folder(folder, rank, world)
    errors = []
    for shared, step in [({"w": 3.0 if rank else torch.ones(2)}, 1), ({"w": torch.ones(2)}, rank)]:
        try:
            c.save(step, "latest", shared, {}, {})
        except Exception as e:
            errors.append(f"{type(e).__name__}: {e}")
    c.close()
    return errors


def test_a_bad_save_on_one_rank_is_an_error_on_all(tmp_path):
    errors = run(disagree_scenario, world=2, folder=str(tmp_path))
    assert all(len(e) == 2 and "not a tensor" in e[0] and "disagree" in e[1] for e in errors), errors


def test_load_is_strict(tmp_path):
    """A missing or unknown key, another shape or dtype: refused, and no tensor is touched."""
    saved_once(tmp_path)
    c, _ = open_folder(tmp_path)
    path = c.newest()
    shared, own = state_for(0, 1, seed=50)
    before = all_bits(shared)
    less = {k: v for k, v in shared.items() if k != "model.a"}
    for wrong, says in [
        (less, "model.a"),
        ({**shared, "model.new": torch.ones(1)}, "model.new"),
        ({**shared, "_orig_mod.model.a": shared["model.a"]}, "_orig_mod"),
        ({**shared, "adamw.step": torch.ones(2)}, "adamw.step"),
        ({**shared, "adamw.step": torch.tensor(1.0, dtype=torch.float64)}, "adamw.step"),
        ({**shared, "model.a": torch.ones(5, 7)}, "model.a"),
    ]:
        with pytest.raises(CheckpointError, match=re.escape(says)):
            c.load(path, wrong, own)
    assert all_bits(shared) == before
    other = {**own, "codes": torch.zeros(99, dtype=torch.uint8)}
    assert c.load(path, shared, other)[1] is False
    assert c.load(path, shared, own)[1] is True


def test_training_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    """The writer is held: live tensors change, what is saved is what they were at the call. One save is in flight."""
    gate, plain = threading.Event(), dcp.save
    monkeypatch.setattr(dcp, "save", lambda *a, **k: (gate.wait(30), plain(*a, **k))[1])
    c, _ = open_folder(tmp_path)
    shared, own = state_for(0, 1)
    state = {"list": [1]}
    expected = all_bits(shared), all_bits(own)
    c.save(1, "latest", shared, own, state)
    for tensor in shared.values():
        tensor.zero_()
    own["codes"].zero_()
    state["list"].append(2)
    assert c.poll() == [] and names_in(tmp_path) == []
    threading.Timer(0.3, gate.set).start()
    c.save(2, "latest", shared, own, state)
    assert len(names_in(tmp_path)) == 1
    c.wait()
    receipts = c.poll()
    assert [r["step"] for r in receipts] == [1, 2] and c.poll() == []
    assert receipts[0]["pause"] < 0.25 < receipts[1]["pause"]
    loaded, mine = state_for(0, 1, seed=3)
    assert c.load(str(tmp_path / receipts[0]["name"]), loaded, mine) == ({"list": [1]}, True)
    assert (all_bits(loaded), all_bits(mine)) == expected


def slow_rank_scenario(rank, world, folder):
    """Rank 1's thread ends half a second after rank 0's; the step at which poll hands out the receipt."""
    c, _ = open_folder(folder, rank, world)
    write = c.saver._write

    def slow(*arguments):
        receipt = write(*arguments)
        time.sleep(0.5 * rank)
        return receipt

    c.saver._write = slow
    c.save(1, "latest", *state_for(rank, world), {})
    step, receipts = 0, []
    while not receipts and step <= 200:
        time.sleep(0.05)
        step, receipts = step + 1, c.poll()
        dist.barrier()  # a training step
    c.close()
    return step, [r["name"] for r in receipts]


def test_all_ranks_get_a_receipt_at_the_same_step(tmp_path):
    first, second = run(slow_rank_scenario, world=2, folder=str(tmp_path))
    assert first == second and first[1] and first[0] > 3


def test_buffers_are_reused_and_parents_recorded(tmp_path):
    """The second save copies into the memory of the first; each manifest names the checkpoint it came from."""
    c, _ = open_folder(tmp_path)
    shared, own = state_for(0, 1)
    places = []
    for step in (1, 2):
        c.save(step, "latest", shared, own, {}, wait=True)
        places.append({k: v.data_ptr() for k, v in c.saver.buffers.items()})
    assert places[0] == places[1]
    first, second = (verify(str(tmp_path / n)) for n in names_in(tmp_path))
    assert first["parent"] is None and second["parent"] == f"{c.run_id}/{names_in(tmp_path)[0]}"
    c.close()
    c, _ = open_folder(tmp_path)
    c.load(c.newest(), shared, own)
    c.save(3, "milestone", shared, own, {}, wait=True)
    assert verify(str(tmp_path / names_in(tmp_path)[-1]))["parent"].endswith(names_in(tmp_path)[1])


def test_room_is_what_rotation_may_keep_less_what_this_run_has_written(tmp_path):
    """With a Hub that takes nothing, more of each kind stay. However much is here, a save needs room before it makes any."""
    saved_once(tmp_path, 1, 2)
    c, _ = open_folder(tmp_path, keep=2)
    files = [p for p in tmp_path.glob("step-*/**/*") if p.is_file() and p.name != "manifest.json"]
    held = sum(p.stat().st_size for p in files)
    assert c.room(1000 * held) == 8 * 1000 * held - held and c.room(held // 100) == 2 * (held // 100)
    for publisher, saves in ((None, 8), (MemoryHub(), 14)):
        c.close()
        c, _ = open_folder(tmp_path, keep=2, resume="never", publisher=publisher)
        assert c.room(1000) == saves * 1000


def test_rotation_keeps_the_newest_of_each_kind(tmp_path):
    c, _ = open_folder(tmp_path, keep=2)
    for kind in ("latest", "best", "milestone", "final"):
        save(c, 1, 2, 3, 4, kind=kind)
    kept = {}
    for name in names_in(tmp_path):
        kept.setdefault(name.split("-")[2], []).append(int(name.split("-")[1]))
    assert kept == {"latest": [3, 4], "best": [3, 4], "milestone": [3, 4], "final": [1, 2, 3, 4]}


def test_rotation_goes_by_the_order_of_saves_not_by_step(tmp_path):
    """After a fallback the run is at a lower step than the damaged checkpoint: its new saves are the ones to keep."""
    saved_once(tmp_path, 50, 100, keep=2)
    damage(str(tmp_path / names_in(tmp_path)[1]), random.Random(4))
    c, _ = open_folder(tmp_path, keep=2)
    assert "00000050" in c.newest()
    save(c, 60, 70)
    assert [n.split("-")[1] for n in names_in(tmp_path)] == ["00000060", "00000070"]
    assert "00000070" in c.newest()


def test_serial_numbers_go_on_in_whatever_order_a_folder_is_listed(tmp_path, monkeypatch):
    saved_once(tmp_path, 1, 2, 3)
    plain = os.listdir
    for reverse in (False, True):
        monkeypatch.setattr(os, "listdir", lambda path, r=reverse: sorted(plain(path), reverse=r))
        c, _ = open_folder(tmp_path)
        assert c.folder.serial == 3
        c.close()


def test_two_runs_in_one_folder_are_refused(tmp_path):
    first, _ = open_folder(tmp_path)
    with pytest.raises(CheckpointError, match="in use by another run .process"):
        open_folder(tmp_path)
    first.close()
    assert open_folder(tmp_path)[0].run_id == first.run_id


@pytest.mark.parametrize("run_id", ["../x", "a/b", " "])
def test_a_run_record_that_leads_out_of_the_folder_is_refused(tmp_path, run_id):
    (tmp_path / "run.json").write_text(json.dumps({"run_id": run_id, "earlier": []}))
    with pytest.raises(CheckpointError, match="run id"):
        open_folder(tmp_path)


def test_a_checkpoint_of_another_run_is_skipped(tmp_path):
    saved_once(tmp_path / "a", 1)
    saved_once(tmp_path / "b", 2, 3)
    for name in names_in(tmp_path / "b"):
        shutil.copytree(tmp_path / "b" / name, tmp_path / "a" / name)
    c, lines = open_folder(tmp_path / "a")
    assert c.newest().endswith("step-00000001-latest-0001")
    assert any("belongs to run b-" in line for line in lines)
    save(c, *range(4, 8))
    # rotation never took them for its own
    assert set(names_in(tmp_path / "b")) <= set(names_in(tmp_path / "a"))
    c.close()
    os.unlink(tmp_path / "a" / "run.json")
    with pytest.raises(CheckpointError, match="several runs"):
        open_folder(tmp_path / "a")


def test_a_lost_run_record_is_read_from_the_checkpoints(tmp_path):
    saved_once(tmp_path)
    run_id = json.loads((tmp_path / "run.json").read_text())["run_id"]
    for content in (None, "{", "[]", '{"run_id": 1'):
        os.unlink(tmp_path / "run.json")
        if content is not None:
            (tmp_path / "run.json").write_text(content)
        c, _ = open_folder(tmp_path)
        assert c.run_id == run_id and c.newest()
        c.close()


def test_resume_never_touches_no_existing_checkpoint(tmp_path):
    """Old files stay as they are through any number of saves; the next start goes on with the new run."""
    saved_once(tmp_path, 1, 2)
    old = names_in(tmp_path)
    before = {n: digest_of(tmp_path / n) for n in old}
    c, lines = open_folder(tmp_path, resume="never")
    assert c.newest() is None and any("stay untouched" in line for line in lines)
    save(c, *range(1, 6))
    c.close()
    assert {n: digest_of(tmp_path / n) for n in old} == before
    again, _ = open_folder(tmp_path)
    assert again.run_id == c.run_id and "00000005" in again.newest()


def test_resume_must_and_auto_without_a_checkpoint(tmp_path):
    c, _ = open_folder(tmp_path, resume="must")
    with pytest.raises(CheckpointError, match="resume=must"):
        c.newest()
    c.close()
    c, _ = open_folder(tmp_path)
    assert c.newest() is None


def test_changed_settings_are_listed_or_refused():
    """Free ones are listed; those that change the course need allow_change; the weights' form can't change at all."""
    saved = tiny_settings().as_dict()
    assert settings.refuse_changes(saved, tiny_settings()) == []
    assert settings.refuse_changes(saved, tiny_settings(log_every=3)) == ["log_every: 10 -> 3"]
    lines = settings.refuse_changes(saved, tiny_settings(beta2=0.9, allow_change=["beta2"]))
    assert "beta2: 0.95 -> 0.9" in lines
    for changes, says in (
        (dict(beta2=0.9), r"beta2: 0.95 -> 0.9 .*--allow_change=beta2"),
        (dict(beta2=0.9, allow_change=["beta1"]), "beta2: 0.95 -> 0.9"),
        (dict(n_layers=3, allow_change=["n_layers"]), "n_layers: 2 -> 3 .*another out_dir"),
    ):
        with pytest.raises(settings.SettingsError, match=says):
            settings.refuse_changes(saved, tiny_settings(**changes))


def shared_folder_scenario(rank, world, folder, apart):
    try:
        mine = os.path.join(folder, str(rank)) if apart else folder
        check_shared_folder(mine, Ranks(rank, world), patience=0.5)
        return "ok"
    except Exception as e:
        return str(e)


def test_nodes_without_a_shared_file_system_are_noticed(tmp_path):
    assert run(shared_folder_scenario, world=2, folder=str(tmp_path / "x"), apart=False) == ["ok", "ok"]
    assert os.listdir(tmp_path / "x") == []
    apart = run(shared_folder_scenario, world=2, folder=str(tmp_path), apart=True)
    assert all("shared file system" in error for error in apart)


def test_a_long_transfer_says_that_it_goes_on():
    agree, said = Rank(), []
    agree.busy = said.append
    assert uploads.patiently(lambda: time.sleep(1.2) or "path", agree) == "path"
    assert said == [uploads.PATIENCE]


def model_of(state, without="nothing") -> dict:
    return {k[6:]: v for k, v in state.items() if k.startswith("model.") and without not in k}


def export_scenario(rank, world, folder, file_bytes):
    tensors = model_of(state_for(rank, world)[0], without="fp8")
    export(folder, tensors, {"d_model": 64}, Ranks(rank, world), file_bytes=file_bytes)


@pytest.mark.parametrize("file_bytes", [10**9, 300])
def test_an_export_has_the_same_bytes_from_any_number_of_ranks(tmp_path, file_bytes):
    """One file, or several with an index, replaced as a whole; read back bit for bit."""
    for world in (1, 2, 4):
        for _ in range(2):
            run(export_scenario, world=world, folder=str(tmp_path / str(world)), file_bytes=file_bytes)
    files = digest_of(tmp_path / "1")
    assert files == digest_of(tmp_path / "2") == digest_of(tmp_path / "4")
    one, several = (name in files for name in ("model.safetensors", "model.safetensors.index.json"))
    assert one == (file_bytes > 300) == (not several)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "4"]
    config, tensors = read_export(str(tmp_path / "2"))
    expected = model_of(reference(), without="fp8")
    assert config == {"d_model": 64} and all_bits(tensors) == all_bits(expected)
    if file_bytes == 300:
        index = json.loads((tmp_path / "1" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(expected) and set(index["weight_map"].values()) < set(files)
    (tmp_path / "1" / "report.json").write_text("{}")  # joins an export later
    read_export(str(tmp_path / "1"))
    victim = tmp_path / "1" / next(f for f in sorted(files) if f.endswith("safetensors"))
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="sha256"):
        read_export(str(tmp_path / "1"))


def test_a_model_is_read_without_a_process_group(tmp_path):
    """From a checkpoint, from the run's folder, past a damaged newest; whole tensors of a sharded save."""
    folder = tmp_path / "out" / "checkpoints"
    run(read_model_scenario, world=2, folder=str(folder))
    damage(str(folder / names_in(folder)[-1]), random.Random(0))
    for path in (folder / names_in(folder)[0], folder, tmp_path / "out"):
        config, tensors = read_model(str(path))
        assert config == {"layers": 2} and all_bits(tensors) == all_bits(model_of(reference()))
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        read_model(str(tmp_path / "out" / "nothing"))


def read_model_scenario(rank, world, folder):
    c, _ = open_folder(folder, rank, world)
    for step in (1, 2):
        c.save(step, "latest", *state_for(rank, world), {"config": {"layers": 2}}, wait=True)
    c.close()
