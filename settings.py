"""Every setting of a Nova run: its default, its unit, why it is what it is.

One dataclass, one field a line. `settings_table` below says where values come from, and what may change at a resume.
The idea of override files is nanoGPT's; unlike there, a typo cannot make a ghost variable: a name that is no setting, a
wrong type or a contradiction is a `SettingsError` that names the setting and where its value came from.
"""

import ast
import dataclasses
import difflib
import glob
import hashlib
import json
import math
import os
import re
import sys
import typing
from dataclasses import dataclass
from typing import Literal

MODEL, MATH, ROUNDING, FREE = "model", "math", "rounding", "free"


class SettingsError(ValueError):
    """A setting that is unknown, of the wrong type, or in contradiction with another."""

    exit_code = 64  # every error of Nova carries the exit code that it ends the run with


# What a number must do: an int be at least 1, a float not be negative, unless its field says otherwise.
AT_LEAST_1 = ("be at least 1", lambda v: v >= 1)
FROM_0 = ("not be negative", lambda v: v >= 0)
POSITIVE = ("be positive", lambda v: v > 0)
SHARE = ("be in [0, 1)", lambda v: 0 <= v < 1)
PART = ("be in (0, 1]", lambda v: 0 < v <= 1)


def setting(default, help: str, kind: str = FREE, must: tuple | None = None):
    """One field. `kind` says what a resume may do with a changed value: MODEL never fits the saved weights,
    MATH changes the course of the run (needs --allow_change), ROUNDING the last bits of a sum, FREE nothing."""
    metadata = {"help": help, "kind": kind, "must": must}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Settings:
    # --- model (the seed's sizes: 7.9 B parameters, see config/h200_8x.py) ---------------------------------
    vocab_size: int | None = setting(None, "token ids; None: read from the data's metadata.json", MODEL)
    d_model: int = setting(4096, "channels of the residual stream", MODEL)
    n_layers: int = setting(35, "blocks", MODEL)
    n_heads: int = setting(32, "query heads that reach the output projection; divides d_model", MODEL)
    n_kv_heads: int = setting(8, "key/value heads (grouped-query attention); divides n_heads", MODEL)
    ffn_hidden: int = setting(14336, "hidden channels of SwiGLU", MODEL)
    max_len: int = setting(2048, "tokens per sequence", MODEL)
    attention: Literal["diff", "diff_v2", "standard"] = setting("diff", "its form, see model.py", MODEL)
    diff_lambda_init: float | None = setting(None, "for diff; None: 0.8-0.6exp(-0.3 layer)", MATH, SHARE)
    head_gate: bool = setting(True, "one learned scale per head (the seed's head gate)", MODEL)
    attn_gate: bool = setting(False, "per-head sigmoid gate computed from the input (2505.06708)", MODEL)
    layer_scale: float = setting(0.1, "initial LayerScale of both branches (2103.17239); 0: none", MODEL)
    logit_softcap: float = setting(50.0, "bound on |logit|: cap*tanh(z/cap) in fp32; 0: none", MATH)
    rope_theta: float = setting(500_000.0, "base of the rotary wavelengths (Llama 3's)", MATH, POSITIVE)
    tie_embeddings: bool = setting(True, "one matrix for embedding and head", MODEL)
    z_loss: float = setting(0.0, "weight of the squared log-partition (PaLM); 0: none", MATH)

    # --- precision and memory ------------------------------------------------------------------------------
    use_fp8: Literal["auto", "on", "off"] = setting("auto", "float8 blocks; auto: on sm_90 and newer", MATH)
    # torchao reports +10 % on 8B for rowwise; tensorwise's +25 % came with a float8 all-gather, not used here
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = setting("rowwise", "torchao's", MATH)
    fp8_emulate: bool = setting(False, "compute float8 in software: for tests on machines without it", MATH)
    use_compile: Literal["auto"] | bool = setting("auto", "per block; auto: on a GPU with triton", ROUNDING)
    activation_checkpointing: Literal["none", "selective", "full"] = setting("none", "recompute", ROUNDING)
    loss_chunk: int = setting(512, "tokens per chunk of the loss: bounds the logits held at once", ROUNDING)
    reshard_after_forward: bool = setting(True, "free gathered weights after forward (FSDP: less memory)")
    reduce_every_micro_step: bool = setting(False, "of gradients: no unsharded fp32 copy", ROUNDING)
    shard_size: int | None = setting(None, "ranks that share one copy of weights (HSDP); None: all", ROUNDING)
    cpu_offload: bool = setting(False, "weights, gradients and optimizer state in host memory", ROUNDING)
    allow_math_attention: bool = setting(False, "accept SDPA's quadratic-memory kernel on a GPU", ROUNDING)
    deterministic: bool = setting(False, "resume is bit-exact on a GPU too; slower kernels", ROUNDING)
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "cuda: an error where there is no GPU")
    threads: int | None = setting(None, "CPU threads per process; None: cores / processes here", ROUNDING)

    # --- optimizers ----------------------------------------------------------------------------------------
    # Muon's update has RMS 0.2*lr, as AdamW's (Moonlight, 2502.16982), so muon_lr is an AdamW-like rate. The seed's
    # 6e-3 was never exercised as Muon: its sharded gradients were 1-D and fell through to momentum SGD. At d 4096 it
    # would move weights of std 0.02 by 6 % a step.
    muon_lr: float = setting(4e-4, "peak rate of the block matrices, in AdamW's units", MATH)
    muon_min_lr: float | None = setting(None, "the last step's muon_lr; None: a tenth", MATH)
    lr: float = setting(2e-4, "peak rate of embedding, head, norms and gates (AdamW)", MATH)
    min_lr: float | None = setting(None, "the last step's lr; None: a tenth", MATH)
    weight_decay: float = setting(0.1, "decoupled, times the rate; not on 1-D parameters", MATH)
    beta1: float = setting(0.9, "AdamW", MATH, SHARE)
    beta2: float = setting(0.95, "AdamW", MATH, SHARE)
    adam_eps: float = setting(1e-8, "AdamW", MATH, POSITIVE)
    adamw: Literal["8bit", "fp32"] = setting("8bit", "8bit: bitsandbytes, saves 0.4 GB/GPU at 8B on 8", MATH)
    muon_momentum: float = setting(0.95, "Nesterov momentum", MATH, SHARE)
    muon_momentum_warmup: int = setting(0, "steps that it takes to rise from 0.85; 0: none", MATH, FROM_0)
    muon_coeffs: Literal["polar_express", "keller_jordan"] = setting("polar_express", "see muon.py", MATH)
    muon_split_heads: bool = setting(False, "orthogonalise q, k, v head by head, not as three blocks", MATH)
    grad_clip: float = setting(1.0, "bound on the global gradient norm; 0: none", MATH)
    max_bad_steps: int = setting(3, "non-finite steps in a row (each is skipped) that end the run")

    # --- batch and schedule --------------------------------------------------------------------------------
    sequences_per_step: int = setting(384, "global batch, in sequences: the same on any number of GPUs", MATH)
    micro_batch: int = setting(6, "sequences per GPU and micro-step: memory, not mathematics", ROUNDING)
    total_steps: int = setting(130_000, "optimizer steps of the schedule", MATH)
    target_tokens: float | None = setting(None, "tokens to train on: replaces total_steps", MATH, POSITIVE)
    schedule: Literal["cosine", "wsd"] = setting("cosine", "wsd: constant, then linear decay", MATH)
    warmup_steps: int = setting(4_000, "steps of linear warm-up", MATH, FROM_0)
    decay_frac: float = setting(0.2, "share of steps that wsd, or a budget's end, decays over", MATH, PART)
    stop_at: int | None = setting(None, "stop after this step, schedule unchanged; saved and resumable")
    schedule_from: str | None = setting(None, "checkpoint folder that a new run branches from")
    ctx_warmup_steps: int = setting(3_000, "steps until the context reaches ctx_end_len", MATH, FROM_0)
    ctx_start_len: int | None = setting(None, "context of the first steps; None: ctx_end_len", MATH)
    ctx_end_len: int | None = setting(None, "context after the warm-up; None: max_len", MATH)
    max_hours: float | None = setting(None, "of the whole run, over restarts: ends decayed", must=POSITIVE)
    job_hours: float | None = setting(None, "of one launch: ends saved and resumable", must=POSITIVE)

    # --- data ----------------------------------------------------------------------------------------------
    data: str | None = setting(None, '"python", a folder, or a Hub dataset repo (HF_DATASET_REPO)')
    data_revision: str = setting("main", "branch, tag or commit of a Hub dataset repo")
    domains: list[str] = setting(["code", "general", "math", "reasoning"], "folders of data/ (DOMAINS)", MATH)
    domain_weights: list[int] | None = setting(None, "sequences of each domain per cycle; None: equal", MATH)
    cache_dir: str = setting("~/.cache/nova", "folder for packed text and downloaded shards")
    cache_gb: float = setting(64.0, "downloaded shards kept on disk per node, GB")
    hub_patience: float = setting(240.0, "seconds to retry the Hub in a step; below step_timeout")
    shard_refresh_steps: int = setting(1_000, "steps between looks for new ones; 0: never", MATH, FROM_0)
    val_rows: int = setting(64, "samples of max_len per domain held out of training for good", MATH)
    eval_rows: int = setting(20, "held-out samples per domain read at each evaluation")
    final_eval_rows: int = setting(64, "held-out samples per domain read at the end")

    # --- run -----------------------------------------------------------------------------------------------
    out_dir: str = setting("out/nova", "checkpoints, metrics, export, status of this run")
    seed: int = setting(42, "of the weights and of the data order", MATH, FROM_0)
    log_every: int = setting(10, "steps between console lines")
    eval_every: int = setting(500, "steps between evaluations, each with a text sample")
    ckpt_every: int = setting(1_000, "steps between milestone checkpoints")
    save_minutes: float = setting(30.0, "minutes between `latest` checkpoints; 0: none")
    ckpt_keep: int = setting(2, "checkpoints kept of each kind (latest, best, milestone)")
    resume: Literal["auto", "must", "never"] = setting("auto", "must: an error without a checkpoint")
    allow_change: list[str] = setting([], "that a resume may change; data: shards as they are now")
    hf_model_repo: str | None = setting(None, "Hub repo for checkpoints and weights (HF_MODEL_REPO)")
    publish: bool = setting(True, "upload to hf_model_repo when it is set; needs HF_TOKEN with write access")
    tracker: Literal["none", "trackio", "wandb"] = setting("none", "also send metrics there; imported on use")
    sample_prompt: str = setting("", "text that samples continue; empty: the end-of-document token")
    sample_tokens: int = setting(120, "tokens of each sample; 0: none", must=FROM_0)
    usd_per_gpu_hour: float = setting(3.5, "price that plan.py reckons with")

    # --- safety --------------------------------------------------------------------------------------------
    init_timeout: float = setting(1800.0, "seconds of a collective until the first step ends", must=POSITIVE)
    step_timeout: float = setting(300.0, "seconds a collective may take afterwards", must=POSITIVE)
    stage_timeout: float = setting(900.0, "seconds that one start-up stage may take", must=POSITIVE)
    allow_slow_links: bool = setting(False, "accept GPUs without peer access (implied by nccl_safe)")
    drill: bool = setting(False, "run the whole cycle once (steps, evaluation, save, reload), then stop")
    debug: bool = setting(False, "full tracebacks, blocking kernels, NCCL log (environment: NOVA_DEBUG=1)")
    nccl_safe: bool = setting(False, "no P2P, no shared memory, ring only (environment: NOVA_NCCL_SAFE=1)")

    def __post_init__(self):
        self.source: dict[str, str] = {}  # where each value that is not a default came from

    # --- derived -------------------------------------------------------------------------------------------
    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.d_model // self.n_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of 64 (the seed's rule)."""
        return -(-self.vocab_size // 64) * 64

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.sequences_per_step * self.max_len

    @property
    def steps(self) -> int:
        """Optimizer steps of the schedule: target_tokens when set, else total_steps."""
        tokens = self.target_tokens
        return math.ceil(tokens / self.tokens_per_step) if tokens else self.total_steps

    def grad_accum(self, world: int) -> int:
        """Micro-steps per optimizer step. Raises SettingsError where the batch does not divide."""
        batch, divisor = self.sequences_per_step, self.micro_batch * world
        if batch % divisor:
            fit = [n for n in range(1, batch + 1) if batch % (n * world) == 0]
            cure = (
                f"micro_batch could be one of {fit}" if fit else f"{world} ranks do not divide it: change it"
            )
            problem = f"is not a multiple of micro_batch {self.micro_batch} x {world} ranks; {cure}"
            raise self.error("sequences_per_step", problem)
        return batch // divisor

    def error(self, name: str, problem: str) -> SettingsError:
        """A SettingsError that says which setting, its value, and where the value was set."""
        where = self.source.get(name, "default")
        return SettingsError(f"{name}={getattr(self, name)!r} ({where}): {problem}")

    def as_dict(self) -> dict:
        """All settings as JSON values."""
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """sha256 of all settings: equal on all ranks, or the start-up stops."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


FOLLOWS = {"min_lr": "lr", "muon_min_lr": "muon_lr"}  # a tenth of it, unless set
FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
TYPES = typing.get_type_hints(Settings)
ENVIRONMENT = {
    "HF_DATASET_REPO": "data",
    "HF_MODEL_REPO": "hf_model_repo",
    "DOMAINS": "domains",
    "NOVA_DEBUG": "debug",
    "NOVA_NCCL_SAFE": "nccl_safe",
}
RETIRED = {
    "grad_accum": "set sequences_per_step; grad_accum follows from it, micro_batch and the number of ranks",
    "data_buf_size": "delete it: the order is exact and needs no shuffle buffer",
    "shard_refresh_rows": "use shard_refresh_steps",
    "batch_size": "use sequences_per_step (global) and micro_batch (per GPU)",
    "block_size": "use max_len",
    "learning_rate": "use muon_lr (block matrices) and lr (the rest)",
    "max_iters": "use total_steps",
}


def unknown(name: str, where: str) -> SettingsError:
    if name in RETIRED:
        return SettingsError(f"{name} ({where}) is not a setting of Nova: {RETIRED[name]}")
    near = difflib.get_close_matches(name, FIELDS, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "see --help"
    return SettingsError(f"{name} ({where}) is not a setting; {hint}")


def options(name: str) -> list:
    """The types that a setting may have: the members of a union, or its one type."""
    wanted = TYPES[name]
    single = typing.get_origin(wanted) in (Literal, list, None)
    return [wanted] if single else list(typing.get_args(wanted))


def convert(name: str, value, where: str):
    """The value as the type of its field, or a SettingsError. An int is a float, and 5e4 an int; nothing else is converted."""
    for kind in options(name):
        members = typing.get_args(kind)
        if typing.get_origin(kind) is list and isinstance(value, (list, tuple)):
            if all(type(v) is members[0] for v in value):
                return list(value)
        elif members:
            if type(value) is str and value in members:
                return value
        elif type(value) is kind and (kind is not float or math.isfinite(value)):
            return value
        if kind is float and type(value) is int:
            return float(value)
        if kind is int and type(value) is float and value.is_integer() and abs(value) < 2**53:
            return int(value)
    raise SettingsError(f"{name}={value!r} ({where}): must be {describe(TYPES[name])}")


def describe(kind) -> str:
    """A type in words."""
    members = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return " | ".join(map(repr, members))
    if typing.get_origin(kind) is list:
        return f"a list of {describe(members[0])}"
    if members:
        return " | ".join(map(describe, members))
    return "None" if kind is type(None) else kind.__name__


def parse(name: str, text: str):
    """A command-line or environment text as a Python value: 3, 1e-4, None, true, a,b, [1,2], else the text."""
    kinds = options(name)
    if (list[str] in kinds or list[int] in kinds) and not text.startswith("[") and text != "None":
        items = [t.strip() for t in text.split(",") if t.strip()]
        return [int(t) if list[int] in kinds and t.lstrip("-").isdigit() else t for t in items]
    if bool in kinds and text.lower() in ("true", "false", "1", "0", "yes", "no"):
        return text.lower() in ("true", "1", "yes")
    if str in kinds and text != "None":
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def run_override_file(path: str, settings: Settings):
    """Execute one override file on top of `settings`. It is code that the user named: it is run."""
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read()
    except OSError as e:
        files = glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config", "*.py"))
        configs = {os.path.basename(file): os.path.relpath(file) for file in files}
        near = difflib.get_close_matches(os.path.basename(path).removesuffix(".py") + ".py", configs, n=1)
        hint = f"; did you mean {configs[near[0]]}?" if near else ""
        hint = f"; a setting is written --{path}" if path.partition("=")[0] in FIELDS else hint
        raise SettingsError(f"override file {path}: {e.strerror or e}{hint}") from None
    try:
        tree = ast.parse(text, path)
        names = {n: getattr(settings, n) for n in FIELDS}
        exec(compile(tree, path, "exec"), names)
    except Exception as e:
        inside = e.__traceback__.tb_next
        line = getattr(e, "lineno", None) or (inside.tb_lineno if inside else "?")
        raise SettingsError(f"override file {path} line {line}: {type(e).__name__}: {e}") from None
    lines = {}  # where each name that the file gives a value is set: imports are none
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = max(node.lineno, lines.get(node.id, 0))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            lines[node.name] = node.lineno
    for name, line in lines.items():
        if name in names and not name.startswith("_"):
            assign(settings, name, names[name], f"{path} line {line}")


def assign(settings: Settings, name: str, value, where: str):
    if name not in FIELDS:
        raise unknown(name, where)
    setattr(settings, name, convert(name, value, where))
    settings.source[name] = where


def load_settings(argv: list[str], environ=os.environ) -> Settings:
    """Settings from the environment, override files and --key=value, in that order. Raises SettingsError.
    --help prints all settings and ends the program."""
    if {"--help", "-h"} & set(argv):
        print(help_text())
        sys.exit(0)
    settings = Settings()
    for variable, name in ENVIRONMENT.items():
        if environ.get(variable):
            assign(settings, name, parse(name, environ[variable]), f"environment {variable}")
    given = {}
    for argument in argv:
        if not argument.startswith("-"):
            run_override_file(argument, settings)
            continue
        name, equals, text = argument.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not equals and name in FIELDS and TYPES[name] is bool:
            text, equals = "true", "="  # --drill
        if name not in FIELDS:
            raise unknown(name, "command line")
        if not equals:
            raise SettingsError(f"{argument} (command line): write --{name}=VALUE")
        given[name] = text
    for name, text in given.items():
        assign(settings, name, parse(name, text), f"command line --{name}")
    check(settings)
    return settings


def check(s: Settings):
    """Raise SettingsError for values out of range and for contradictions."""
    for name, field in FIELDS.items():
        value, wanted = getattr(s, name), options(name)
        if isinstance(value, (int, float)) and bool not in wanted:
            must, holds = field.metadata["must"] or (AT_LEAST_1 if int in wanted else FROM_0)
            if not holds(value):
                raise s.error(name, f"must {must}{', or None' if type(None) in wanted else ''}")
    if s.d_model % s.n_heads:
        raise s.error("n_heads", f"must divide d_model={s.d_model}")
    if s.n_heads % s.n_kv_heads:
        raise s.error("n_kv_heads", f"must divide n_heads={s.n_heads}")
    unit, size = 4 if s.attention == "diff" else 2, s.head_dim  # rotary pairs, in each of two streams
    if size % unit or size > 256:
        must = f"must be a multiple of {unit} and at most 256"
        raise s.error("n_heads", f"head_dim = d_model / n_heads = {size} {must}")
    if s.attention != "diff" and s.diff_lambda_init is not None:
        raise s.error("diff_lambda_init", f"has no meaning with attention={s.attention!r}")
    s.ctx_end_len = s.ctx_end_len or s.max_len
    s.ctx_start_len = s.ctx_start_len or s.ctx_end_len
    for name in ("ctx_end_len", "ctx_start_len"):
        if s.max_len % getattr(s, name):
            raise s.error(name, f"must be a divisor of max_len={s.max_len}: rows are cut into contexts")
    if s.ctx_start_len > s.ctx_end_len:
        raise s.error("ctx_start_len", f"exceeds ctx_end_len={s.ctx_end_len}")
    for floor, peak in FOLLOWS.items():
        if getattr(s, floor) is None:
            setattr(s, floor, getattr(s, peak) / 10)
        if getattr(s, floor) > getattr(s, peak):
            raise s.error(floor, f"exceeds its peak, {peak}={getattr(s, peak)}")
    if s.target_tokens and s.source.get("total_steps", "").startswith("command line"):
        other = f"target_tokens={s.target_tokens:g} ({s.source.get('target_tokens', 'default')})"
        raise s.error("total_steps", f"has no effect beside {other}: --target_tokens=None unsets it")
    if s.warmup_steps >= s.steps:
        raise s.error("warmup_steps", f"must be below the {s.steps} steps of the schedule")
    decay = s.steps - round(s.decay_frac * s.steps)
    if s.schedule == "wsd" and s.warmup_steps > decay:
        problem = f"ends inside the decay, which begins at step {decay}: lower it or decay_frac"
        raise s.error("warmup_steps", problem)
    if s.sequences_per_step % s.micro_batch:
        raise s.error("micro_batch", f"must divide sequences_per_step={s.sequences_per_step}")
    if not s.domains or len(set(s.domains)) != len(s.domains) or not all(s.domains):
        raise s.error("domains", "must be a list of different, non-empty names")
    weights = s.domain_weights
    if weights is not None and (len(weights) != len(s.domains) or min(weights) < 1):
        wanted = f"must be {len(s.domains)} positive integers, one for each of {s.domains}"
        raise s.error("domain_weights", wanted)
    for name in ("eval_rows", "final_eval_rows"):
        if getattr(s, name) > s.val_rows:
            raise s.error(name, f"exceeds val_rows={s.val_rows}, the rows that are held out")
    if s.shard_refresh_steps and s.hub_patience >= s.step_timeout:
        raise s.error("hub_patience", f"must stay below step_timeout={s.step_timeout}: the other ranks wait")
    for name in s.allow_change:
        if name not in FIELDS:
            raise unknown(name, "allow_change")
    s.allow_slow_links = s.allow_slow_links or s.nccl_safe


def help_text() -> str:
    """All settings with default and meaning, for --help."""
    defaults, rows = Settings(), ["usage: train_nova.py [override files …] [--key=value …]", ""]
    for name, field in FIELDS.items():
        rows.append(f"  --{name}={getattr(defaults, name)!r}".ljust(44) + f"  {field.metadata['help']}")
    return "\n".join(rows)


def changes(saved: dict, now: Settings) -> list[tuple[str, object, object, str]]:
    """(name, saved value, present value, kind) of each setting that differs from a saved run's."""
    rows = [(n, saved[n], getattr(now, n), f.metadata["kind"]) for n, f in FIELDS.items() if n in saved]
    return [row for row in rows if row[1] != row[2]]


def refuse_changes(saved: dict, now: Settings) -> list[str]:
    """A line for each setting that differs from the saved run's, or a SettingsError for those that may not."""
    lines, refused = [], []
    for name, before, after, kind in changes(saved, now):
        lead, cure = FOLLOWS.get(name, name) if name not in now.source else name, None
        if kind == MODEL:
            cure = "the saved weights have another form: start another run in another out_dir"
        elif name == "sequences_per_step" and now.target_tokens:
            cure = "target_tokens would end elsewhere: --target_tokens=None --total_steps=N"
        elif kind == MATH and not {name, lead} & set(now.allow_change):
            cure = f"changes the course of the run: --allow_change={lead} accepts it"
        lines.append(f"{name}: {before!r} -> {after!r}")
        refused += [f"{lines[-1]} ({cure})"] if cure else []
    if refused:
        raise SettingsError("this run was started with other settings:\n  " + "\n  ".join(refused))
    return lines


def settings_table() -> str:
    """docs/settings.md: every setting, in the sections of the class above."""
    resume = {MODEL: "no", MATH: "`--allow_change`", ROUNDING: "yes, last bits", FREE: "yes"}
    environment = ", ".join(f"`{variable}` (`{name}`)" for variable, name in ENVIRONMENT.items())
    follow = ", ".join(f"`{name}` follows `{lead}`" for name, lead in FOLLOWS.items())
    text = f"""# Settings

Printed by `python settings.py > docs/settings.md`; `python train_nova.py --help` prints the same in short.

Values come from defaults < environment < override files, in order < `--key=value`. An override file is plain Python and
sees the values so far (`warmup_steps = total_steps // 50`); names that start with `_`, and imports, stay its own. A name
that is no setting, a wrong type or a contradiction is one line and exit code 64.
From the environment: {environment}.

*Resume* says what the next launch of a run may do with another value:

* **no**: the saved weights have another form; start another run in another `out_dir`.
* **`--allow_change`**: it changes the course of the run, and is refused unless `--allow_change=NAME` accepts it
  ({follow}).
* **yes, last bits**: the same mathematics; sums are rounded otherwise.
* **yes**: nothing that is trained depends on it.
"""
    with open(__file__, encoding="utf-8") as f:
        source = f.read().split("class Settings:")[1].split("# --- derived")[0]
    for section, name in re.findall(r"^    (?:# --- (.+?) -+|(\w+): .*)$", source, re.M):
        if section:
            text += f"\n## {section[0].upper()}{section[1:]}\n\n"
            text += "| setting | type | default | resume | meaning |\n|---|---|---|---|---|\n"
        else:
            metadata, wanted = FIELDS[name].metadata, describe(TYPES[name]).replace(" | ", " or ")
            may, meaning = resume[metadata["kind"]], metadata["help"].replace("|", "\\|")
            text += f"| `{name}` | {wanted} | `{getattr(Settings(), name)!r}` | {may} | {meaning} |\n"
    return text


if __name__ == "__main__":
    print(settings_table(), end="")
