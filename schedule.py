"""The schedule: rates and context as pure functions of the step, and a budget that moves their horizon.

The one idea: **the clock never enters a rate.** A rate depends on the step and on a recorded `Horizon`
(`decay_start`, `end_step`). Rank 0's `Budget` is shown the clock at the start of a step and may return an `Event`
that replaces the horizon, or asks for a stop; the event is broadcast, logged and checkpointed, so that a resume is
exact, and a run with `max_hours` always finishes its decay, final evaluation, save and upload inside them.

    horizon = first_horizon(settings)                       # or Horizon.from_dict(checkpoint's)
    budget = Budget(settings, launched=clock(), used=0.0)   # every rank has one; seconds of earlier launches in `used`
    while step < min(settings.stop_at or horizon.end_step, horizon.end_step):
        event = budget.decide(step, clock(), horizon)       # rank 0; then agreed: agree.broadcast(event and event.as_dict())
        if event and event.kind == "stop": break            # job_hours: save, stopped and resumable
        if event: horizon = event.horizon                   # max_hours: log it, checkpoint it
        muon_lr, lr, momentum = rates(step, settings, horizon)
        ...                                                 # one optimizer step
        budget.stepped(seconds)                             # without evaluations and saves
        budget.paused("evaluation", seconds)                # what it cost, and likewise "sample"
        budget.saved(receipt)                               # when a save is done
    Steps count from 0; the run does steps 0 … end_step-1, and step end_step-1 has exactly the floor rate.

`schedule="wsd"` (warm-up, stable, decay; MiniCPM 2404.06395) stays at the peak until the budget's or the schedule's
last `decay_frac`, then falls linearly. `schedule="cosine"` falls from the end of the warm-up on; when the horizon
moves, what is left of the cosine is stretched or squeezed into the steps that are left, without a jump.

Branching a stable phase into a decay (`schedule_from`): one long wsd run at peak rate, several short endings.

    torchrun … train_nova.py config/h200_8x.py --schedule=wsd --out_dir=out/long                        # keeps milestones
    torchrun … train_nova.py config/h200_8x.py --schedule=wsd --target_tokens=None --total_steps=24000 \\
        --out_dir=out/ending-24k --schedule_from=out/long/checkpoints/step-00020000-milestone-0041    # decays from 20000

The branch continues at the checkpoint's step with its weights, optimizer and data position, under its own
`total_steps`: the decay begins at `(1 - decay_frac) * total_steps`, or at the branching point if that is later.
`stop_at` only ends a launch: the rates stay those of the whole schedule, and the run can go on later.
"""

import math
from collections import deque
from dataclasses import asdict, dataclass

MOMENTUM_START = 0.85  # of muon_momentum_warmup, as in modded-nanogpt
MIN_MEASURED = 5  # steps timed before the clock may move a horizon
SKIPPED_STEPS = 2  # of each launch, not timed: they compile
MARGIN = 0.02  # of the time left that an event leaves unplanned, so that noise does not trigger the next one
EXTEND = (
    0.10  # a horizon moves outwards only when this much more of the remaining steps has become affordable
)
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

    @classmethod
    def from_dict(cls, values: dict) -> "Horizon":
        return cls(**values)

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
        return cls(values["kind"], values["step"], values["reason"], horizon and Horizon.from_dict(horizon))


def first_horizon(settings, start_step: int = 0) -> Horizon:
    """The schedule as set. `start_step` > 0: a branch (`schedule_from`) that never begins its decay before it."""
    end = settings.steps
    if DECAYS[settings.schedule][1]:
        start = settings.warmup_steps
    else:
        start = end - max(1, round(settings.decay_frac * end))
    return Horizon(min(max(start, start_step), end - 1), max(end, start_step + 1))


def changed_horizon(settings, step: int, old: Horizon, anew: bool = False) -> Horizon:
    """The horizon of a run that goes on at `step` under a changed schedule. A decay that has begun goes on from where it
    is, without a jump, unless `anew` (another form, or a branch). One that was done gives way to the schedule as set, as it
    stands at this step: the rate rises at once (a branch of a wsd run's stable phase has no such jump)."""
    done = old.at(step)
    if done == 1 and not anew:
        return first_horizon(settings)
    if 0 < done < 1 and not anew:
        return Horizon(min(step, settings.steps - 1), max(settings.steps, step + 1), done)
    return first_horizon(settings, step)


def rates(step: int, settings, horizon: Horizon) -> tuple[float, float, float]:
    """(muon_lr, lr, momentum) of `step`, counted from 0."""
    progress = horizon.at(step)
    share = DECAYS[settings.schedule][0](progress)
    ramp = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    values = []
    for peak, floor in ((settings.muon_lr, settings.muon_min_lr), (settings.lr, settings.min_lr)):
        value = floor + (peak - floor) * share
        values.append(floor if progress == 1 else min(value, peak * ramp))
    momentum = settings.muon_momentum
    if step < settings.muon_momentum_warmup:
        start = min(MOMENTUM_START, momentum)
        momentum = start + (momentum - start) * step / settings.muon_momentum_warmup
    return values[0], values[1], momentum


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


class Budget:
    """Decides when a horizon must move so that everything ends inside `max_hours`, or a launch inside `job_hours`.

    Every rank keeps one, only rank 0's is asked to `decide`. It reads no clock: all times are handed in, in seconds of one
    monotonic clock. `assumed` holds seconds expected before anything was measured: {"evaluation": …, "whole save": …, "upload": …}.
    """

    def __init__(
        self, settings, launched: float, used: float = 0.0, assumed: dict | None = None, world: int = 1
    ):
        self.settings, self.launched, self.used_before, self.world = settings, launched, used, world
        self.window = deque(maxlen=50)  # seconds of recent steps
        self.mean = 0.0  # of them
        self.steps_seen = 0
        self.assumed = dict(assumed or {})
        self.measured: dict[str, list[float]] = {}  # kind -> seconds of the last two

    # --- what is told to it ---------------------------------------------------------------------------------
    def stepped(self, seconds: float):
        """One optimizer step took this long, evaluations and saves not included."""
        self.steps_seen += 1
        if self.steps_seen > SKIPPED_STEPS:
            self.window.append(seconds)
            self.mean = sum(self.window) / len(self.window)

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
        self.measured = dict(state["measured"])
        if state["pace"]:  # the batch is the same on any number of ranks, so a step's time goes with 1/world
            self.assumed["pace"] = state["pace"] * state["world"] / self.world

    # --- what it knows --------------------------------------------------------------------------------------
    def used(self, clock: float) -> float:
        """Seconds of `max_hours` used, over all launches."""
        return self.used_before + clock - self.launched

    def left(self, clock: float) -> float | None:
        """Seconds left of max_hours or job_hours, whichever ends first; None without a budget."""
        lefts = []
        if self.settings.max_hours:
            lefts.append(self.settings.max_hours * 3600 - self.used(clock))
        if self.settings.job_hours:
            lefts.append(self.settings.job_hours * 3600 - (clock - self.launched))
        return min(lefts) if lefts else None

    def pace(self) -> float | None:
        """Seconds per step: the mean of the last 50, since a median would hide what slow steps cost."""
        if len(self.window) >= MIN_MEASURED:
            return self.mean
        return self.assumed.get("pace")

    def cost(self, kind: str) -> float:
        """Seconds of an "evaluation", a text "sample", a "save" (pause), a "whole save" or an "upload": measured, else
        assumed, else guessed."""
        if kind in self.measured:
            return max(self.measured[kind])  # the slower of two: one may have compiled, or met a busy disk
        s = self.settings
        hours = s.max_hours or s.job_hours or 0.0
        if kind == "upload" and hours:  # a guess may not eat the budget
            return min(self.assumed.get(kind, 0.0), 0.04 * hours * 3600)
        if kind in self.assumed:
            return self.assumed[kind]
        if kind == "evaluation":  # forward only: about 0.4 of a training step's time per sequence
            return 0.4 * (self.pace() or 0.0) * s.eval_rows * len(s.domains) / s.sequences_per_step
        if kind == "sample":  # a forward of one sequence for each token, the same on every rank
            return s.sample_tokens * (self.pace() or 0.0) * self.world / s.sequences_per_step / 3
        return min(600.0, 0.05 * hours * 3600) if kind == "whole save" else 0.0

    def ending(self) -> float:
        """Seconds to save and upload at the end of a launch: the save and an export, half its size; an upload that is under
        way, the last one and the export's."""
        return 1.5 * self.cost("whole save") + 2.5 * self.cost("upload")

    def reserve(self) -> float:
        """Seconds kept for what follows the last step: final evaluation, save, upload, and one slow step."""
        s = self.settings
        final_evaluation = self.cost("evaluation") * max(1.0, s.final_eval_rows / s.eval_rows)
        return 1.1 * (final_evaluation + self.cost("sample") + self.ending()) + self.slow_step() + CLOSING

    def slow_step(self) -> float:
        """Seconds of the slowest of the recent steps."""
        return max(self.window, default=self.pace() or 0.0)

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

    # --- the decision ---------------------------------------------------------------------------------------
    def decide(self, step: int, clock: float, horizon: Horizon) -> Event | None:
        """Asked at the start of `step` (not done yet): a new horizon, a stop, or None."""
        s = self.settings
        if s.max_hours:
            event = self.move(step, s.max_hours * 3600 - self.used(clock) - self.reserve(), horizon)
            if event:
                return event
        if s.job_hours:
            left = s.job_hours * 3600 - (clock - self.launched)
            need = 1.1 * self.ending() + self.slow_step()
            if left <= need and step < horizon.end_step - 1:
                reason = f"job_hours={s.job_hours:g} end in {left / 60:.1f} min: save and stop, resumable"
                return Event("stop", step, reason)
        return None

    def move(self, step: int, seconds: float, horizon: Horizon) -> Event | None:
        """The horizon that `seconds` of training still buy, when it differs enough from the present one."""
        if step >= horizon.end_step - 1:
            return None  # the last step is about to run, at the floor, whatever the clock says
        if self.pace() is None:
            return self.end_now(step) if seconds <= 0 else None
        limit = first_horizon(self.settings).end_step
        now, enough = horizon.end_step, self.seconds(step, horizon.end_step) <= seconds
        if enough and now == limit:
            return None
        new_end = self.affordable(step, seconds * (1 - MARGIN), limit)
        if not enough:
            why = "end before"
        elif new_end - step > (1 + EXTEND) * (now - step) and new_end - now > 0.01 * now:
            why = "reach beyond"
        else:
            return None
        if step < horizon.decay_start and not DECAYS[self.settings.schedule][1]:
            # stable phase: nothing to do until the decay has to begin
            if step < new_end - max(1, round(self.settings.decay_frac * new_end)):
                return None
        progress = horizon.at(step) if step >= horizon.decay_start else horizon.progress
        start = (
            max(step, self.settings.warmup_steps)
            if DECAYS[self.settings.schedule][1] and not progress
            else step
        )
        new = Horizon(min(start, new_end - 1), new_end, progress)
        reason = (
            f"max_hours={self.settings.max_hours:g} {why} step {now} at {self.pace():.3g} s/step: "
            f"decay from step {new.decay_start}, end at step {new_end}"
        )
        return Event("horizon", step, reason, new)

    def end_now(self, step: int) -> Event:
        reason = (
            f"max_hours={self.settings.max_hours:g} are used up: step {step} is the last, at the floor rate"
        )
        return Event("horizon", step, reason, Horizon(step, step + 1))
