"""Who ends when, and whether somebody follows, by which `weighing` says what a token of each is worth.

Whether others take the places of those that end is said by the view, where others wait, and else learnt
from who leaves and who comes. Knows nothing of drafters, costs or plans. A fold over observations.
"""

import math

import numpy as np

from sdcontrol.columns import ids_of
from sdcontrol.core import BatchView, FloatArray, Observation
from sdcontrol.policies.stragglers import Stragglers
from sdcontrol.policies.weighing import SAME, Pace

__all__ = ["Worth"]

_MEMORY = 0.97  # of the average pace, per step
_DEPARTURES = 0.8  # of who was replaced, per departure
_ALL = 0.95  # share of the replaced that is as good as all
_DOUBT = 0.1  # places left free that are believed in, whatever was replaced
_GAPS = 8  # between arrivals, over which their average is taken


class Worth:
    """Who ends when, and whether somebody follows: nobody, until somebody did. `stragglers`: who is last."""

    def __init__(self) -> None:
        self._ids: tuple[str, ...] = ()
        # Of each request: the step at which it came, and the tokens that remained then.
        self._came: dict[str, tuple[float, float]] = {}
        self._since: tuple[FloatArray, FloatArray] = SAME[:2]  # the same as arrays
        self._vacant: list[int] = []  # steps at which places became free
        self._replaced, self._left_free = 0.0, 1.0  # places, the early ones fading
        self._arrival = 0  # step of the last one, or at which all were new
        self._gap, self._num_gaps = 1.0, 0  # steps between arrivals
        self._tokens = self._drafts = 0.0  # per request and step
        self.stragglers = Stragglers()
        self._waited = False  # somebody, in the last step
        self._paced: tuple[BatchView, Pace] | None = None
        self._steps = 0

    def update(self, observation: Observation) -> None:
        """Take note of who decoded, and how far they came."""
        self._paced = None
        ids = ids_of(observation.view)
        if ids != self._ids:
            self._regroup(observation.view, ids)
        self.stragglers.update(observation, lambda: self.pace(observation.view))
        self._waited = observation.view.others_wait
        if ids:
            self._steps += 1
            rate = max(1.0 - _MEMORY, 1.0 / self._steps)
            self._tokens += rate * (sum(observation.emitted) / len(ids) - self._tokens)
            self._drafts += rate * (sum(observation.proposed) / len(ids) - self._drafts)
        self._paced = None  # stragglers may have asked

    def pace(self, view: BatchView) -> Pace:
        """What `weighing` needs to know of the view's requests; of one view it is asked for often."""
        if self._paced is None or self._paced[0] is not view:
            self._paced = view, self._pace(view)
        return self._paced[1]

    def _pace(self, view: BatchView) -> Pace:
        if view.prefill_tokens or len(view.requests) < 2 or not self._steps:
            return SAME
        is_known = ids_of(view) == self._ids
        steps, remaining = self._since if is_known else _arrays(_known(view, self._came))
        stragglers, count = self.stragglers, len(view.requests)
        numbers = float(view.step), self._tokens, self._drafts, self._followed(view)
        last = stragglers.sharpness, stragglers.kept(count)
        return Pace(steps, remaining, (*numbers, *last), stragglers.gains.kept(count))

    def _followed(self, view: BatchView) -> float:
        """The share of requests that are followed by others."""
        if view.others_wait:
            return 1.0
        overdue = 0.0
        if self._vacant:
            overdue = (view.step - max(self._arrival, self._vacant[0])) / self._gap
        open_places = self._replaced * math.exp(-max(overdue, 0.0))
        followed = open_places / (open_places + self._left_free + _DOUBT)
        return 1.0 if followed >= _ALL else followed

    def _regroup(self, view: BatchView, ids: tuple[str, ...]) -> None:
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
        known = _known(view, self._came)
        self._since = _arrays(known)
        self._came = dict(zip(ids, known, strict=True))
        self._ids = ids

    def _note_gap(self, step: int) -> None:
        self._num_gaps = min(self._num_gaps + 1, _GAPS)
        self._gap += (max(step - self._arrival, 0.5) - self._gap) / self._num_gaps
        self._arrival = step

    def _count(self, *, replaced: float) -> None:
        self._replaced = _DEPARTURES * self._replaced + replaced
        self._left_free = _DEPARTURES * self._left_free + 1.0 - replaced


def _known(view: BatchView, came: dict[str, tuple[float, float]]) -> list[tuple[float, float]]:
    """By request when it came, and with how many tokens to go: now, of one that was not there."""
    step = view.step
    return [came.get(one.id) or (step, one.remaining_tokens) for one in view.requests]


def _arrays(known: list[tuple[float, float]]) -> tuple[FloatArray, FloatArray]:
    table = np.array(known, np.float64).reshape(-1, 2)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
