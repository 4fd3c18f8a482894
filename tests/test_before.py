"""What was saved before the files moved into rooms loads after it: tests/before holds a checkpoint and an export.

They were written by commit 06574ab with SETTINGS: one process, one thread, 8 steps of a toy model on tests/before/data;
metrics.jsonl is that run's, uninterrupted, and expected.json what its export answers. Formats are promises to users:
when this fails, give the reader of the old form back; do not write the files anew.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import sample

BEFORE = os.path.join(ROOT, "tests", "before")
SETTINGS = """
    --data=data --out_dir=run --domains=text --d_model=16 --n_layers=2 --n_heads=2 --n_kv_heads=1 --ffn_hidden=32
    --max_len=32 --total_steps=8 --warmup_steps=2 --ctx_warmup_steps=0 --sequences_per_step=8 --micro_batch=4
    --val_rows=2 --eval_rows=2 --final_eval_rows=2 --eval_every=3 --ckpt_every=4 --sample_tokens=8 --threads=1
    --device=cpu --use_compile=false --muon_lr=4e-3 --lr=2e-3 --adamw=8bit --shard_refresh_steps=0 --log_every=1
""".split()


def steps(path) -> dict[int, dict]:
    """{step: row} of the training steps in a metrics.jsonl."""
    with open(path, encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    return {row["step"]: row for row in rows if row["kind"] == "step"}


def test_a_checkpoint_made_before_goes_on_as_its_run_did(tmp_path):
    """From step 4 to 8: the rest of the uninterrupted run. Bit-equal on the CPU that made it; another one sums in
    another order, which moves a loss of 5.5 by some 1e-7 a step: 1e-5 is far above that, and far below what a lost
    momentum, another rate or other rows make (1e-3)."""
    shutil.copytree(os.path.join(BEFORE, "data"), tmp_path / "data")
    shutil.copytree(os.path.join(BEFORE, "run", "checkpoints"), tmp_path / "run" / "checkpoints")
    command = [sys.executable, os.path.join(ROOT, "train_nova.py"), *SETTINGS, "--resume=must"]
    how = dict(env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    done = subprocess.run(command, cwd=tmp_path, **how)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    want, got = steps(os.path.join(BEFORE, "metrics.jsonl")), steps(tmp_path / "run" / "metrics.jsonl")
    assert list(got) == list(range(1, 9))
    for step in range(1, 5):  # not trained again: the checkpoint's own rows
        assert got[step] == want[step]
    for step in range(5, 9):
        for what in ("loss", "grad_norm", "muon_lr", "lr", "momentum", "ctx", "tokens"):
            near = pytest.approx(want[step][what], rel=1e-5 if what in ("loss", "grad_norm") else 0, abs=0)
            assert got[step][what] == near, (step, what)


def test_an_export_made_before_answers_as_it_did():
    with open(os.path.join(BEFORE, "expected.json"), encoding="utf-8") as f:
        expected = json.load(f)
    model, settings, tokenizer = sample.load(os.path.join(BEFORE, "run", "export"))
    prompt = tokenizer.encode(expected["prompt"])
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[0, -1, : settings.vocab_size]
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=0, atol=1e-4)
    ids = sample.generate(model, prompt, len(expected["greedy_ids"]), settings.max_len, "cpu", temperature=0)
    assert ids == expected["greedy_ids"]


def test_nothing_kept_from_before_names_the_machine_that_made_it():
    for folder, _, names in os.walk(BEFORE):
        for name in names:
            with open(os.path.join(folder, name), "rb") as f:
                content = f.read()
            assert not re.search(rb'"/\w', content), f"{name} holds an absolute path"
