"""How a run starts, and how it ends.

What a run ended as is in status.json; under plain python the exit code says the same (CODES). torchrun turns every
failure into 1 and would restart even a user's mistake, so under it an agreed stop exits 0, --max-restarts is refused, and
the README's loop starts a fresh torchrun for as long as `python -m launch again OUT_DIR` says so.

torch is imported inside functions: a mistyped setting is reported at once, and the environment is set first.
"""

import json
import os
import socket
import sys
import time
import traceback

from settings import SettingsError

from . import drill
from .agreement import Agreement
from .failures import CODES, StartupError, Stopped, describe, exit_code_of, write_status

__all__ = ["Agreement", "StartupError", "Stopped"]  # what a run holds, and how it may end
CURRENT: Agreement | None = None  # of this process, for run_main


def load_or_exit(load, argv: list[str]):
    """load(argv) -> settings, and their environment, before torch is imported. A mistake is one line and exit code 64."""
    try:
        settings = load(argv)
    except Exception as e:
        end_early(e, argv)
    setup_environment(settings)
    return settings


def end_early(error: BaseException, argv: list[str]):
    """End before there is a board. Under torchrun the first to end has the others stopped: one line a node."""
    time.sleep(1 if int(os.environ.get("LOCAL_RANK", 0)) else 0)
    if {"--debug", "--debug=true", "--debug=1"} & set(argv) or os.environ.get("NOVA_DEBUG") == "1":
        traceback.print_exception(error)
    print(f"[nova] {describe(error)}", file=sys.stderr, flush=True)
    os._exit(exit_code_of(error))


def setup_environment(settings, environ=os.environ):
    """Variables that must be set before torch is imported. Values that the user set win."""
    wanted = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TOKENIZERS_PARALLELISM": "false"}
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name; blocks of a few sizes fragment less
        wanted |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if settings.debug:
        wanted |= {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_USE_CUDA_DSA": "1", "TORCH_SHOW_CPP_STACKTRACES": "1"}
        wanted |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL"}
    if settings.nccl_safe:
        wanted |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_ALGO": "Ring"}
    if settings.device == "cpu":  # SLURM sets it for everybody: the setting is the user's word
        environ["CUDA_VISIBLE_DEVICES"] = ""
    if settings.deterministic:
        wanted |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    alone = int(environ.get("WORLD_SIZE", 1)) == 1
    if alone and (settings.device == "cpu" or not os.path.exists("/dev/nvidiactl")):
        # threads that fall asleep between a small model's short parallel regions cost the quickstart a quarter of its
        # rate; ranks that share a machine need the cores for each other
        wanted |= {"OMP_WAIT_POLICY": "ACTIVE"}
    for name, value in wanted.items():
        environ.setdefault(name, value)


def init(settings, environ=os.environ, log=print) -> Agreement:
    """The board and its watchdog, then the process group. Every rank calls it first, after setup_environment."""
    global CURRENT
    if any(int(environ.get(f"TORCHELASTIC_{n}", 0)) for n in ("MAX_RESTARTS", "RESTART_COUNT")):
        text = "torchrun --max-restarts is not supported: start a fresh torchrun instead, with the loop in the README"
        raise StartupError(text, exit_code=64)
    if int(environ.get("WORLD_SIZE", 1)) > 1 and "LOCAL_RANK" not in environ:
        raise StartupError("WORLD_SIZE is set but LOCAL_RANK is not: start the ranks with torchrun")
    try:
        CURRENT = agree = Agreement(settings, environ, log)
    except StartupError as e:
        write_status(settings.out_dir, CODES[e.exit_code], e.exit_code, why=str(e))
        raise
    agree.note()
    with agree.stage("join"):
        pass
    with agree.stage("process group", settings.init_timeout):
        device = choose_device(agree.local_rank, environ)
        set_arithmetic(settings, int(environ.get("LOCAL_WORLD_SIZE", 1)), environ)
        agree.open_groups(device)
        agree.barrier()
    return agree


def grace_seconds(environ=os.environ) -> float | None:
    """Seconds that torchrun waits for its workers after a signal before it kills them; None without a torchrun."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    try:
        with open(f"/proc/{os.getppid()}/cmdline", encoding="utf-8") as f:
            words = f.read().replace("=", "\0").replace("_", "-").split("\0")
        return float(words[words.index("--shutdown-timeout") + 1])
    except (OSError, ValueError):
        return 30.0


def check_needs(s):
    """What the settings name and this machine lacks: all of it in one SettingsError, before anything is built."""
    import torch

    lacks = {}
    if s.device == "cuda" and not torch.cuda.is_available():
        lacks["device"] = "this machine has no GPU that torch can use; --device=cpu trains on the CPU"
    if s.data is None:
        how = 'set --data to "python", a folder or a Hub dataset repo, or HF_DATASET_REPO (config/quickstart.py needs none)'
        lacks["data"] = f"no data named: {how}"
    if s.drill and s.steps < drill.STEPS + 2:
        lacks["total_steps"] = f"a drill takes {drill.STEPS + 2} steps"
    if lacks:
        raise SettingsError("\n".join(str(s.error(*lack)) for lack in lacks.items()))


def choose_device(local_rank: int, environ=os.environ):
    """cuda:LOCAL_RANK, or the CPU where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        if os.path.exists("/dev/nvidiactl") and environ.get("CUDA_VISIBLE_DEVICES") != "":
            text = f"this machine has an NVIDIA driver but torch {torch.__version__} sees no GPU: CPU build, or driver too"
            raise StartupError(f"{text} old (nvidia-smi)? To train on the CPU on purpose: --device=cpu")
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        raise StartupError(f"local rank {local_rank} has no GPU: {count} visible; lower --nproc-per-node")
    return torch.device("cuda", local_rank)


def set_arithmetic(settings, local_world: int, environ=os.environ):
    """Threads, TF32 as in the seed, determinism."""
    import torch

    cores = len(os.sched_getaffinity(0))
    nobodys = (None, "", "1") if "TORCHELASTIC_RUN_ID" in environ else (None, "")  # torchrun sets 1
    if settings.threads or environ.get("OMP_NUM_THREADS") in nobodys:
        torch.set_num_threads(settings.threads or max(1, cores // local_world))
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = not settings.deterministic
    torch.use_deterministic_algorithms(settings.deterministic)


def make_mesh(settings, world: int, device):
    """1-D over all ranks, or 2-D (replicate, shard) when shard_size ranks share one copy of the weights (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh

    size = settings.shard_size or world
    if world % size:
        raise settings.error("shard_size", f"must divide the {world} ranks")
    if size == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))


def logger(rank: int):
    """print with time and rank, on rank 0 only."""

    def log(text: str):
        if rank == 0:
            start = f"{time.strftime('%H:%M:%S')} | R0 | "
            print(start + str(text).replace("\n", f"\n{start}"), flush=True)

    return log


def run_main(main):
    """Run main() and end the process: status.json, one readable line, the right exit code. main returns facts for
    status.json when the run is done, and raises Stopped after an agreed stop. Never returns."""
    try:
        info = main() or {}
        if CURRENT:
            if CURRENT.rank == 0:
                write_status(CURRENT.settings.out_dir, "done", 0, **CURRENT.info | info)
            CURRENT.close()
        sys.stdout.flush()
        os._exit(0)  # all is said and saved: Python's own end can abort on threads that are inside C++
    except BaseException as e:
        error = e
    if CURRENT is None:
        end_early(error, sys.argv)
    if CURRENT.settings.debug:
        traceback.print_exception(error)
    board, ending = CURRENT.board, CURRENT.ending
    if isinstance(error, Stopped):
        if CURRENT.rank == 0:
            print(f"[nova] {error}", flush=True)
            facts = dict(rank=0, host=socket.gethostname(), stage=board.task[0], reason=error.reason)
            ending.write("stopped", 3, why=str(error), **facts)
        CURRENT.close()
        sys.stdout.flush()
        ending.exit(3)
    failure = board.record_error(error)
    if failure["rank"] == CURRENT.rank:
        save_traceback(error, board.sentence(failure))
    ending.leave(failure)


def save_traceback(error: BaseException, sentence: str):
    """The culprit's traceback goes to a file of the run, and to torchrun's summary."""
    text = "".join(traceback.format_exception(error))
    try:
        path = os.path.join(CURRENT.settings.out_dir, f"traceback.rank{CURRENT.rank}.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        if not hasattr(error, "exit_code"):
            print(f"[nova] full traceback in {path}", file=sys.stderr)
        if os.environ.get("TORCHELASTIC_ERROR_FILE"):
            extra = {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}  # before its victims' ends
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
                json.dump({"message": {"message": sentence, "extraInfo": extra}}, file)
    except OSError:
        pass  # a full disk must not hide the error itself
