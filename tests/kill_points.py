"""Kills processes inside a checkpoint save and looks at what the next start finds. A program, run by
test_checkpoint_faults.py: `python kill_points.py WORLD VICTIM COUNT` (COUNT 0: every point).

A point is the moment before or after any system call by which a save changes the disk, or the middle of a write. The
victim sends itself SIGKILL there; its peers, which a launcher would end, are killed a moment later. Processes are forked
after torch is imported, which makes hundreds of them affordable. Prints one JSON line.
"""

import builtins
import contextlib
import importlib
import io
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback

import checkpoint_tools  # by way of conftest it makes the product's files importable
import torch
import torch.distributed as dist
from checkpoint_tools import all_bits, digest_of, names_in, open_folder, state_for

import store as product

REAL_OPEN = io.open
COUNTER = {"now": 0, "kill": None}


def point():
    """One place where a kill may fall."""
    COUNTER["now"] += 1
    if COUNTER["now"] == COUNTER["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)


class Torn:
    """A file opened for writing: a kill may fall in the middle of a write, with half of it on the disk."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        half = len(data) // 2
        self.file.write(data[:half])
        self.file.flush()
        point()
        return half + self.file.write(data[half:])

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def watched_open(file, mode="r", *args, **kwargs):
    if "w" not in mode:
        return REAL_OPEN(file, mode, *args, **kwargs)
    point()
    return Torn(REAL_OPEN(file, mode, *args, **kwargs))


def watch():
    """Make every change of the disk a point."""
    for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
        real = getattr(os, name)

        def watched(*args, real=real, **kwargs):
            point()
            result = real(*args, **kwargs)
            point()
            return result

        setattr(os, name, watched)
    io.open = builtins.open = watched_open


def forked(function, world: int, *arguments, dies: int | None = None) -> list:
    """Run function(rank, world, *arguments) in forked processes of one group; [its JSON value, or None where it died]."""
    meeting = tempfile.mktemp()
    pipes, children = [], []
    for rank in range(world):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reader)
                store = dist.FileStore(meeting, world)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
                answer = {"value": function(rank, world, *arguments)}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        pipes.append(reader)
        children.append(pid)
    if dies is not None:
        os.waitpid(children[dies], 0)
        time.sleep(0.05)
        for rank, pid in enumerate(children):
            if rank != dies:
                os.kill(pid, signal.SIGKILL)
    answers = []
    for rank, (reader, pid) in enumerate(zip(pipes, children, strict=True)):
        with os.fdopen(reader, "rb") as pipe:
            data = pipe.read()
        if rank != dies:
            os.waitpid(pid, 0)
        answer = json.loads(data) if data else {"value": None}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        answers.append(answer["value"])
    pathlib.Path(meeting).unlink(missing_ok=True)
    return answers


def save(rank, world, folder, step):
    """Save one step. keep=1: the save also deletes its predecessor."""
    c, _ = open_folder(folder, rank, world, keep=1)
    checkpoint_tools.save(c, step)
    c.close()
    return c.failures


def save_killed(rank, world, folder, step, victim, at):
    c, _ = open_folder(folder, rank, world, keep=1)
    watch()
    COUNTER.update(now=0, kill=at if rank == victim else None)
    checkpoint_tools.save(c, step)
    return COUNTER["now"]


def resume(rank, world, folder):
    """What the next start finds: (step, are the bits that step's, how many leftovers)."""
    c, lines = open_folder(folder, rank, world, keep=1)
    shared, own = state_for(rank, world, seed=90)
    state, own_loaded = c.load(c.newest(), shared, own)
    expected, _ = state_for(rank, world, seed=state["step"])
    left = [n for n in os.listdir(folder) if n.startswith(".tmp-") or n.endswith(".tmp")]
    left += [line for line in lines if "DAMAGED" in line]
    for name in names_in(folder):  # whatever has the name of a checkpoint is one
        product.verify(os.path.join(folder, name))
    c.close()
    return state["step"], all_bits(shared) == all_bits(expected) and own_loaded, left


def warm_up(base):
    """Import here what a save and a load import on their first use, so that the children need not, each again."""

    def modules(rank, world, folder):
        save(rank, world, folder, 1)
        resume(rank, world, folder)
        return sorted(sys.modules)

    for name in set(forked(modules, 1, os.path.join(base, "warm"))[0]) - set(sys.modules):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def main(world: int, victim: int, count: int) -> dict:
    torch.set_num_threads(1)
    base = tempfile.mkdtemp(prefix="kill-points-")
    warm_up(base)
    first = os.path.join(base, "first")
    assert forked(save, world, first, 1) == [[]] * world
    dry = shutil.copytree(first, os.path.join(base, "dry"))
    total = forked(save_killed, world, dry, 2, victim, 0)[victim]
    points = list(range(1, total + 1))
    if count:
        count = min(count, total)  # evenly spread: some fall into each part of a save
        points = [int((i + random.Random(i).random()) * total / count) + 1 for i in range(count)]
    found, bad = {1: 0, 2: 0}, []
    for at in points:
        folder = shutil.copytree(first, os.path.join(base, f"at{at}"))
        before = digest_of(first)
        forked(save_killed, world, folder, 2, victim, at, dies=victim)
        answers = forked(resume, world, folder)
        step, right, left = answers[0]
        older = {item for item in before.items() if item[0].startswith("step-")}
        others_unchanged = step == 2 or older <= digest_of(folder).items()
        if not (right and not left and others_unchanged and all(a == answers[0] for a in answers)):
            bad.append([at, answers, others_unchanged])
        found[step] += 1
        if forked(save, world, folder, 3) != [[]] * world or forked(resume, world, folder)[0][0] != 3:
            bad.append([at, "the run could not go on"])
        shutil.rmtree(folder)
    shutil.rmtree(base)
    return dict(points=total, tried=len(points), resumed_old=found[1], resumed_new=found[2], bad=bad)


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
