"""Should a run be started again? `python -m launch again OUT_DIR`, for the supervisor's loop in the README."""

import json
import os
import sys
import time

from .failures import write_status


def again(out_dir: str, limit: int = 3, wait: float = 10.0) -> tuple[bool, str]:
    """Should the run be started again? -> (yes or no, why). `limit` launches in a row that saved nothing new end it."""
    memory = os.path.join(out_dir, "restarts.json")
    try:
        with open(os.path.join(out_dir, "status.json"), encoding="utf-8") as f:
            status = json.load(f)
        os.remove(f.name)  # a launch that does not get as far as writing one must not be judged by the last
    except FileNotFoundError:
        return False, "no status.json: the run did not get as far as its start; read its last lines"
    name, why, before = status["status"], status.get("why", ""), {"saved": -1, "fruitless": 0}
    if os.path.exists(memory):
        with open(memory, encoding="utf-8") as f:
            before = json.load(f)
        os.remove(memory)
    saved = max(before["saved"], status.get("saved") or -1)
    fruitless = 0 if saved > before["saved"] else before["fruitless"] + 1
    if name in ("running", "system", "io") and fruitless < limit:
        with open(memory, "w", encoding="utf-8") as f:
            json.dump({"saved": saved, "fruitless": fruitless}, f)
        time.sleep(wait * fruitless)
        return True, f"{name}: start again ({fruitless} of {limit} launches in a row saved nothing new)"
    write_status(out_dir, **status)  # the last word stays readable
    if name in ("running", "system", "io"):
        name = f"{name}: {fruitless} launches in a row saved nothing new"
    return False, f"{name}: {why}" if why else name  # stopped: somebody, or the job's limit, asked for it


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "again":
        sys.exit("usage: python -m launch again OUT_DIR   (exit code 0: start the run again, 1: do not)")
    yes, why = again(sys.argv[2])
    print(f"[nova] {why}", file=sys.stderr)
    sys.exit(0 if yes else 1)
