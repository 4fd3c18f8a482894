"""The schedule: rates and context as pure functions of the step, and a budget that moves their horizon.

The one idea: **the clock never enters a rate.** A rate depends on the step and on a recorded `Horizon`
(`decay_start`, `end_step`). Rank 0's `Budget` is shown the clock at the start of a step and may return an `Event`
that replaces the horizon, or asks for a stop; all ranks take it over and checkpoints hold it, so that a resume is
exact, and a run with `max_hours` always finishes its decay, final evaluation, save and upload inside them.

`schedule="wsd"` (warm-up, stable, decay; MiniCPM 2404.06395) stays at the peak until the budget's or the schedule's
last `decay_frac`, then falls linearly. `schedule="cosine"` falls from the end of the warm-up on; when the horizon
moves, what is left of the cosine is stretched or squeezed into the steps that are left, without a jump.

A branch (`schedule_from`) goes on at a checkpoint of another run, with its weights, optimizer and data position, under
its own `total_steps`: one long wsd run at its peak rate, several short endings. Its decay begins at
`(1 - decay_frac) * total_steps`, or at the branching point if that is later.
"""

import math
from collections import deque
from dataclasses import asdict, dataclass

# The settings that make the horizon: changed (with --allow_change, or in a branch), they make a new one. A budget moves
# it by itself while the run lasts.
HORIZON = ("total_steps", "target_tokens", "schedule", "decay_frac", "warmup_steps", "max_hours")
MOMENTUM_START = 0.85  # of muon_momentum_warmup, as in modded-nanogpt
MIN_MEASURED = 5  # steps timed before the clock may move a horizon
SKIPPED_STEPS = 2  # of each launch, not timed: they compile
MARGIN = 0.02  # of the time left that an event leaves unplanned, so that noise does not trigger the next one
EXTEND = 0.10  # more of the remaining steps must have become affordable before a horizon moves outwards
CLOSING = 2.0  # seconds for the report, the last picture, and leaving
# schedule -> (share of the way from floor to peak that is left when a share of the decay is done, whether the decay
# begins at the end of the warm-up: else it takes the last decay_frac of the steps)
DECAYS = {
    "cosine": (lambda done: 0.5 * (1 + math.cos(math.pi * done)), True),
    "wsd": (lambda done: 1 - done, False),
}
CONTEXTS = 4  # different context lengths of a warm-up at most: each is compiled once


@dataclass(frozen=True)
class Horizon:
    """When the decay begins and when the run ends; `progress` is the share of the decay already done at decay_start."""

    decay_start: int  # step
    end_step: int  # steps of the whole run: the last one is end_step - 1
    progress: float = 0.0  # 0 … 1; above 0 only after an event inside a decay

    def __post_init__(self):
        assert self.end_step >= 1 and self.decay_start >= 0 and 0 <= self.progress <= 1, self

    def as_dict(self) -> dict:
        return asdict(self)

    def at(self, step: int) -> float:
        """Share of the decay done at `step`: 0 before it, exactly 1 at the last step and after."""
        if step >= self.end_step - 1:
            return 1.0
        if step < self.decay_start:
            return self.progress
        done = (step - self.decay_start) / (self.end_step - 1 - self.decay_start)
        return self.progress + (1 - self.progress) * done


@dataclass(frozen=True)
class Event:
    """What the budget decided at the start of `step`: a new horizon, or a stop of this launch."""

    kind: str  # "horizon" | "stop"
    step: int
    reason: str
    horizon: Horizon | None = None

    def as_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "Event":
        horizon = values.get("horizon")
        return cls(values["kind"], values["step"], values["reason"], horizon and Horizon(**horizon))


def first_horizon(settings, start_step: int = 0) -> Horizon:
    """The schedule as set. `start_step` > 0: a branch (`schedule_from`) that never begins its decay before it."""
    end = settings.steps
    start = settings.warmup_steps if DECAYS[settings.schedule][1] else end - decay_steps(settings, end)
    return Horizon(min(max(start, start_step), end - 1), max(end, start_step + 1))


def decay_steps(settings, end: int) -> int:
    """Steps of a decay that takes the last part of `end` steps."""
    return max(1, round(settings.decay_frac * end))


def resumed_horizon(settings, step: int, old: Horizon, before: dict, branch) -> tuple[Horizon, str | None]:
    """(the horizon of a run that goes on at `step`, the line to log where it is a new one). `old`, `before`: the saved
    run's horizon and settings; `branch`: of another run (`schedule_from`).

    A decay that has begun goes on from where it is, without a jump, unless its form is another, or in a branch. One that
    was done gives way to the schedule as set, as it stands at this step: the rate rises at once (a branch of a wsd run's
    stable phase has no such jump)."""
    moved = {name for name in HORIZON if before.get(name) != getattr(settings, name)}
    over = old.end_step <= step < settings.steps  # a budget ended it, or total_steps grew
    if not (branch or moved - {"max_hours"} or (moved and over)):
        return old, None
    done, anew = old.at(step), branch or "schedule" in moved
    if 0 < done < 1 and not anew:
        new = Horizon(min(step, settings.steps - 1), max(settings.steps, step + 1), done)
    else:
        new = first_horizon(settings, 0 if done == 1 and not anew else step)
    return new, (
        f"a new horizon: decay from step {new.decay_start}, end at {new.end_step}; "
        f"{old.at(step - 1):.0%} of the decay were done, at the next step {new.at(step):.0%} are"
    )


def rates(step: int, settings, horizon: Horizon) -> tuple[float, float, float]:
    """(muon_lr, lr, momentum) of `step`, counted from 0."""
    progress = horizon.at(step)
    share = DECAYS[settings.schedule][0](progress)
    ramp = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    pairs = ((settings.muon_lr, settings.muon_min_lr), (settings.lr, settings.min_lr))
    muon_lr, lr = (
        floor if progress == 1 else min(floor + (peak - floor) * share, peak * ramp) for peak, floor in pairs
    )
    momentum = settings.muon_momentum
    if step < settings.muon_momentum_warmup:
        start = min(MOMENTUM_START, momentum)
        momentum = start + (momentum - start) * step / settings.muon_momentum_warmup
    return muon_lr, lr, momentum


def contexts(settings) -> list[int]:
    """Context lengths that a run uses, shortest first: divisors of max_len, about evenly spaced in their logarithm."""
    first, last = settings.ctx_start_len, settings.ctx_end_len
    if first == last or not settings.ctx_warmup_steps:
        return [last]
    divisors = [n for n in range(first, last + 1) if settings.max_len % n == 0]
    ratio = (last / first) ** (1 / (CONTEXTS - 1))
    wanted = [first * ratio**i for i in range(CONTEXTS)]
    return sorted({min(divisors, key=lambda n: abs(math.log(n / w))) for w in wanted})


def context_length(step: int, settings) -> int:
    """Tokens of one context at `step`: the longest allowed one below the line from ctx_start_len to ctx_end_len."""
    if step >= settings.ctx_warmup_steps:
        return settings.ctx_end_len
    first, last = settings.ctx_start_len, settings.ctx_end_len
    line = first + (last - first) * step / settings.ctx_warmup_steps
    return max(n for n in contexts(settings) if n <= line)


def save_minutes_suggested(cost_seconds: float, mtbf_hours: float = 24.0) -> float:
    """Minutes between saves that lose least: sqrt(2 · cost · mean time between failures) (Young 1974)."""
    return math.sqrt(2 * max(cost_seconds, 0.01) * mtbf_hours * 3600) / 60


def save_advice(pause: float) -> str:
    """A line about the setting save_minutes, after saves of which the longest held training up for `pause` seconds."""
    minutes = save_minutes_suggested(pause)
    return f"a save held training up for {pause:.2f} s: save_minutes={minutes:.2g} loses least at a failure a day"


class Costs:
    """Seconds that the parts of a run take: measured, else `assumed` ({"whole save": …, "upload": …}), else guessed."""

    def __init__(self, settings, assumed: dict | None = None, world: int = 1):
        self.settings, self.world, self.assumed = settings, world, dict(assumed or {})
        self.window, self.steps_seen = deque(maxlen=50), 0  # recent steps
        self.measured: dict[str, list[float]] = {}  # kind -> the last two

    def stepped(self, seconds: float):
        """One optimizer step took this long, evaluations and saves not included."""
        self.steps_seen += 1
        if self.steps_seen > SKIPPED_STEPS:
            self.window.append(seconds)

    def paused(self, kind: str, seconds: float):
        """An "evaluation", a "sample", or another kind of `cost`, took this long."""
        self.measured[kind] = [*self.measured.get(kind, []), seconds][-2:]

    def saved(self, receipt: dict):
        """A save is done: training waited `pause`; the last save of a run is waited for, so there all of it counts."""
        self.paused("save", receipt["pause"])
        self.paused("whole save", receipt["pause"] + receipt["seconds"])
        if receipt.get("upload_seconds"):
            self.paused("upload", receipt["upload_seconds"])

    def state(self) -> dict:
        """JSON for the checkpoint: what a resume should know before it has measured anything itself."""
        return {"measured": dict(self.measured), "pace": self.pace(), "world": self.world}

    def load_state(self, state: dict):
        self.measured = state["measured"]
        if state["pace"]:  # the batch is the same on any number of ranks, so a step's time goes with 1/world
            self.assumed["pace"] = state["pace"] * state["world"] / self.world

    def pace(self) -> float | None:
        """Seconds per step: the mean of the last 50, since a median would hide what slow steps cost."""
        if len(self.window) >= MIN_MEASURED:
            return sum(self.window) / len(self.window)
        return self.assumed.get("pace")

    def slow_step(self) -> float:
        """Seconds of the slowest of the recent steps."""
        return max(self.window, default=self.pace() or 0.0)

    def cost(self, kind: str) -> float:
        """Seconds of an "evaluation", a text "sample", a "save" (pause), a "whole save" or an "upload"."""
        if kind in self.measured:
            return max(self.measured[kind])  # the slower of two: one may have compiled, or met a busy disk
        s, pace = self.settings, self.pace() or 0.0
        budget = 3600 * (s.max_hours or s.job_hours or 0.0)
        guesses = {
            "evaluation": 0.4 * pace * s.eval_rows * len(s.domains) / s.sequences_per_step,  # forward only
            # a forward of one sequence for each token, the same on every rank
            "sample": s.sample_tokens * pace * self.world / s.sequences_per_step / 3,
            "whole save": min(600.0, 0.05 * budget),
        }
        expected = self.assumed.get(kind, guesses.get(kind, 0.0))
        # what was never measured may not eat the budget
        return min(expected, 0.04 * budget) if kind == "upload" and budget else expected

    def ending(self) -> float:
        """Seconds to save and upload at the end of a launch: the save and an export, half its size; an upload that is under
        way, the last one and the export's."""
        return 1.5 * self.cost("whole save") + 2.5 * self.cost("upload")

    def reserve(self) -> float:
        """Seconds kept for what follows the last step: final evaluation, save, upload, and one slow step."""
        s = self.settings
        final_evaluation = self.cost("evaluation") * max(1.0, s.final_eval_rows / s.eval_rows)
        return 1.1 * (final_evaluation + self.cost("sample") + self.ending()) + self.slow_step() + CLOSING

    def seconds(self, step: int, end: int) -> float:
        """Seconds that steps step … end-1 take, with the evaluations and saves that fall between them."""
        s = self.settings
        evaluations = (end - 1) // s.eval_every - step // s.eval_every
        milestones = end // s.ckpt_every - step // s.ckpt_every
        training = (end - step) * self.pace() + evaluations * (self.cost("evaluation") + self.cost("sample"))
        saves = milestones + evaluations * 0.5  # some evaluations are the best so far, which saves as well
        saves += training / (60 * s.save_minutes) if s.save_minutes else 0
        return training + saves * self.cost("save")

    def affordable(self, step: int, seconds: float, limit: int) -> int:
        """The largest end_step in (step, limit] whose steps fit into `seconds`; step + 1 when none does."""
        low, high = step + 1, max(limit, step + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.seconds(step, middle) <= seconds else (low, middle - 1)
        return low


class Budget(Costs):
    """Decides when a horizon must move so that everything ends inside `max_hours`, or a launch inside `job_hours`.

    Every rank keeps one, only rank 0's is asked to `decide`. It reads no clock: all times are handed in, in seconds of one
    monotonic clock; `used`: seconds of earlier launches."""

    def __init__(self, settings, launched: float, used=0.0, assumed: dict | None = None, world=1):
        super().__init__(settings, assumed, world)
        self.launched, self.used_before = launched, used

    def both_left(self, clock: float) -> tuple[float, float]:
        """Seconds left of max_hours, over all launches, and of job_hours, of this one; infinite without."""
        here, s = clock - self.launched, self.settings
        run = s.max_hours * 3600 - self.used_before - here if s.max_hours else math.inf
        return run, s.job_hours * 3600 - here if s.job_hours else math.inf

    def left(self, clock: float) -> float | None:
        """Seconds left of whichever ends first; None without a budget."""
        left = min(self.both_left(clock))
        return None if left == math.inf else left

    def decide(self, step: int, clock: float, horizon: Horizon) -> Event | None:
        """Asked at the start of `step` (not done yet): a new horizon, a stop, or None."""
        if step >= horizon.end_step - 1:
            return None  # the last step is about to run, at the floor, whatever the clock says
        run_left, left = self.both_left(clock)
        if self.settings.max_hours and (event := self.move(step, run_left - self.reserve(), horizon)):
            return event
        if left > 1.1 * self.ending() + self.slow_step():
            return None
        end = f"job_hours={self.settings.job_hours:g} end in {left / 60:.1f} min"
        return Event("stop", step, f"{end}: save and stop, resumable")

    def move(self, step: int, seconds: float, horizon: Horizon) -> Event | None:
        """The horizon that `seconds` of training still buy, when it differs enough from the present one."""
        s = self.settings
        if self.pace() is None:
            if seconds > 0:
                return None
            reason = f"max_hours={s.max_hours:g} are used up: step {step} is the last, at the floor rate"
            return Event("horizon", step, reason, Horizon(step, step + 1))
        limit = first_horizon(s).end_step
        now, enough = horizon.end_step, self.seconds(step, horizon.end_step) <= seconds
        if enough and now == limit:
            return None
        new_end = self.affordable(step, seconds * (1 - MARGIN), limit)
        worth_it = new_end - step > (1 + EXTEND) * (now - step) and new_end - now > 0.01 * now
        if enough and not worth_it:
            return None
        begins_early, progress = DECAYS[s.schedule][1], horizon.at(step)
        if step < horizon.decay_start and not begins_early and step < new_end - decay_steps(s, new_end):
            return None  # stable phase: nothing to do until the decay has to begin
        start = max(step, s.warmup_steps) if begins_early and not progress else step
        new = Horizon(min(start, new_end - 1), new_end, progress)
        reason = (
            f"max_hours={s.max_hours:g} {'reach beyond' if enough else 'end before'} step {now} at "
            f"{self.pace():.3g} s/step: decay from step {new.decay_start}, end at step {new_end}"
        )
        return Event("horizon", step, reason, new)
