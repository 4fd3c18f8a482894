"""A run without a model: the real start-up, control word and collectives, in which one rank is hurt as told.

    toy_run.py OUT_DIR [--steps=N] [--fault=RANK:WHERE:WHAT] [--KEY=SECONDS]

WHERE: import | init (others are inside init_process_group) | stage | load (in a stage, others are in a collective) |
loop (after the control word, others are in a collective) | step (before it) | wait (in a collective itself)
WHAT: raise | data | oom | exit | kill | stop | hang | mute (a C call that never gives the interpreter back)
Keys: stage, step (deadlines), lost (heartbeat limit), pace (of a step), save (of a save), saves (steps between).
The file OUT_DIR/fault appears just before the fault, OUT_DIR/pid.RANK when a rank starts.
"""

import ctypes
import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OPTIONS = dict(stage=60, step=60, steps=20, saves=5, save=0, pace=0.05, fault="-1::")
OUT, OPTIONS = sys.argv[1], OPTIONS | dict(a.lstrip("-").split("=", 1) for a in sys.argv[2:])
RANK = int(os.environ.get("RANK", 0))
FAULT = OPTIONS["fault"].split(":")
os.makedirs(OUT, exist_ok=True)


def write(name: str, text: str):
    with open(os.path.join(OUT, f"{name}.tmp{RANK}"), "w") as f:
        f.write(text)
    os.replace(f.name, os.path.join(OUT, name))


class DataError(ValueError):
    exit_code = 65


def hurt(where: str):
    if [str(RANK), where] != FAULT[:2]:
        return
    write("fault", "")
    what = FAULT[2]
    if what == "raise":
        raise ValueError("injected fault")
    if what == "data":
        raise DataError("shard 7 is truncated (injected)")
    if what == "oom":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory (injected)")
    if what == "exit":
        os._exit(9)
    if what in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    if what == "hang":
        time.sleep(1000)
    if what == "mute":
        ctypes.PyDLL(None).sleep(1000)  # PyDLL: keeps the interpreter's lock


write(f"pid.{RANK}", str(os.getpid()))
hurt("import")

from launch import board, startup  # noqa: E402
from settings import load_settings  # noqa: E402

if "lost" in OPTIONS:
    board.LOST["cpu"] = float(OPTIONS["lost"])


def main():
    limits = [f"--stage_timeout={OPTIONS['stage']}", f"--step_timeout={OPTIONS['step']}", "--init_timeout=60"]
    settings = load_settings([f"--out_dir={OUT}", "--hub_patience=0", *limits])
    startup.setup_environment(settings)
    import torch
    import torch.distributed as dist

    original = dist.init_process_group
    dist.init_process_group = lambda *args, **kwargs: hurt("init") or original(*args, **kwargs)
    agree = startup.init(settings)
    steps, saves, begin = int(OPTIONS["steps"]), int(OPTIONS["saves"]), 0
    with agree.stage("load"):
        hurt("load")
        agree.barrier()
    with agree.stage("resume"):
        hurt("stage")
        if os.path.exists(checkpoint := os.path.join(OUT, "checkpoint")):
            with open(checkpoint) as f:
                begin = int(f.read())
        begin = agree.broadcast(begin)

    def save(step):
        write("saving", str(step))
        time.sleep(float(OPTIONS["save"]))
        if agree.rank == 0:
            write("checkpoint", str(step))
        agree.note(saved=step)

    gradient = torch.ones(1000)
    for step in range(begin + 1, steps + 1):
        agree.tick(f"step {step}", settings.step_timeout)
        if step == begin + 3:
            hurt("step")
        write(f"step.{RANK}", str(step))
        if agree.control([agree.signals.name is not None])[0]:
            save(step - 1)
            raise startup.Stopped(agree.signals.name or "another rank's signal")
        if step == begin + 3:
            hurt("loop")
            if FAULT[:2] == [str(RANK), "wait"]:
                write("fault", "")
                dist.barrier()  # one collective more than the others: everyone waits for ever
        dist.all_reduce(gradient)
        time.sleep(float(OPTIONS["pace"]))
        if step % saves == 0:
            save(step)
        if step == begin + 1:
            agree.first_step_done()
    return {"step": steps}


startup.run_main(main)
