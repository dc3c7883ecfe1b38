"""What a controller may put off where steps are so short that its own time would weigh.

Two things. Learning: from four steps at once it takes less than four times as long as from one,
since what a forward pushed out of the caches is fetched once, and costs are learnt from the last
alone. And planning: a lone request whose hints say what they said before gets the plan that it had.
Knows nothing of what is learnt or how a plan is made. A fold over observations, like all that
decides: how long the controller took is what they say, never measured again.
"""

from collections.abc import Mapping

from sdcontrol.core import BatchView, Hint, Observation, Plan, RequestView
from sdcontrol.estimators.hints import bucket_of_match

__all__ = ["Waiting"]

_MOST_WAITING = 4  # observations, the last one included
_MOST_REPEATS = 3  # of a plan, before it is made anew
_SHARE = 0.02  # of a step, that the controller may take without anything being put off
_RATE = 0.1
_YOUNG_TOKENS = 64  # generated; before that every step is news
_NO_HINT = Hint()


class Waiting:
    """The controller's share of the time, running, and the last step."""

    def __init__(self, most_draft_tokens: int) -> None:
        self._most_draft_tokens = most_draft_tokens
        self._share = 0.0
        self._last: tuple[BatchView, Plan] | None = None
        self._repeats = 0

    def observe(self, observation: Observation) -> None:
        """Take note of a step."""
        timing = observation.timing
        share = timing.controller_seconds / max(timing.total_seconds, 1e-9)
        if 0.0 <= share <= 1.0:  # False for NaN
            self._share += _RATE * (share - self._share)
        is_repeated = self._last is not None and self._last[1].reason == observation.plan.reason
        self._repeats = self._repeats + 1 if is_repeated else 0
        self._last = None if observation.faults else (observation.view, observation.plan)

    def may_wait(self, observation: Observation, num_waiting: int) -> bool:
        """Whether `num_waiting` observations, of which this is the last, may wait for the next."""
        if self._share <= _SHARE or num_waiting >= _MOST_WAITING or observation.faults:
            return False
        return all(map(_is_known, observation.view.requests))

    def repeated(self, view: BatchView) -> Plan | None:
        """The last plan, where a new one would hardly differ; at most 3 times in a row."""
        if self._share <= _SHARE or self._last is None or self._repeats >= _MOST_REPEATS:
            return None
        before, plan = self._last
        if len(view.requests) != 1 or len(before.requests) != 1:
            return None
        if view.prefill_tokens or before.prefill_tokens:
            return None
        request, was, length = (
            view.requests[0],
            before.requests[0],
            plan.choices[0].num_draft_tokens,
        )
        is_possible = length < request.remaining_tokens and length <= view.free_kv_tokens
        if is_possible and _is_known(request) and self._is_alike(request, was):
            return plan
        return None

    def _is_alike(self, request: RequestView, was: RequestView) -> bool:
        if request.id != was.id or request.drafters != was.drafters:
            return False
        return all(
            self._says(request.hints, arm) == self._says(was.hints, arm) for arm in request.drafters
        )

    def _says(self, hints: Mapping[str, Hint], arm: str) -> tuple[object, ...]:
        """What of a hint a plan depends on, catch-up aside."""
        hint, most = hints.get(arm, _NO_HINT), self._most_draft_tokens
        limit = most if hint.max_draft_tokens is None else min(hint.max_draft_tokens, most)
        return limit, bucket_of_match(hint.match_tokens), hint.confidence


def _is_known(request: RequestView) -> bool:
    return request.generated_tokens >= _YOUNG_TOKENS
