"""How a run finds what it goes on from: its folder, the newest checkpoint, and whether the settings may go with it."""

import dataclasses
import os
from typing import NamedTuple

from launch import proof
from schedule import HORIZON
from settings import MATH, ROUNDING, changes, refuse_changes

from .sealed import read_state
from .store import Store


class Saved(NamedTuple):
    """A checkpoint that a run goes on from."""

    path: str
    state: dict  # its state.json
    branch: bool  # of another run (schedule_from)
    changed: set[str]  # kinds of the settings that differ from its own

    def how(self, s, agree, own_loaded: bool) -> str:
        """How closely the run goes on, in words."""
        if "data" in s.allow_change:
            return "with the data that there is now"
        if MATH in self.changed:
            return "with changed settings"
        if self.state["code"] != proof.code_digest():
            return "with changed code"
        exact = own_loaded and self.state["world"] == agree.world and ROUNDING not in self.changed
        return "bit-exact" if exact and (agree.device.type == "cpu" or s.deterministic) else "to rounding"


def open_store(s, agree, log, grace: float | None) -> tuple[Store, Saved | None]:
    """Take the run's folder; what it goes on from, here, on the Hub, or in another run that it branches from. SettingsError
    where the settings do not fit what was saved. What "auto" became in the first launch it stays: it never chooses again."""
    publisher = None
    if s.hf_model_repo and s.publish:
        import hub

        publisher = hub.Publisher(s.hf_model_repo, log, s.hub_patience)
    store, path = Store.open(
        s.out_dir, agree, log, s.ckpt_keep, s.resume, publisher, grace, publish=not s.drill
    )
    allowed, branch = s, path is None and s.schedule_from is not None
    if branch:  # another run's state, under this run's schedule
        path = s.schedule_from
        if not os.path.exists(os.path.join(path, "state.json")):
            raise s.error("schedule_from", "is not the folder of a checkpoint (…/checkpoints/step-…)")
        allowed = dataclasses.replace(s, allow_change=[*s.allow_change, *HORIZON])
    if path is None:
        log(f"[resume] a fresh start in {s.out_dir}")
        return store, None
    state = read_state(path)
    for line in refuse_changes(state["settings"], allowed):
        log(f"[resume] changed setting {line}")
    saved = Saved(path, state, branch, {kind for _, _, _, kind in changes(state["settings"], s)})
    keep_choices(s, state["chosen"])
    return store, saved


def keep_choices(s, chosen: dict):
    """ "auto" becomes what it was chosen to be."""
    if s.use_fp8 == "auto":
        s.use_fp8 = "on" if chosen["fp8"] else "off"
    if s.use_compile == "auto":
        s.use_compile = chosen["compile"]
