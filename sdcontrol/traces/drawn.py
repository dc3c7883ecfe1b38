"""A recording's requests decoded again, with drafters and lengths drawn at random.

Whoever records says little of drafters that were left alone, and of the others where they were thought to
pay. An acceptance table answers for all of them, everywhere: what is learnt of acceptance from these runs is
learnt without such a selection. Outcomes are the recorded ones; step times are made up, and nobody is to
learn costs from them.
"""

import numpy as np

from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Belief, Choice, Observation, Plan, RequestView
from sdcontrol.errors import CounterfactualError
from sdcontrol.policies import Policy
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.simulate import Simulation
from sdcontrol.traces.step_times import CostTimes, LinearCost
from sdcontrol.traces.what_if import settings_of, workload_of

__all__ = ["drawn_runs"]

_TIMES = CostTimes(LinearCost(1e-2, 1e-4))
_LONGEST = 8  # tokens of a draft
_LEAST_STEPS, _MOST_RUNS = 1000, 12
_MOST_STEPS = 20_000  # of a run


def drawn_runs(trace: Trace) -> list[list[Observation]]:
    """The observations of each run: as many runs as make 1000 steps, 12 at most, and of each 20,000 steps at most.

    No runs where the trace cannot answer for drafts that were not made. They differ in what was drawn, and are the
    same every time. Raises `TraceError` where the trace is damaged.
    """
    runs: list[list[Observation]] = []
    try:
        workload, settings = workload_of(trace).at_once(), settings_of(trace)
        while len(runs) < _MOST_RUNS and sum(map(len, runs)) < _LEAST_STEPS:
            controller = Controller(_Drawn(len(runs)), clock=None)
            runs.append(_observations(Simulation(workload, controller, _TIMES, settings)))
    except CounterfactualError:
        return []
    return runs


def _observations(simulation: Simulation) -> list[Observation]:
    seen: list[Observation] = []
    while simulation.has_work and len(seen) < _MOST_STEPS:
        seen.append(simulation.step())
    return seen


class _Drawn(Policy):
    """Any of the arms that have something to draft, at any length."""

    uses_belief = False

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        draw, free = np.random.default_rng([self._seed, view.step]), view.free_kv_tokens
        choices = []
        for request in view.requests:
            offers = [(arm, _most(request, arm, free)) for arm in request.drafters]
            able = [(arm, most) for arm, most in offers if most > 0]
            if able:
                arm, most = able[draw.integers(len(able))]
                choices.append(Choice.of(arm, int(draw.integers(1, most + 1))))
            else:
                choices.append(Choice.off())
            free -= choices[-1].num_draft_tokens
        return Plan(tuple(choices), "drawn")


def _most(request: RequestView, arm: str, free_tokens: int) -> int:
    hint = request.hints.get(arm)
    limit = hint.max_draft_tokens if hint is not None else None
    offered = _LONGEST if limit is None else min(limit, _LONGEST)
    return min(offered, request.remaining_tokens - 1, free_tokens)
