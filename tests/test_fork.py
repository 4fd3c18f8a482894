"""The README's worked example of a fork: its diff applies, its tests pass, and a run with it proves its first step."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

SMALL = [
    "--d_model=32", "--n_layers=2", "--n_heads=2", "--n_kv_heads=1", "--ffn_hidden=64", "--max_len=32", "--total_steps=4",
    "--warmup_steps=1", "--eval_every=2", "--ckpt_every=2", "--sample_tokens=4", "--sequences_per_step=4", "--micro_batch=4",
]  # fmt: skip


@pytest.mark.slow
def test_the_readmes_example_works_as_it_stands(tmp_path):
    fork = tmp_path / "fork"
    skipped = shutil.ignore_patterns(".*", "out", "__pycache__")
    shutil.copytree(ROOT, fork, ignore=skipped)
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        example = re.search(r"```diff\n(.*?)```", f.read(), re.DOTALL)[1]

    def run(*command, given=None):
        done = subprocess.run(
            command, cwd=fork, input=given, text=True, capture_output=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run("git", "apply", "-C1", "-", given=example)
    tested = run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/test_model.py",
        "tests/test_settings.py",
        "-k",
        "relu2 or read",
    )
    assert tested.count(".") > 3, tested
    output = run(
        sys.executable,
        "train_nova.py",
        "config/quickstart.py",
        "--ffn=relu2",
        f"--out_dir={tmp_path / 'out'}",
        *SMALL,
    )
    assert "Muon orthogonalised 12 blocks, 12 expected" in output
