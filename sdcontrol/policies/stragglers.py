"""Who is the last of a batch that nothing follows, and how little its drafts bring: learnt from such batches.

Such a batch ends with its slowest request, its straggler. Steps that remain say who that will be the more
sharply, the longer a request keeps its pace: P(last) ~ steps ** sharpness, with the sharpness under which the
order in which they ended was likeliest. And whoever is last is so since its drafts brought less than those of
all who might have been. Of what a draft saves if its request is the last a share is `kept`: less the more requests there
are, as the largest of many normal numbers is further from their mean; and less by drafters that bring it less than
others (`gains`). Batches are looked at after 8, 16, 32, ... steps, and learnt from when all have gone. Knows nothing of
costs or plans. A fold over observations.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sdcontrol.columns import columns_of, ids_of
from sdcontrol.core import BatchView, FloatArray, Observation
from sdcontrol.policies.last_gains import LastGains, expected_most
from sdcontrol.policies.weighing import SAME, Pace, steps_left

__all__ = ["Stragglers"]

_SHARPNESS = np.array([1.0, 2.0, 3.0, 5.0])
_DOUBTS = np.array([0.0, 0.2, 0.4, 0.6])  # nats against each, before anything is known
_EVIDENCE = 1.0  # squared deviations that nothing being behind counts for, before anything is known
_FULL_GAIN = 0.3  # tokens per step that say as much of it as more would
_LUCK = 0.5  # of what the last one is behind; the rest is text in which little was foreseen
_FADING = 0.8  # of what is known, per batch
_FIRST_LOOK = 8  # steps
_SHORTEST = 4  # steps from a look to the end that say something


class _Look(NamedTuple):
    """What was foreseen of a batch in one of its steps."""

    step: int
    ids: tuple[str, ...]
    remaining: FloatArray  # tokens
    left: FloatArray  # steps


class Stragglers:
    """What is known of the last requests of batches."""

    def __init__(self) -> None:
        self._likely = np.zeros(len(_SHARPNESS))  # log-likelihood of who ended when
        self._weight = np.full(len(_SHARPNESS), _EVIDENCE)
        self._behind = np.zeros(len(_SHARPNESS))  # of the gain that might have been, by deviation
        self.sharpness = float(_SHARPNESS[0])
        """The power of the steps that remain that says who is the last."""
        self._lost = 0.0  # of a gain of the last one, by deviation
        self.gains = LastGains()
        self._view: BatchView | None = None
        self._is_closed, self._began = True, 0
        self._looks: list[_Look] = []
        self._ended: dict[str, tuple[int, int]] = {}  # last step, and what remained in it

    def kept(self, num_requests: int) -> float:
        """The share of a gain that the last of so many requests has, whichever drafter's it is."""
        return 1.0 - _LUCK * min(self._lost * expected_most(num_requests), 1.0)

    def update(self, observation: Observation, pace: Callable[[], Pace]) -> None:
        """Take note of a step; `pace` is asked for in steps that are looked at."""
        view = observation.view
        last, self._view = self._view, view
        ids = ids_of(view)
        if last is None or ids != ids_of(last) or _is_used_again(view, last):
            self._regroup(view, last)
        if self._is_closed:
            self.gains.count(observation)
        steps = view.step - self._began
        if self._is_closed and steps >= _FIRST_LOOK and not steps & (steps - 1):
            now = pace()
            if now is not SAME and now.numbers[1] > 0.0:
                remaining = columns_of(view).remaining_tokens
                left = steps_left(remaining, now)
                self._looks.append(_Look(view.step, ids, remaining.astype(float), left))

    def _regroup(self, view: BatchView, last: BatchView | None) -> None:
        """Requests left, or came: a batch is followed if somebody comes when others have left."""
        before: set[str] = set()
        now = {*ids_of(view)}
        if last is not None:
            now = set() if _is_used_again(view, last) else now
            before = {*ids_of(last)}
            gone = [request for request in last.requests if request.id not in now]
            if self._is_closed:
                self._ended.update({one.id: (last.step, one.remaining_tokens) for one in gone})
        if now.isdisjoint(before):
            if self._is_closed and len(self._ended) > 1:
                self._learn()
            self._is_closed, self._began, self._looks, self._ended = True, view.step, [], {}
            self.gains.begin(ids_of(view))
        elif not now.issubset(before):
            self._is_closed = self._is_closed and not self._ended
            self._began, self._looks, self._ended = view.step, [], {}
            self.gains.begin(ids_of(view))

    def _learn(self) -> None:
        end = max([step for step, _ in self._ended.values()])
        self.gains.learn([name for name, (step, _) in self._ended.items() if step == end])
        looks = [told for look in self._looks if (told := _told(look, self._ended)) is not None]
        if not looks:
            return
        likely, weight, behind = np.mean(looks, axis=0)
        self._likely = _FADING * self._likely + likely
        self._weight = _FADING * self._weight + weight
        self._behind = _FADING * self._behind + behind
        best = np.argmax(self._likely - _DOUBTS)
        self.sharpness = float(_SHARPNESS[best])
        self._lost = max(float(self._behind[best] / self._weight[best]), 0.0)


def _told(
    look: _Look, ended: dict[str, tuple[int, int]]
) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    """By sharpness, how likely the order was in which they ended, the gain that might have been, and how far the
    last one's was behind it, by deviation; None if it was too late to tell.
    """
    ends = np.array([ended[name] for name in look.ids], float)
    steps = ends[:, 0] - look.step
    order = np.argsort(-steps, kind="stable")  # the last one first
    if steps[order[0]] < _SHORTEST:
        return None
    gains = (look.remaining - ends[:, 1]) / np.maximum(steps, 1.0) - 1.0
    powers = np.maximum(look.left, 1e-9) ** _SHARPNESS[:, None]
    gained = np.maximum(powers @ gains / powers.sum(axis=1), 0.0)
    deviations = expected_most(len(order))
    says = np.minimum(gained / _FULL_GAIN, 1.0)
    behind = (1.0 - gains[order[0]] / np.maximum(gained, 1e-9)) * says * deviations
    return _likelihood(powers[:, order], steps[order]), says * deviations**2, behind


def _likelihood(powers: FloatArray, steps: FloatArray) -> FloatArray:
    """Of the order in which the slower half ended, in nats beyond chance, by sharpness (Plackett and Luce)."""
    those = np.cumsum(powers[:, ::-1], axis=1)[:, ::-1]  # that are no later than each
    chances = np.log(powers / those * np.arange(len(steps), 0, -1))[:, :-1]
    counts = (steps[:-1] > steps[1:]) & (np.arange(1, len(steps)) <= len(steps) / 2)
    return np.asarray(chances[:, counts].sum(axis=1))


def _is_used_again(view: BatchView, last: BatchView) -> bool:
    """Whether the first request has the name of another one of before."""
    if not view.requests or not last.requests:
        return False
    now, before = view.requests[0], last.requests[0]
    return now.id == before.id and now.remaining_tokens > before.remaining_tokens
