"""What a token of each request is worth, where requests that end are not replaced.

A batch that nothing follows ends with its slowest request: what others gain beyond its pace saves
nothing but their own part of the steps. Where others take the places of those that end, a token is a
token. Which of the two holds is said by the view, where others wait, and else learnt from who leaves and
who comes.

With `fixed` the seconds of a step whatever its tokens, and `each` those that a request adds, the rest of
the batch takes about `fixed * (steps of the last request) + each * (steps of all requests)`; a token
of request r saves `(fixed * P(r is the last) + each) / (tokens per step of r)` seconds of that. Who is the
last is uncertain, since text that is hard to draft is followed by text that is not: in proportion to the
steps that remain. Whoever says more slows requests down that are the last ones later.
Knows nothing of drafters or of how the best plan is found. A fold over observations.
"""

import math

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import BatchView, FloatArray, Observation, RequestView
from sdcontrol.policies.problem import Answer, IntArray, Problem

__all__ = ["PACE", "SAME", "Pace", "Worth", "tokens_of", "weigh", "weigh_all"]

Pace = tuple[FloatArray, FloatArray, tuple[float, float, float, float]]
"""By request, the step at which it came and the tokens that remained then; the present step, tokens and
drafts of the average request's step, the share of requests that are replaced."""
PACE = "Tuple((float64[::1], float64[::1], UniTuple(float64, 4)))"

_NOBODY: FloatArray = np.zeros(0)
SAME: Pace = _NOBODY, _NOBODY, (0.0, 1.0, 0.0, 1.0)
"""Of requests whose tokens are worth the same."""

_MEMORY = 0.97  # of the average pace, per step
_DEPARTURES = 0.8  # of who was replaced, per departure
_ALL = 0.95  # share of the replaced that is as good as all
_DOUBT = 0.1  # places left free that are believed in, whatever was replaced
_GAPS = 8  # between arrivals, over which their average is taken
_OWN_STEPS = 2.0  # at the average pace, which a request's own steps are added to
_FORESEEN_TOKENS = 256.0  # that come at a request's own pace, those after them at the average one


class Worth:
    """Who ends when, and whether somebody follows: nobody, until somebody did."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        # Of each request: the step at which it came, and the tokens that remained then.
        self._came: dict[str, tuple[float, float]] = {}
        self._since: tuple[FloatArray, FloatArray] = _NOBODY, _NOBODY  # the same as arrays
        self._vacant: list[int] = []  # steps at which places became free
        self._replaced, self._left_free = 0.0, 1.0  # places, the early ones fading
        self._arrival = 0  # step of the last one, or at which all were new
        self._gap, self._num_gaps = 1.0, 0  # steps between arrivals
        self._tokens = self._drafts = 0.0  # per request and step
        self._waited = False  # somebody, in the last step
        self._steps = 0

    def update(self, observation: Observation) -> None:
        """Take note of who decoded, and how far they came."""
        requests = observation.view.requests
        ids = [request.id for request in requests]
        if ids != self._ids:
            self._regroup(observation.view, ids)
        self._waited = observation.view.others_wait
        if ids:
            self._steps += 1
            rate = max(1.0 - _MEMORY, 1.0 / self._steps)
            self._tokens += rate * (sum(observation.emitted) / len(ids) - self._tokens)
            self._drafts += rate * (sum(observation.proposed) / len(ids) - self._drafts)

    def pace(self, view: BatchView) -> Pace:
        """What `weigh` needs to know of the view's requests."""
        follows = view.others_wait or view.prefill_tokens
        if follows or len(view.requests) < 2 or not self._steps:
            return SAME
        overdue = 0.0
        if self._vacant:
            overdue = (view.step - max(self._arrival, self._vacant[0])) / self._gap
        open_places = self._replaced * math.exp(-max(overdue, 0.0))
        replaced = open_places / (open_places + self._left_free + _DOUBT)
        if replaced >= _ALL:
            return SAME
        is_known = [request.id for request in view.requests] == self._ids
        steps, remaining = self._since if is_known else _arrays(view, self._came)
        return steps, remaining, (float(view.step), self._tokens, self._drafts, replaced)

    def _regroup(self, view: BatchView, ids: list[str]) -> None:
        """Requests left, or came. Where all left at once nobody knows who would have followed."""
        stay = self._came.keys() & set(ids)
        if stay:
            self._vacant += [view.step] * (len(self._came) - len(stay))
            for _ in range(min(len(ids) - len(stay), len(self._vacant))):
                self._vacant.pop(0)
                if not self._waited:  # else it says nothing of when nobody does
                    self._count(replaced=1.0)
                    self._note_gap(view.step)
        else:
            for _ in self._vacant:
                self._count(replaced=0.0)
            self._vacant.clear()
            self._arrival = view.step
        steps, remaining = self._since = _arrays(view, self._came)
        self._came = dict(
            zip(ids, zip(steps.tolist(), remaining.tolist(), strict=True), strict=True)
        )
        self._ids = ids

    def _note_gap(self, step: int) -> None:
        self._num_gaps = min(self._num_gaps + 1, _GAPS)
        self._gap += (max(step - self._arrival, 0.5) - self._gap) / self._num_gaps
        self._arrival = step

    def _count(self, *, replaced: float) -> None:
        self._replaced = _DEPARTURES * self._replaced + replaced
        self._left_free = _DEPARTURES * self._left_free + 1.0 - replaced


def weigh_all(problem: Problem, least: float, remaining: IntArray, pace: Pace) -> Problem:
    """The problem in tokens of the average request; `least` is the seconds of a step of one token."""
    return problem._replace(gain=weigh(problem.gain, (problem.verify, least), remaining, pace))


def tokens_of(problem: Problem, answer: Answer) -> float:
    """Expected tokens of a plan, each counted as one."""
    rows = np.arange(problem.batch)
    return problem.batch + float(problem.gain[answer.arm, rows, answer.length].sum())


@compiled(f"float64[::1](Tuple((float64[::1], float64)), int64[::1], {PACE})")
def _weights(seconds: tuple[FloatArray, float], remaining: IntArray, pace: Pace) -> FloatArray:
    """By request what its tokens are worth, 1 on average; nothing where all are worth the same."""
    steps, came, (now, tokens, drafts, replaced) = pace
    verify, least = seconds
    batch = len(steps)
    if batch == 0 or tokens <= 0.0 or len(verify) < 2:
        return np.zeros(0)
    used = min(int(drafts * batch + 0.5), len(verify) - 1)
    token = max(verify[used] - least, 0.0) / max(
        used + batch - 1, 1
    )  # as requests end, all of them
    each = token * (1.0 + drafts) / tokens
    fixed = max(verify[used] - token * (used + batch), 0.0)
    speed, left = np.empty(batch), np.empty(batch)
    for r in range(batch):
        own = came[r] - remaining[r] + _OWN_STEPS * tokens
        speed[r] = own / (max(now - steps[r], 0.0) + _OWN_STEPS)
        foreseen = min(float(remaining[r]), _FORESEEN_TOKENS)
        left[r] = foreseen / speed[r] + (remaining[r] - foreseen) / tokens
    worth = fixed * left / left.sum() / speed + each
    if not worth.sum() > 0.0:
        return np.zeros(0)
    return np.asarray(replaced + (1.0 - replaced) * worth / worth.mean())


@compiled(f"float64[:,:,::1](float64[:,:,::1], Tuple((float64[::1], float64)), int64[::1], {PACE})")
def weigh(
    gain: FloatArray, seconds: tuple[FloatArray, float], remaining: IntArray, pace: Pace
) -> FloatArray:
    """Expected tokens `[arms, requests, lengths]`, in those of the average request."""
    weight = _weights(seconds, remaining, pace)
    if len(weight) == 0:
        return gain
    scaled = np.empty_like(gain)
    for r in range(len(weight)):
        scaled[:, r] = gain[:, r] * weight[r]
    return scaled


def _arrays(view: BatchView, came: dict[str, tuple[float, float]]) -> tuple[FloatArray, FloatArray]:
    def since(request: RequestView) -> tuple[float, float]:
        return came.get(request.id) or (view.step, request.remaining_tokens)

    known = np.array([since(request) for request in view.requests], np.float64).reshape(-1, 2)
    return np.ascontiguousarray(known[:, 0]), np.ascontiguousarray(known[:, 1])
