"""The README's worked example of a fork: its diff touches the model and its reference alone, applies, passes their tests,
and a run with it proves its first step; behind a switch it takes one line of settings.py more."""

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
SWITCH = {  # file -> (what the example made of it, the same behind a switch)
    "model.py": [
        ("        self.up = Linear(", '        self.gate = Linear(s.d_model, s.ffn_hidden) if s.ffn == "swiglu" else None\n        self.up = Linear('),
        ("return self.down(F.relu(self.up(x)).square())", "up = self.up(x)\n        return self.down(F.relu(up).square() if self.gate is None else F.silu(self.gate(x)) * up)"),
    ],
    "settings.py": [("    ffn_hidden: int", '    ffn: Literal["swiglu", "relu2"] = setting("swiglu", "form of the FFN", MODEL)\n    ffn_hidden: int')],
}  # fmt: skip


@pytest.fixture
def fork(tmp_path):
    """A copy of the project with the README's diff applied; -> (run a command in it, its folder)."""
    folder = tmp_path / "fork"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "out", "__pycache__"))

    def run(*command, given=None) -> str:
        done = subprocess.run(
            command, cwd=folder, input=given, text=True, capture_output=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        example = re.search(r"```diff\n(.*?)```", f.read(), re.DOTALL)[1]
    assert set(re.findall(r"^\+\+\+ b/(.*)$", example, re.M)) == {"model.py", "tests/reference.py"}
    run("git", "apply", "-C1", "-", given=example)
    return run, folder


def proves_its_first_step(run, folder, *options):
    script = [sys.executable, "train_nova.py", "config/quickstart.py", f"--out_dir={folder.parent / 'out'}"]
    assert "Muon orthogonalised 12 blocks, 12 expected" in run(*script, *SMALL, *options)


@pytest.mark.slow
def test_the_readmes_example_works_as_it_stands(fork):
    """All tests of the model but the seed's totals and the exact activation bytes, which are Nova's own."""
    run, folder = fork
    tests = [
        f"tests/test_{name}.py"
        for name in ("model", "model_sharded", "optimizers", "fp8", "kernels", "first_step")
    ]
    tested = run(sys.executable, "-m", "pytest", "-q", *tests, "-k", "not seeds_dimensions")
    assert tested.count(".") > 200, tested
    proves_its_first_step(run, folder)


@pytest.mark.slow
def test_behind_a_switch_it_is_one_line_of_settings_more(fork):
    run, folder = fork
    for name, edits in SWITCH.items():
        text = (folder / name).read_text()
        for before, after in edits:
            assert text.count(before) == 1
            text = text.replace(before, after)
        (folder / name).write_text(text)
    proves_its_first_step(run, folder, "--ffn=relu2")
