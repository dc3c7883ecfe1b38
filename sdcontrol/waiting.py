"""What a controller may put off where steps are so short that its own time would weigh.

Two things. Learning: several steps at once take less than several times as long as one, since what a
forward pushed out of the caches is fetched once, and costs are learnt from the last alone. And
planning: where hints say of each of a few requests what they said a few steps ago, each gets what it
was given then. Knows nothing of what is learnt or how a plan is made. A fold over observations, like
all that decides: how long the controller took is what they say, never measured again.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from sdcontrol.core import BatchView, Choice, Hint, Observation, Plan, RequestView
from sdcontrol.estimators.hints import bucket_of_match

__all__ = ["Waiting"]

_FIRST_STEPS = 64  # of a controller, each of which is news
_MOST_WAITING = 8  # observations, the last one included
_MOST_YOUNG = 0.5  # of the requests, for observations to wait
_YOUNG_STEPS = 4  # of a request, each of which is news
_YOUNG_TOKENS = 8  # generated; before that a request's choices are not kept
_MOST_KNOWN = 4096  # requests, of which it is kept that they came
_MOST_REQUESTS = 4  # of a batch whose plan may be put together from earlier ones
_PLAN_STEPS = 16  # that a choice may stand for
_MOST_CHOICES = 256
_KEPT = "as a few steps ago; "
_SHARE = 0.015  # of a step, that the controller may take without anything being put off
_RATE = 0.1

_Key = tuple[object, ...]


class _Made(NamedTuple):
    """A choice, and when it was made and why."""

    step: int
    choice: Choice
    reason: str


class Waiting:
    """The controller's share of the time, running, and what requests were given lately."""

    def __init__(self, most_draft_tokens: int) -> None:
        self._most_draft_tokens = most_draft_tokens
        self._share = 0.0
        self._steps = 0
        self._came: set[str] = set()  # requests observed
        self._present: tuple[str, ...] = ()  # those of the last step
        self._arrivals: deque[tuple[int, int]] = deque(maxlen=_YOUNG_STEPS)  # step, new requests
        self._made: dict[_Key, _Made] = {}
        self._keyed: tuple[BatchView, list[_Key]] | None = None  # see `_keys`

    @property
    def _is_due(self) -> bool:
        return self._share > _SHARE and self._steps >= _FIRST_STEPS

    def observe(self, observation: Observation, *, may_repeat: bool) -> None:
        """Take note of a step, and of its plan where that may stand for others."""
        timing = observation.timing
        share = timing.controller_seconds / max(timing.total_seconds, 1e-9)
        if 0.0 <= share <= 1.0:  # False for NaN
            self._share += _RATE * (share - self._share)
        self._steps += 1
        self._notice(observation.view)
        if observation.faults or len(self._made) > _MOST_CHOICES:
            self._made.clear()
        plan, step = observation.plan, observation.view.step
        if may_repeat and not observation.faults and not plan.reason.startswith(_KEPT):
            for key, choice in zip(self._keys(observation.view), plan.choices, strict=False):
                self._made[key] = _Made(step, choice, plan.reason)

    def may_wait(self, observation: Observation, num_waiting: int) -> bool:
        """Whether `num_waiting` observations, of which this is the last, may wait for the next."""
        if not self._is_due or num_waiting >= _MOST_WAITING or observation.faults:
            return False
        since = observation.view.step - _YOUNG_STEPS
        young = sum([num_new for step, num_new in self._arrivals if step > since])
        return young <= _MOST_YOUNG * len(observation.view.requests)

    def _notice(self, view: BatchView) -> None:
        """How many requests are there for the first time."""
        present = tuple([request.id for request in view.requests])
        if present == self._present:
            return
        if len(self._came) > _MOST_KNOWN + len(present):
            self._came.intersection_update(self._present)
        new = set(present) - self._came
        self._came.update(new)
        self._arrivals.append((view.step, len(new)))
        self._present = present

    def repeated(self, view: BatchView) -> Plan | None:
        """What was chosen when hints last said what they say now; None: make a plan."""
        made = [self._made.get(key) for key in self._keys(view)]
        choices, left = [], view.free_kv_tokens
        for request, then in zip(view.requests, made, strict=False):
            if then is None or view.step - then.step > _PLAN_STEPS:
                return None
            length = then.choice.num_draft_tokens
            left -= length
            if length >= request.remaining_tokens or left < 0:
                return None
            choices.append(then.choice)
        return Plan(tuple(choices), _KEPT + made[0].reason) if made and made[0] else None

    def _keys(self, view: BatchView) -> list[_Key]:
        """By request, what its choice depends on, but for what changes slowly; empty where none is kept."""
        if self._keyed is None or self._keyed[0] is not view:
            requests = view.requests
            is_kept = self._is_due and len(requests) <= _MOST_REQUESTS and not view.prefill_tokens
            if is_kept and all(r.generated_tokens >= _YOUNG_TOKENS for r in requests):
                self._keyed = view, [self._said(request, len(requests)) for request in requests]
            else:
                self._keyed = view, []
        return self._keyed[1]

    def _said(self, request: RequestView, batch_size: int) -> _Key:
        hints, arms = request.hints, request.drafters
        said = [self._of_hint(hints, arm) for arm in arms if arm in hints]
        return (request.id, batch_size, arms, *said)

    def _of_hint(self, hints: Mapping[str, Hint], arm: str) -> _Key:
        """What of a hint a plan depends on, catch-up aside: a match goes before a confidence."""
        hint, most = hints[arm], self._most_draft_tokens
        limit = most if hint.max_draft_tokens is None else min(hint.max_draft_tokens, most)
        bucket = bucket_of_match(hint.match_tokens)
        return limit, bucket, hint.confidence if bucket is None else None
