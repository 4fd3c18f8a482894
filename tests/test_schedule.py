"""schedule.py: rates are pure functions of step and horizon; a budget moves the horizon so that everything ends inside.

The budget is driven by a simulated run with a fake clock: it knows how long steps, evaluations, saves and the end take,
and `Budget` hears only what a real run would tell it.
"""

import json
import math
import random
import typing

import pytest
from conftest import tiny_settings

import schedule
from schedule import Budget, Event, Horizon, context_length, first_horizon, rates, resumed_horizon
from settings import TYPES

FORMS = typing.get_args(TYPES["schedule"])
# Share of the way from floor to peak at each of 111 steps behind 10 of warm-up: the formulas, written out.
CURVES = {
    "cosine": lambda step: (1 + math.cos(math.pi * (step - 10) / 100)) / 2,
    "wsd": lambda step: 1 - max(0, step - 89) / 21,
}


def long_settings(**changes):
    values = dict(total_steps=100_000, warmup_steps=20, eval_every=50, ckpt_every=100, save_minutes=1.0)
    return tiny_settings(**values | changes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_the_first_rate_is_not_zero_and_the_last_is_the_floor(form, warmup):
    s = tiny_settings(schedule=form, total_steps=50, warmup_steps=warmup)
    horizon = first_horizon(s)
    assert min(rates(0, s, horizon)) > 0
    assert rates(49, s, horizon)[:2] == (s.muon_min_lr, s.min_lr)
    assert max(rates(i, s, horizon)[0] for i in range(50)) == pytest.approx(s.muon_lr)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_its_textbook_curve(form):
    """A form without a curve above fails: it would be tested by nothing."""
    s = tiny_settings(schedule=form, total_steps=111, warmup_steps=10, decay_frac=0.2)
    values = [rates(i, s, first_horizon(s))[1] for i in range(111)]
    want = [s.min_lr + (s.lr - s.min_lr) * CURVES[form](step) for step in range(10, 111)]
    assert values[:10] == pytest.approx([s.lr * (i + 1) / 10 for i in range(10)])
    assert values[10:] == pytest.approx(want)


@pytest.mark.parametrize("form", FORMS)
def test_a_moved_horizon_never_makes_the_rate_jump(form):
    s = tiny_settings(schedule=form, total_steps=1000, warmup_steps=10)
    old = first_horizon(s)
    for step in (50, 500, 900):
        for end in (step + 20, 990, 3000):
            new = Horizon(step, end, old.at(step))
            assert rates(step, s, new) == rates(step, s, old)
            curve = [rates(i, s, new)[0] for i in range(step, end)]
            assert curve == sorted(curve, reverse=True) and curve[-1] == s.muon_min_lr


@pytest.mark.parametrize("form", FORMS)
def test_another_length_never_makes_the_rate_of_a_decay_jump(form):
    """total_steps changed at a resume: the rate goes on from where it is; of a run that was done, it is the new one's."""
    s, old = resumable(form, 200)
    for total in (150, 199, 201, 1000):
        longer, _ = resumable(form, total)
        new, line = resumed_horizon(longer, 130, old, s.as_dict(), branch=False)
        assert rates(130, longer, new) == rates(130, s, old) and new.end_step == total
        assert line.startswith(f"a new horizon: decay from step {new.decay_start}, end at {total}; ")
    assert resumed_horizon(longer, 5, old, s.as_dict(), branch=False)[0] == first_horizon(longer)
    for step in (199, 200):  # at its last step a decay is over, too: else all that follow were at the floor
        assert resumed_horizon(longer, step, old, s.as_dict(), branch=False)[0] == first_horizon(longer)
    new, line = resumed_horizon(s, 180, old, s.as_dict(), branch=True)
    assert new.at(180) == 0 and "the next step 0% are" in line, "a branch: from the peak"


def resumable(form, total_steps, **changes):
    s = tiny_settings(schedule=form, total_steps=total_steps, warmup_steps=10, decay_frac=0.5, **changes)
    return s, first_horizon(s)


def test_a_resume_keeps_its_horizon_unless_a_setting_that_makes_it_has_changed():
    s, old = resumable("wsd", 200, max_hours=1.0)
    moved = Horizon(40, 60)  # by the budget
    more, same = resumable("wsd", 200, max_hours=2.0)[0], s.as_dict()
    for now in (s, tiny_settings(**{**same, "lr": 1e-3})):
        assert resumed_horizon(now, 50, moved, same, branch=False) == (moved, None)
    assert resumed_horizon(more, 50, moved, same, branch=False) == (moved, None), "the budget moves it"
    assert resumed_horizon(more, 60, moved, same, branch=False)[0] == old, "the old budget has ended the run"
    assert resumed_horizon(more, 200, old, same, branch=False) == (old, None), "nothing is left to do"
    other = tiny_settings(**{**same, "schedule": "cosine"})
    assert resumed_horizon(other, 50, moved, same, branch=False)[0] == Horizon(50, 200), "begins anew"


def test_rates_do_not_depend_on_history_and_survive_json():
    s = tiny_settings(schedule="cosine", total_steps=300)
    horizon = Horizon(40, 200, 0.125)
    again = Horizon(**json.loads(json.dumps(horizon.as_dict())))
    order = random.Random(0).sample(range(200), 200)
    assert {i: rates(i, s, horizon) for i in order} == {i: rates(i, s, again) for i in range(200)}


def test_stop_at_ends_a_launch_without_touching_a_rate():
    whole = tiny_settings(total_steps=100)
    cut = tiny_settings(total_steps=100, stop_at=30)
    assert first_horizon(cut) == first_horizon(whole)
    assert [rates(i, cut, first_horizon(cut)) for i in range(30)] == [
        rates(i, whole, first_horizon(whole)) for i in range(30)
    ]


def test_a_branch_of_a_stable_phase_decays_from_the_branching_point():
    """schedule_from: the rate continues at the peak, then falls to the floor at the branch's own end."""
    long = tiny_settings(schedule="wsd", total_steps=10_000)
    branch = tiny_settings(schedule="wsd", total_steps=1200, decay_frac=0.2)
    horizon = first_horizon(branch, start_step=1000)
    assert horizon == Horizon(1000, 1200)
    assert rates(1000, branch, horizon) == rates(1000, long, first_horizon(long))
    assert rates(1199, branch, horizon)[:2] == (branch.muon_min_lr, branch.min_lr)
    later = first_horizon(tiny_settings(schedule="wsd", total_steps=2000, decay_frac=0.2), start_step=1000)
    assert later == Horizon(1600, 2000)  # room for a stable phase first


def test_target_tokens_replace_total_steps():
    assert first_horizon(tiny_settings(total_steps=7, target_tokens=64 * 8 * 33)).end_step == 33


def test_momentum_warms_up_linearly():
    s = tiny_settings(muon_momentum_warmup=10, muon_momentum=0.95)
    values = [rates(i, s, first_horizon(s))[2] for i in range(12)]
    assert values[0] == 0.85 and values[5] == pytest.approx(0.90) and values[10:] == [0.95, 0.95]
    assert rates(0, tiny_settings(), first_horizon(tiny_settings()))[2] == 0.95


def test_contexts_are_a_few_divisors_and_only_grow():
    s = tiny_settings(max_len=2048, ctx_start_len=256, ctx_end_len=2048, ctx_warmup_steps=100)
    lengths = [context_length(i, s) for i in range(150)]
    assert lengths == sorted(lengths) and lengths[0] == 256 and set(lengths[100:]) == {2048}
    assert all(2048 % n == 0 for n in lengths) and 2 <= len(set(lengths)) <= 4
    assert set(lengths) <= set(schedule.contexts(s))
    plain = tiny_settings()
    assert schedule.contexts(plain) == [64] and context_length(0, plain) == 64


def test_save_interval_suggestion_is_youngs_formula():
    assert schedule.save_minutes_suggested(8.0, 24.0) == pytest.approx(math.sqrt(2 * 8 * 86400) / 60)
    assert schedule.save_advice(8.0).startswith("a save held training up for 8.00 s: save_minutes=20 loses")


class FakeRun:
    """A run whose every duration is known. `launch` goes on from the last saved step until the end, a stop or a kill."""

    def __init__(self, settings, step_seconds, start_up=20.0, **costs):
        self.s, self.step_seconds, self.start_up = settings, step_seconds, start_up
        self.costs = {"evaluation": 1.0, "pause": 0.2, "save": 2.0, "upload": 0.0, "sample": 0.0} | costs
        self.used, self.saved, self.events, self.rates = 0.0, None, [], {}

    def launch(self, kill_after=math.inf, world=1):
        s, launched = self.s, random.Random(str(self.used)).uniform(0, 1e6)  # monotonic clocks start anywhere
        clock = launched + self.start_up
        budget = Budget(s, launched, self.used, world=world)
        step, horizon = 0, first_horizon(s)
        if self.saved:
            step, horizon = self.saved["step"], Horizon(**self.saved["horizon"])
            budget.load_state(json.loads(json.dumps(self.saved["budget"])))
        self.status, here, saved_at, costs = "done", 0, clock, self.costs
        ending = costs["pause"] + costs["save"] + costs["upload"]
        while step < horizon.end_step:
            event = budget.decide(step, clock, horizon)
            if event:
                assert Event.from_dict(json.loads(json.dumps(event.as_dict()))) == event
                self.events.append(event)
                if event.kind == "stop":
                    self.status = "stopped"
                horizon = event.horizon or horizon
            self.rates[step] = rates(step, s, horizon)
            seconds = self.step_seconds(here, step)
            clock += seconds
            budget.stepped(seconds)
            step, here = step + 1, here + 1
            if clock - launched > kill_after:
                self.status = "killed"
                break
            if step % s.eval_every == 0 and step < horizon.end_step:
                for kind in ("evaluation", "sample") if costs["sample"] else ("evaluation",):
                    clock += costs[kind]
                    budget.paused(kind, costs[kind])
            if step % s.ckpt_every == 0 or clock - saved_at > s.save_minutes * 60:
                clock, saved_at = clock + costs["pause"], clock
                pause, save, upload = (costs[kind] for kind in ("pause", "save", "upload"))
                budget.saved({"pause": pause, "seconds": save, "upload_seconds": upload})
                self.saved = {"step": step, "horizon": horizon.as_dict(), "budget": budget.state()}
            if self.status == "stopped":
                break
        if self.status == "done":
            clock += costs["evaluation"] * s.final_eval_rows / s.eval_rows + costs["sample"]
        if self.status != "killed":  # the last save is waited for, and uploaded
            clock += ending
            self.saved = {"step": step, "horizon": horizon.as_dict(), "budget": budget.state()}
        self.used += clock - launched  # the journal survives a kill
        self.step, self.horizon, self.launch_seconds = step, horizon, clock - launched
        return self

    def check_done(self):
        """The last step is at the floor."""
        assert self.status == "done" and self.step == self.horizon.end_step
        assert self.rates[self.step - 1][:2] == (self.s.muon_min_lr, self.s.min_lr)

    def check_ended(self, at_least=0.8):
        """Done, inside the budget, most of which was used, at a rate that never rose after it began to fall."""
        self.check_done()
        budget = self.s.max_hours * 3600
        assert at_least * budget <= self.used <= budget, f"{self.used:.0f} s of {budget:.0f}"
        curve = [self.rates[i][0] for i in range(self.s.warmup_steps, self.step)]
        assert all(b <= a * (1 + 1e-9) for a, b in zip(curve, curve[1:], strict=False))


def noisy(mean, spread=0.2, seed=0):
    """Step times around `mean`; the first step of a launch compiles."""
    numbers = random.Random(seed)
    return lambda here, step: mean * numbers.uniform(1 - spread, 1 + spread) + (5.0 if here == 0 else 0.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hours", [None, 1.0])
def test_without_a_budget_or_with_a_large_one_nothing_moves(form, hours):
    run = FakeRun(long_settings(schedule=form, total_steps=300, max_hours=hours), noisy(0.1)).launch()
    assert run.status == "done" and run.step == 300 and not run.events


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_a_tight_budget_ends_decayed(form, seed):
    run = FakeRun(long_settings(schedule=form, max_hours=0.1), noisy(0.1, seed=seed)).launch()
    run.check_ended(0.85)
    assert 1 <= len(run.events) <= 20


def test_wsd_stays_at_its_peak_until_the_budgets_last_part():
    run = FakeRun(long_settings(schedule="wsd", max_hours=0.2, decay_frac=0.2), noisy(0.1)).launch()
    run.check_ended(0.85)
    at_peak = sum(run.rates[i][0] == run.s.muon_lr for i in range(run.step))
    assert 0.7 * run.step < at_peak < 0.9 * run.step


# 120 tokens are 120 forwards of one sequence of eight: 120 / 8 / 3 of a step of 0.5 s
SAMPLES = dict(max_hours=0.05, sample_tokens=120), lambda step: 5, dict(sample=2.5, evaluation=0.8), 0.7
DISK = dict(evaluation=15.0, pause=8.0, save=30.0, upload=40.0)
CASES = {  # what differs from a long run of noisy steps: (settings, slowness of a step, costs, share used at least)
    "cold caches make a hundred slow steps: their horizon is given up again": (
        dict(max_hours=0.15), lambda step: 10 if step < 100 else 1, {}, 0.8),
    "it becomes slower inside its decay": (dict(max_hours=0.1), lambda step: 3 if step > 2400 else 1, {}, 0.75),
    "saves and evaluations take long": (dict(max_hours=0.2, ckpt_every=400, eval_every=200), None, DISK, 0.7),
    "saves of half a minute by the clock, one just before the end: the reserve is measured": (
        dict(max_hours=0.1, ckpt_every=10_000, save_minutes=1.5), None, dict(pause=1.0, save=30.0), 0.6),
    "text samples": (dict(eval_every=100) | SAMPLES[0], *SAMPLES[1:]),
    "text samples, none before the end": (dict(eval_every=10**6) | SAMPLES[0], *SAMPLES[1:]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_a_budget_is_kept_and_used_when(case, form):
    changes, slowness, costs, share = CASES[case]
    steady = noisy(0.1)
    seconds = (lambda here, step: steady(here, step) * slowness(step)) if slowness else steady
    FakeRun(long_settings(schedule=form, **changes), seconds, **costs).launch().check_ended(share)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("killed_at", [30, 100, 250, 320])
def test_a_restart_in_the_middle_keeps_to_the_whole_budget(form, killed_at):
    """Killed after so many of 360 s: the time is gone, steps since the save are repeated, it still ends inside."""
    run = FakeRun(long_settings(schedule=form, max_hours=0.1), noisy(0.1)).launch(kill_after=killed_at)
    assert run.status == "killed"
    run.launch().check_ended(0.8)


def test_a_resume_without_a_new_event_repeats_the_same_rates():
    run = FakeRun(long_settings(schedule="wsd", total_steps=400), noisy(0.1)).launch(kill_after=45)
    before = dict(run.rates)
    run.launch()
    assert run.step == 400 and all(run.rates[i] == r for i, r in before.items()) and not run.events


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("left", [0, 5, 20])
def test_a_resume_with_almost_no_budget_left_takes_one_last_step_at_the_floor(form, left):
    run = FakeRun(long_settings(schedule=form, max_hours=0.1, save_minutes=0.2), noisy(0.1), start_up=1.0)
    run.launch(kill_after=100)
    done, run.used = run.saved["step"], 360.0 - left
    run.launch().check_done()
    assert run.step <= done + 10 * left + 1


def test_a_budget_inside_the_warm_up_still_ends_at_the_floor():
    run = FakeRun(long_settings(warmup_steps=5000, max_hours=0.05), noisy(0.1)).launch()
    run.check_done()
    assert run.used <= 180
    s = tiny_settings(schedule="wsd", total_steps=100, warmup_steps=50)
    line = lambda step: s.lr - (s.lr - s.min_lr) * (step - 30) / 19  # noqa: E731
    for step in range(30, 50):  # the lower of the two lines, not their product
        assert rates(step, s, Horizon(30, 50))[1] == pytest.approx(min(line(step), s.lr * (step + 1) / 50))


@pytest.mark.parametrize("form", FORMS)
def test_job_hours_stop_each_launch_in_time_and_move_no_rate(form):
    """Four launches make the same run as one."""
    s = long_settings(schedule=form, total_steps=3000, job_hours=0.03)
    run, launches = FakeRun(s, noisy(0.1), save=4.0), 0
    while not launches or run.status == "stopped":
        assert run.launch().launch_seconds <= 0.03 * 3600
        launches += 1
    free = FakeRun(long_settings(schedule=form, total_steps=3000), noisy(0.1)).launch()
    assert run.status == "done" and 3 <= launches <= 6 and run.rates == free.rates
    assert all(e.kind == "stop" and "job_hours" in e.reason for e in run.events)


def paced(s, **more):
    """A budget that has seen steps of a second."""
    budget = Budget(s, 0.0, **more)
    for _ in range(20):
        budget.stepped(1.0)
    return budget


def test_steps_that_compile_are_not_timed():
    budget = Budget(long_settings(), 0.0)
    for seconds in (100.0, 50.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        assert budget.pace() is None
        budget.stepped(seconds)
    assert budget.pace() == 1.0


def test_on_other_hardware_a_resume_scales_the_pace_that_it_remembers():
    other = Budget(long_settings(max_hours=1.0), 0.0, world=4)
    other.load_state(paced(long_settings(max_hours=1.0), world=8).state())
    assert other.pace() == 2.0


def test_pauses_are_planned_before_they_happen():
    """The steps that fit into an hour: by counting step for step what falls due, and by the budget's formula."""
    s = long_settings(max_hours=1.0, eval_every=50, ckpt_every=100, save_minutes=0.0)
    budget = paced(s)
    budget.paused("evaluation", 10.0)
    budget.saved({"pause": 20.0, "seconds": 30.0})
    clock = end = 0
    while clock < 3600:  # a best checkpoint at every other evaluation
        end += 1
        clock += 1 + (10 + 20 / 2) * (end % 50 == 0) + 20 * (end % 100 == 0)
    assert abs(budget.affordable(0, 3600, 100_000) - end) <= 50


def test_what_follows_the_last_step_is_reserved_with_a_margin():
    """The slower of the last two of each kind: a first evaluation compiles, a disk may be busy."""
    budget = Budget(long_settings(max_hours=1.0), 0.0)
    budget.paused("evaluation", 10.0)
    for kind, seconds in {"evaluation": 4.0, "sample": 2.0, "whole save": 20.0, "upload": 30.0}.items():
        budget.paused(kind, seconds)
    assert 1.08 < budget.reserve() / (10 + 2 + 1.5 * 20 + 2.5 * 30) < 1.2
    budget.paused("evaluation", 4.0)
    assert budget.cost("evaluation") == 4.0


@pytest.mark.parametrize("budget", ["max_hours", "job_hours"])
def test_a_wild_guess_of_an_upload_does_not_eat_the_budget(budget):
    """A trial of 16 MB measures latency more than bandwidth: 4 s of it would make 4.5 hours of a 65 GB checkpoint."""
    s = long_settings(**{budget: 4.0})
    b = Budget(s, launched=0.0, assumed={"upload": 16_200.0, "whole save": 60.0, "pace": 1.0})
    event = b.decide(5, 60.0, first_horizon(s))
    assert b.reserve() < 0.2 * 4 * 3600 and (event is None or event.horizon.end_step > 10_000)


def test_the_last_step_is_never_disturbed():
    """It runs at the floor, whatever the clock says: an event there would be one step too many."""
    total, job = paced(long_settings(max_hours=0.01)), Budget(long_settings(job_hours=0.01), 0.0)
    assert total.decide(99, 1e6, Horizon(10, 100)) is job.decide(99, 1e6, Horizon(10, 100)) is None
    assert total.decide(98, 1e6, Horizon(10, 100)).horizon.end_step == 99
    assert job.decide(98, 1e6, Horizon(10, 100)).kind == "stop"


def test_of_two_budgets_the_one_that_ends_first_counts():
    s = long_settings(max_hours=1.0, job_hours=0.5)
    assert Budget(s, launched=100.0, used=600.0).left(160.0) == 0.5 * 3600 - 60
    assert Budget(s, launched=100.0, used=3000.0).left(160.0) == 3600 - 3000 - 60
    assert Budget(long_settings(), 0.0).left(160.0) is None


def test_a_launch_that_finds_its_budget_used_up_ends_before_it_has_measured_anything():
    s = long_settings(max_hours=0.01)
    event = Budget(s, launched=50.0, used=36.0).decide(7, 51.0, first_horizon(s))
    assert event.horizon == Horizon(7, 8) and "max_hours" in event.reason
    assert Budget(s, launched=50.0, used=0.0).decide(7, 51.0, first_horizon(s)) is None
