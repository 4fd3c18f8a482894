"""Float8 and torch.compile: what is chosen on this machine, and how each is applied.

`choose` decides, with its reasons; what was asked for and cannot be had is a ModelError that names the setting: nothing
falls back in silence.
"""

import dataclasses
import functools
import importlib.util
import os
import shutil

import torch
import torch.nn as nn


class ModelError(ValueError):
    """A shape, a setting or a machine that the model cannot work with."""

    exit_code = 64


def bad(settings, name: str, problem: str) -> ModelError:
    """A ModelError that names the setting, its value and where it came from."""
    return ModelError(str(settings.error(name, problem)))


def choose(settings, device) -> dict:
    """What "auto" means on this machine: {"fp8": bool, "compile": bool, "reasons": [sentence, …]}. Raises ModelError
    where "on" or True cannot be had."""
    s, device = settings, torch.device(device)
    gpu = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    where = f"sm_{gpu[0]}{gpu[1]}" if gpu else device.type

    torchao = importlib.util.find_spec("torchao") is not None
    able = gpu is None or gpu >= (8, 9) or s.fp8_emulate  # the CPU's float8 is exact, and slow
    if s.use_fp8 == "on" and not (torchao and able):
        lacks = f"{where} has no float8 matmul (sm_89 and newer do); use off, or fp8_emulate"
        raise bad(s, "use_fp8", lacks if torchao else "the package torchao is missing; use off")
    fp8 = s.use_fp8 == "on" or (s.use_fp8 == "auto" and torchao and gpu is not None and gpu >= (9, 0))
    note = "" if torchao else " (no torchao)"
    if fp8 and gpu is None and not s.fp8_emulate:
        note = " (correct but about 30x slower than fp8_emulate)"
    reasons = [f"use_fp8={s.use_fp8}: {'float8' if fp8 else 'bf16'} matmuls on {where}{note}"]

    if device.type == "cuda":
        found = importlib.util.find_spec("triton") is not None
        tool = "triton" if found else "no triton"
    else:
        names = [os.environ.get("CXX"), "g++", "clang++"]
        tool = next((path for n in names if n and (path := shutil.which(n))), None)
        found, tool = tool is not None, tool or "no C++ compiler"
        if " " in torch.__file__:  # its linker flags are not quoted (seen with torch 2.13)
            found, tool = False, "no torch in a path without spaces, which its C++ build needs,"
    if s.use_compile is True and not found:
        raise bad(s, "use_compile", f"{tool} found; install one, or use False")
    compiled = s.use_compile is True or (s.use_compile == "auto" and found and gpu is not None)
    if s.use_compile == "auto" and gpu is None:
        tool = "on a CPU the kernels below are as fast, and compiling takes a minute"
    reasons.append(f"use_compile={s.use_compile}: {'compiled blocks' if compiled else 'eager'} ({tool})")
    return {"fp8": fp8, "compile": compiled, "reasons": reasons}


def convert_fp8(model, settings, log=print):
    """Make the block matrices float8 in their matmuls (torchao); the fp32 masters and everything else stay.

    Weights are gathered in bf16 and cast after: torchao's float8 all-gather is for tensorwise only and wraps the masters
    in a tensor subclass that Muon and the checkpoints would have to know.
    """
    # costs 2 s: only where it is used
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    taken, skipped = [], {}
    for name, module in linear.items():
        if model.roles[f"{name}.weight"].kind != "block":
            skipped[name.rsplit(".", 1)[-1]] = "precision matters more than speed"
        elif any(n % 16 for n in module.weight.shape):
            skipped[name.split(".", 2)[-1]] = f"{tuple(module.weight.shape)} are no multiples of 16"
        else:
            taken.append(name)
    config = Float8LinearConfig.from_recipe_name(settings.fp8_recipe)
    config = dataclasses.replace(config, emulate=settings.fp8_emulate)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in taken, config=config)
    if not taken and settings.use_fp8 == "on":
        raise bad(settings, "use_fp8", f"no block matrix has dimensions that are multiples of 16: {skipped}")
    model.fp8 = bool(taken)
    recipe = f"float8 ({settings.fp8_recipe}{', emulated' if settings.fp8_emulate else ''})"
    others = "".join(f"; not {name} ({why})" for name, why in skipped.items())
    log(f"{recipe}: {len(taken)} of {len(linear)} linear layers{others}")


def compile_blocks(model, settings, log=print):
    """torch.compile the body of every block, one graph for all layers, a new one for each (B, T) and mode; and the
    elementwise part of the loss."""
    torch._dynamo.config.recompile_limit = 64  # contexts of the warm-up x (train, evaluate); the default is 8

    def run(eager, compiled, *inputs):
        if model.compiled:
            try:
                return compiled(*inputs)
            except torch._dynamo.exc.TorchDynamoException as e:  # nothing has run yet: compiling comes first
                text = " ".join(line.strip() for line in str(e).splitlines() if line.strip())[:300]
                if settings.use_compile is True:
                    cure = 'set use_compile=False, or "auto" to go on without it'
                    raise bad(settings, "use_compile", f"torch.compile failed ({cure}): {text}") from e
                log(f"use_compile=auto: torch.compile FAILED, the run goes on in eager mode, slower. {text}")
                model.compiled = False
        return eager(*inputs)

    def wrapped(eager):
        return functools.partial(run, eager, torch.compile(eager, fullgraph=True, dynamic=False))

    model.compiled = True
    model.rows_loss = wrapped(model.rows_loss)
    for block in model.layers:
        block.run = wrapped(block.body)
