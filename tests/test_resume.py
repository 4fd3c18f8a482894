"""A resumed run is the same run: stopped at step 5, given again, every later loss is the uninterrupted run's.

To the bit at the same number of ranks, whatever the run uses; to rounding at another. Real processes. A few are marked
slow; all of them, slow and drill: pytest tests/test_resume.py -m "slow or drill"
"""

import pytest
from test_run import fixture_world, losses, train  # noqa: F401 (a fixture)

slow, drill = pytest.mark.slow, pytest.mark.drill
IN_CI = ("context warm-up", "epoch end", "float8", "8-bit AdamW")

VARIANTS = {
    "plain": [],
    "untied": ["--tie_embeddings=false"],
    "context warm-up": ["--ctx_start_len=8", "--ctx_warmup_steps=8"],
    "evaluation and milestone at the stop": ["--eval_every=5", "--ckpt_every=5"],
    # 192 rows a domain less 4: an epoch ends every 4 steps
    "epoch end": ["--sequences_per_step=96", "--micro_batch=48"],
    "float8": ["--use_fp8=on", "--fp8_emulate=true"],
    "8-bit AdamW": ["--adamw=8bit", "--d_model=128", "--n_heads=4"],
    "diff_v2, gates": ["--attention=diff_v2", "--attn_gate=true"],
    "recomputed": ["--activation_checkpointing=full"],
    "keller_jordan, head by head": ["--muon_coeffs=keller_jordan", "--muon_split_heads=true"],
    "cosine with z-loss": ["--schedule=cosine", "--z_loss=1e-4", "--muon_momentum_warmup=6"],
}
HSDP = ["--shard_size=1", "--micro_batch=2"]


@pytest.mark.parametrize("variant", [pytest.param(v, marks=slow if v in IN_CI else drill) for v in VARIANTS])
def test_resume_is_bit_exact_on_one_process(world, variant):  # noqa: F811
    compare(world, variant, VARIANTS[variant], ranks=0, resume_ranks=0)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("plain", marks=drill),
        pytest.param("8-bit AdamW", marks=slow),
        pytest.param("HSDP", marks=slow),
    ],
)
def test_resume_is_bit_exact_on_two_processes(world, variant):  # noqa: F811
    compare(world, variant, VARIANTS.get(variant, HSDP), ranks=2, resume_ranks=2)


@pytest.mark.parametrize(
    ("variant", "ranks", "resume_ranks"),
    [
        pytest.param("plain", 0, 2, marks=slow),
        pytest.param("8-bit AdamW", 2, 0, marks=slow),
        pytest.param("plain", 2, 0, marks=drill),
        pytest.param("8-bit AdamW", 0, 2, marks=drill),
        pytest.param("plain", 2, 4, marks=drill),
        pytest.param("8-bit AdamW", 2, 4, marks=drill),
    ],
)
def test_resume_on_another_number_of_processes_is_equal_to_rounding(world, variant, ranks, resume_ranks):  # noqa: F811
    compare(world, variant, [*VARIANTS[variant], "--micro_batch=2"], ranks, resume_ranks, tolerance=3e-2)


def compare(world, variant, arguments, ranks, resume_ranks, tolerance=0.0):  # noqa: F811
    name = f"{variant}-{ranks}-{resume_ranks}".replace(" ", "_").replace(",", "")
    train(world, f"{name}-whole", *arguments, ranks=ranks)
    train(world, f"{name}-parts", *arguments, "--stop_at=5", ranks=ranks, expect=0 if ranks else 3)
    train(world, f"{name}-parts", *arguments, ranks=resume_ranks)
    whole, parts = losses(world, f"{name}-whole"), losses(world, f"{name}-parts")
    assert whole.keys() == parts.keys()
    for step, value in whole.items():
        if tolerance:
            assert parts[step][0] == pytest.approx(value[0], abs=tolerance), (step, whole, parts)
        else:
            assert parts[step] == value, (step, whole, parts)
    evaluations = [losses(world, f"{name}-{which}", "evaluation") for which in ("whole", "parts")]
    if not tolerance:
        assert evaluations[0] == evaluations[1]
