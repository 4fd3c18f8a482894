"""Settings: later sources win, and every mistake is one line that names the setting, its origin and the cure."""

import ast
import glob
import os
import re

import pytest
from conftest import ROOT, tiny_settings

import settings
from settings import SettingsError, load_settings

TARGET = "--target_tokens=200e9"
CONFLICT = ["--total_steps=9000", TARGET]
WSD = ["--schedule=wsd", "--total_steps=100", "--decay_frac=0.5"]


def refused(arguments, words):
    with pytest.raises(SettingsError) as error:
        load_settings(arguments, {})
    assert "\n" not in str(error.value) and not [w for w in words if w not in str(error.value)], error.value


def write(tmp_path, text, name="override.py"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_precedence_is_default_environment_files_in_order_command_line(tmp_path):
    first = write(tmp_path, "domains = ['file']\nseed = 1\nlog_every = 3\n", "a.py")
    second = write(tmp_path, "seed = 2\n", "b.py")
    environ = {"DOMAINS": "code, math", "HF_DATASET_REPO": "you/tokens", "NOVA_DEBUG": "1"}
    s = load_settings([first, second, "--log_every=5"], environ)
    assert (s.domains, s.seed, s.log_every, s.data, s.debug) == (["file"], 2, 5, "you/tokens", True)
    assert load_settings([], environ).domains == ["code", "math"]
    assert load_settings([], {"DOMAINS": "1"}).domains == ["1"]
    assert "a.py line 1" in s.source["domains"] and "--log_every" in s.source["log_every"]


def test_override_file_sees_current_values_and_keeps_its_private_names(tmp_path):
    text = "from math import ceil\n_half = total_steps // 2\nwarmup_steps = ceil(total_steps / 50)\nstop_at = _half\n"
    s = load_settings([write(tmp_path, text)], {})
    assert (s.warmup_steps, s.stop_at) == (2600, 65_000)


VALUES = [
    ("--lr=1", "lr", 1.0),
    ("--lr=1e-4", "lr", 1e-4),
    ("--total_steps=5e4", "total_steps", 50_000),
    ("--max_hours=None", "max_hours", None),
    ("--domains=code,math", "domains", ["code", "math"]),
    ("--domains=['code']", "domains", ["code"]),
    ("--domains=2023,2024", "domains", ["2023", "2024"]),  # names may be numbers
    ("--tie_embeddings=false", "tie_embeddings", False),
    ("--use_compile=True", "use_compile", True),
    ("--use_compile=auto", "use_compile", "auto"),
    ("--drill", "drill", True),
    ("--sample-tokens=7", "sample_tokens", 7),
    ("--sample_prompt=3", "sample_prompt", "3"),
    ("--domain_weights=1,2,1,1", "domain_weights", [1, 2, 1, 1]),
]


@pytest.mark.parametrize("argument, name, value", VALUES)
def test_command_line_values_parse_to_the_type_of_the_field(argument, name, value):
    got = getattr(load_settings([argument], {}), name)
    assert got == value and type(got) is type(value)


MISTAKES = [
    (["--learning_rte=1"], ["learning_rte", "command line", "not a setting"]),
    (["--n_layer=3"], ["n_layer", "did you mean n_layers"]),
    (["--grad_accum=8"], ["grad_accum", "sequences_per_step"]),
    (["--data_buf_size=9"], ["data_buf_size", "exact"]),
    (["--d_model=big"], ["d_model='big'", "int", "command line"]),
    (["--d_model=64.5"], ["d_model=64.5", "int"]),
    (["--lr=fast"], ["lr='fast'", "float"]),
    (["--lr=1e999"], ["lr", "float"]),
    (["--use_fp8=perhaps"], ["use_fp8", "'auto' | 'on' | 'off'"]),
    (["--tie_embeddings=maybe"], ["tie_embeddings", "bool"]),
    (["--tie_embeddings=2"], ["tie_embeddings", "bool"]),
    (["--domains=[1]"], ["domains", "list of str"]),
    (["--d_model"], ["--d_model=VALUE"]),
    (["--n_kv_heads=5"], ["n_kv_heads=5", "must divide n_heads=32", "--n_kv_heads"]),
    (["--n_heads=24"], ["n_heads=24", "d_model=4096"]),
    (["--n_heads=8"], ["n_heads=8", "head_dim", "256"]),
    (["--d_model=36", "--n_heads=4", "--n_kv_heads=2"], ["head_dim", "9", "multiple of 4"]),
    (["--ctx_end_len=4096"], ["ctx_end_len=4096", "max_len=2048"]),
    (["--ctx_start_len=100"], ["ctx_start_len=100", "divisor"]),
    (["--ctx_start_len=2048", "--ctx_end_len=1024"], ["ctx_start_len", "ctx_end_len=1024"]),
    (["--muon_min_lr=6e-3"], ["muon_min_lr=0.006", "muon_lr=0.0004"]),
    (["--min_lr=-1"], ["min_lr"]),
    (["--warmup_steps=130000"], ["warmup_steps", "130000 steps"]),
    # it would never reach the peak
    ([*WSD, "--warmup_steps=51"], ["warmup_steps=51", "begins at step 50"]),
    # as with config/h200_8x.py, which sets target_tokens
    (CONFLICT, ["total_steps=9000 (command line", "target_tokens=2e+11", "--target_tokens=None"]),
    (["--max_hours=0"], ["max_hours=0.0", "positive, or None"]),
    (["--lr=-1"], ["lr=-1.0", "not be negative"]),
    (["--micro_batch=7"], ["micro_batch=7", "sequences_per_step=384"]),
    (["--domains=a,a"], ["domains", "different"]),
    (["--domains="], ["domains", "non-empty"]),
    (["--domain_weights=1,2"], ["domain_weights", "4 positive integers"]),
    (["--eval_rows=65"], ["eval_rows=65", "val_rows=64"]),
    (["--hub_patience=400"], ["hub_patience", "step_timeout"]),
    (["--seed=-1"], ["seed", "negative"]),
    (["--total_steps=0"], ["total_steps", "at least 1"]),
    (["--decay_frac=0"], ["decay_frac"]),
    (["--beta2=1"], ["beta2"]),
    (["--diff_lambda_init=1.5"], ["diff_lambda_init"]),
    (["--attention=standard", "--diff_lambda_init=0.8"], ["diff_lambda_init", "standard"]),
    (["--allow_change=lrr"], ["lrr", "lr"]),
    (["no_such_file.py"], ["no_such_file.py", "No such file"]),
]


@pytest.mark.parametrize("arguments, words", MISTAKES)
def test_mistakes_are_one_line_with_setting_origin_and_cure(arguments, words):
    refused(arguments, words)


IN_FILES = [
    ("seed = 1\n\nlearning_rte = 3\n", ["learning_rte", "override.py line 3", "not a setting"]),
    ("seed = 'one'\n", ["seed='one'", "override.py line 1", "int"]),
    ("seed = 1 +\n", ["override.py line 1", "SyntaxError"]),
    ("seed = 1\nlr = undefined\n", ["override.py line 2", "undefined"]),
    ("n_kv_heads = 3\n", ["n_kv_heads=3", "override.py line 1", "divide"]),
    ("def helper(): pass\n", ["helper", "line 1", "not a setting"]),
]


@pytest.mark.parametrize("text, words", IN_FILES)
def test_mistakes_in_an_override_file_name_its_line(tmp_path, text, words):
    refused([write(tmp_path, text)], words)


def test_global_batch_does_not_depend_on_the_number_of_gpus():
    s = load_settings([], {})
    assert [s.grad_accum(world) for world in (4, 8, 64)] == [16, 8, 1]
    with pytest.raises(SettingsError, match=r"micro_batch could be one of \[1, 3\]"):
        s.grad_accum(128)
    with pytest.raises(SettingsError, match="5 ranks do not divide it"):
        s.grad_accum(5)


def test_target_tokens_replaces_total_steps():
    s = load_settings([TARGET], {})
    assert s.steps == -(-200_000_000_000 // (384 * 2048)) == 254_314
    assert load_settings(["--total_steps=9000", "--target_tokens=None"], {}).steps == 9000
    assert load_settings([*WSD, "--warmup_steps=50"], {}).warmup_steps == 50, "it ends where its decay begins"


def test_a_floor_that_follows_its_peak_is_accepted_with_it():
    saved = load_settings([], {}).as_dict()
    changed = ["--lr=1e-3", "--muon_lr=1e-2"]
    with pytest.raises(SettingsError, match="allow_change=lr accepts") as error:
        settings.refuse_changes(saved, load_settings(changed, {}))
    assert "allow_change=min_lr" not in str(error.value)
    accepted = load_settings([*changed, "--allow_change=lr,muon_lr"], {})
    assert len(settings.refuse_changes(saved, accepted)) == 5
    with pytest.raises(SettingsError, match="allow_change=min_lr accepts"):
        settings.refuse_changes(saved, load_settings(["--min_lr=1e-5", "--allow_change=lr"], {}))


def test_another_batch_needs_an_end_in_steps():
    """With target_tokens the end would be counted as if all steps had had the new batch."""
    saved = load_settings(["--target_tokens=10e9"], {}).as_dict()
    change = ["--sequences_per_step=768", "--allow_change=sequences_per_step,target_tokens,total_steps"]
    words = "sequences_per_step: 384 -> 768 .*target_tokens=None --total_steps=N"
    with pytest.raises(SettingsError, match=words):
        settings.refuse_changes(saved, load_settings(["--target_tokens=10e9", *change], {}))
    assert settings.refuse_changes(saved, load_settings(["--total_steps=9000", *change], {}))


def test_changes_lists_what_differs_from_a_saved_run():
    saved = tiny_settings().as_dict()
    now = tiny_settings(lr=1e-3, log_every=3, d_model=128, loss_chunk=32)
    want = dict(lr="math", log_every="free", d_model="model", loss_chunk="rounding").items()
    assert {(n, kind) for n, _, _, kind in settings.changes(saved, now)} >= want
    assert tiny_settings().digest() == tiny_settings().digest() != now.digest()


def test_help_lists_every_setting_with_its_default():
    assert {*re.findall(r"^  --(\w+)=", settings.help_text(), re.M)} >= {*settings.FIELDS}


def test_every_setting_is_read_somewhere():
    """A setting that nothing reads is a promise that nothing keeps. settings.py's own checks are no use of it, its derived
    values are."""
    read = set()
    for path in glob.glob(os.path.join(ROOT, "*.py")) + glob.glob(os.path.join(ROOT, "[a-z]*", "*.py")):
        owners = {"self"} if path.endswith("/settings.py") else {"settings", "s", "c", "cfg"}
        if os.path.basename(os.path.dirname(path)) in ("tests", "config"):
            continue
        with open(path, encoding="utf-8") as f:
            tree = ast.parse(f.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                if getattr(node.value, "id", getattr(node.value, "attr", "")) in owners:
                    read.add(node.attr)
    assert not {*settings.FIELDS} - read, "settings that nothing reads"


def test_all_config_files_load():
    for path in sorted(glob.glob(os.path.join(ROOT, "config", "*.py"))):
        s = load_settings([path], {})
        assert s.steps > s.warmup_steps, path
