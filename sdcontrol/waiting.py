"""What a controller may put off where steps are so short that its own time would weigh.

Three things. Learning who accepts what: several steps at once take less than several times as long as
one, since what a forward pushed out of the caches is fetched once. Learning what steps cost, which
changes slowly. Either is done by halves, in two steps, and not both in one unless something is urgent:
that would take too long. And planning: where hints say of each of a few requests what they said a few steps ago, each gets
what it was given then, and a longer match than one that was given all that it could, as much.
Knows nothing of what is learnt or how a plan is made. A fold over observations, like all that decides:
how long the controller took is what they say, never measured again.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from sdcontrol.controller_share import ControllerShare
from sdcontrol.core import BatchView, Choice, Hint, Observation, Plan, RequestView
from sdcontrol.estimators.hints import bucket_of_match

__all__ = ["COSTS", "OUTCOMES", "Part", "Waiting"]

Part = Literal["read outcomes", "learn outcomes", "judge costs", "learn costs"]
OUTCOMES: tuple[Part, ...] = ("read outcomes", "learn outcomes")
COSTS: tuple[Part, ...] = ("judge costs", "learn costs")

_FIRST_STEPS = 32  # of a controller, each of which is news
_MOST_NEWS = 8  # observations that wait, the last one included
_MOST_WAITING = 16  # the same, with those that are no news
_MOST_ROWS = 48  # requests of all of them together
_PATIENCE = 4  # steps more that learning waits for one whose plan is of earlier ones
_COST_STEPS = 8  # from one that costs are learnt from to the next
_SURE_COST_STEPS = 16  # the same, where the last was predicted well and did as much work
_SURPRISE, _SURE = 0.25, 0.1  # log-ratio of a step's measured to its predicted time
_MOST_YOUNG = 0.5  # of the requests, for observations to wait
_YOUNG_STEPS = 2  # of a request, each of which is news
_YOUNG_TOKENS = 4  # generated; before that a request's choice stands until something is learnt
_MOST_KNOWN = 4096  # requests, of which it is kept that they came
_MOST_REQUESTS = 4  # of a batch whose plan may be put together from earlier ones
_PLAN_STEPS = 32  # that a choice may stand for
_MOST_CHOICES = 256
_KEPT = "as a few steps ago; "

_Key = tuple[object, ...]
_Matches = tuple[int, ...]  # buckets, by arm


class _Made(NamedTuple):
    """A choice, and why; how long it stands, even if something is learnt; for which matches."""

    choice: Choice
    reason: str
    num_learnt: int  # times
    last_step: int
    is_longest: bool  # as many tokens as could be drafted: as many for longer matches, too
    num_sharing: int  # requests that shared its drafting rounds; 0 where drafts are looked up


class Waiting:
    """How much waits to be learnt, how far the controller's time weighs, what requests were given lately."""

    def __init__(self, most_draft_tokens: int) -> None:
        self._most_draft_tokens = most_draft_tokens
        self._share = ControllerShare()
        self._steps = 0
        self._came: set[str] = set()  # requests observed
        self._present: tuple[str, ...] = ()  # those of the last step
        self._arrivals: deque[tuple[int, int]] = deque(maxlen=_YOUNG_STEPS)  # step, new requests
        self._made: dict[_Key, dict[_Matches, _Made]] = {}
        self._keyed: tuple[BatchView, list[tuple[_Key, _Matches]]] | None = None  # see `_said`
        self._num_learnt = 0
        self._settles = False  # what was learnt last makes choices stale from the next step on
        self._half: tuple[Part, ...] = ()  # what is still to be done of what was begun
        self._num_held = 0  # steps for which that has been put off
        self._num_waiting, self._num_news = 0, 0  # observations; those that are news
        self._num_rows = 0  # requests of those that wait
        self._is_news = True  # the last one
        self._begun: tuple[Part, ...] = ()  # the last that was
        self._puts_off = False
        self._is_tried = False  # something, since costs were learnt
        self._cost_step = 0  # the last one that costs were learnt from
        self._cost_work: Sequence[int] = ()  # by request, the tokens that were verified in it

    def observe(
        self, observation: Observation, *, may_repeat: bool, is_try: bool, error: float
    ) -> tuple[Part, ...]:
        """Take note of a step, and of its plan where that may stand for others.

        Costs of one in which something was tried are news.
        What to learn now, in order: all that waits, this step included. `error` is the log-ratio by
        which the step that costs were learnt from last was off. Where learning may wait, outcomes and
        costs take turns, and each takes two steps unless it is urgent.
        """
        self._share.update(observation)
        self._steps += 1
        self._is_tried |= is_try
        self._puts_off = self._share.weighs and self._steps >= _FIRST_STEPS
        self._notice(observation.view)
        self._is_news = not (self._puts_off and self._is_expected(observation))
        self._num_waiting += 1
        self._num_news += self._is_news
        self._num_rows += len(observation.view.requests)
        self._num_learnt += self._settles
        is_new = may_repeat and not _is_kept(observation.plan)
        if observation.faults or len(self._made) > _MOST_CHOICES:
            self._made.clear()
        elif is_new:
            self._keep(observation.view, observation.plan)
        patience = _PATIENCE if is_new and len(self._present) <= _MOST_REQUESTS else 0
        parts = self._parts(observation, error, patience)
        self._settles = parts == OUTCOMES[1:]
        self._num_learnt += OUTCOMES[-1] in parts and not self._settles
        return parts

    def _parts(self, observation: Observation, error: float, patience: int) -> tuple[Part, ...]:
        half, self._half = self._half, ()
        if not self._puts_off:
            return (*half, *self._begin(observation, OUTCOMES), *self._begin(observation, COSTS))
        is_urgent = self._is_urgent(observation)
        if half and not is_urgent:
            self._num_held += 1
            if self._num_held <= patience:
                self._half, half = half, ()
            return half
        self._num_held = 0
        outcomes = is_urgent or self._takes_outcomes(patience)
        costs = self._takes_costs(observation, error, patience)
        if not (outcomes or costs):
            return ()
        has_turn = outcomes and not (costs and self._begun is OUTCOMES)
        parts = self._begin(observation, OUTCOMES if has_turn else COSTS)
        if is_urgent if has_turn else error >= _SURPRISE:
            return (*half, *parts)
        self._half = parts[1:]
        return (*half, *parts[:1])

    def _begin(self, observation: Observation, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        self._begun = parts
        if parts is OUTCOMES:
            self._num_waiting = self._num_news = self._num_rows = 0
        else:
            self._is_tried = False
            self._cost_step, self._cost_work = observation.view.step, observation.proposed
        return parts

    def _takes_costs(self, observation: Observation, error: float, patience: int) -> bool:
        if error >= _SURPRISE or self._is_tried:
            return True
        is_sure = error < _SURE and observation.proposed == self._cost_work
        most = _SURE_COST_STEPS if is_sure else _COST_STEPS
        return not 0 <= observation.view.step - self._cost_step < most + patience

    def _takes_outcomes(self, patience: int) -> bool:
        is_full = self._num_waiting >= _MOST_WAITING + patience
        is_full = is_full or self._num_news >= _MOST_NEWS + patience
        return is_full or self._num_rows >= _MOST_ROWS

    def _is_urgent(self, observation: Observation) -> bool:
        """Whether something was wrong, or most requests are so new that nothing is known of them."""
        since = observation.view.step - _YOUNG_STEPS
        young = sum([num_new for step, num_new in self._arrivals if step > since])
        is_young = self._is_news and young > _MOST_YOUNG * len(self._present)
        return bool(observation.faults) or is_young

    def _is_expected(self, observation: Observation) -> bool:
        """Whether each of a few requests drafted all that it could and had all of it accepted."""
        requests, accepted = observation.view.requests, observation.accepted
        if accepted != observation.proposed or len(requests) > _MOST_REQUESTS:
            return False
        rows = zip(requests, observation.plan.choices, accepted, strict=True)
        return not _is_scored(observation) and all(
            choice.num_draft_tokens == length and self._is_longest(choice, request.hints)
            for request, choice, length in rows
        )

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
        choices: list[Choice] = []
        given: list[_Made] = []
        for request, (key, matches) in zip(view.requests, self._said(view), strict=False):
            then = self._standing(key, matches, view.step)
            if then is None:
                return None
            choice, most = then.choice, max(request.remaining_tokens - 1, 0)
            if choice.drafter is not None and choice.num_draft_tokens > most:
                choice = Choice.of(choice.drafter, most)
            choices.append(choice)
            given.append(then)
        left = view.free_kv_tokens - sum([choice.num_draft_tokens for choice in choices])
        if not choices or left < 0 or not _is_shared_as_then(given):
            return None
        return Plan(tuple(choices), _KEPT + given[0].reason)

    def _standing(self, key: _Key, matches: _Matches, step: int) -> _Made | None:
        """What a request was given that still stands, the same matches first."""
        given = self._made.get(key)
        if given is None:
            return None
        then = given.get(matches)
        if then is not None and self._stands(then, step):
            return then
        for shorter, then in given.items():
            is_longer = all(a <= b for a, b in zip(shorter, matches, strict=True))
            if is_longer and then.is_longest and self._stands(then, step):
                return then
        return None

    def _stands(self, made: _Made, step: int) -> bool:
        return step <= made.last_step or made.num_learnt == self._num_learnt

    def _keep(self, view: BatchView, plan: Plan) -> None:
        drafters = [choice.drafter for choice in plan.choices]
        for request, choice, (key, matches) in zip(
            view.requests, plan.choices, self._said(view), strict=False
        ):
            is_young = request.generated_tokens < _YOUNG_TOKENS
            last_step = view.step if is_young else view.step + _PLAN_STEPS
            is_longest = self._is_longest(choice, request.hints)
            sharing = 0 if _is_looked_up(choice, request.hints) else drafters.count(choice.drafter)
            made = _Made(choice, plan.reason, self._num_learnt, last_step, is_longest, sharing)
            self._made.setdefault(key, {})[matches] = made

    def _is_longest(self, choice: Choice, hints: Mapping[str, Hint]) -> bool:
        if choice.drafter is None or not _is_looked_up(choice, hints):
            return False
        return choice.num_draft_tokens >= self._limit(hints[choice.drafter])

    def _limit(self, hint: Hint) -> int:
        most = self._most_draft_tokens
        return most if hint.max_draft_tokens is None else min(hint.max_draft_tokens, most)

    def _said(self, view: BatchView) -> list[tuple[_Key, _Matches]]:
        """By request, what its choice depends on but for what changes slowly; empty where none is kept."""
        if self._keyed is None or self._keyed[0] is not view:
            requests = view.requests
            is_kept = self._puts_off and len(requests) <= _MOST_REQUESTS and not view.prefill_tokens
            said = [self._of(request, len(requests)) for request in requests] if is_kept else []
            self._keyed = view, said
        return self._keyed[1]

    def _of(self, request: RequestView, batch_size: int) -> tuple[_Key, _Matches]:
        """What hints say, catch-up aside: a match goes before a confidence."""
        said: list[object] = [request.id, batch_size, request.drafters]
        matches = []
        for arm in request.drafters:
            hint = request.hints.get(arm)
            if hint is None:
                continue
            bucket = bucket_of_match(hint.match_tokens)
            said += (self._limit(hint), hint.confidence if bucket is None else None)
            matches.append(bucket or 0)
        return tuple(said), tuple(matches)


def _is_kept(plan: Plan) -> bool:
    """Whether it was put together from earlier ones."""
    return plan.reason.startswith(_KEPT)


def _is_looked_up(choice: Choice, hints: Mapping[str, Hint]) -> bool:
    """Whether drafts take no rounds of a model: a match, or none at all."""
    hint = hints.get(choice.drafter or "")
    return choice.drafter is None or (hint is not None and hint.match_tokens is not None)


def _is_shared_as_then(given: Sequence[_Made]) -> bool:
    """Whether no fewer requests share each drafter's rounds than when that was chosen."""
    drafters = [one.choice.drafter for one in given]
    return all(drafters.count(one.choice.drafter) >= one.num_sharing for one in given)


def _is_scored(observation: Observation) -> bool:
    """Whether a drafter was scored in shadow."""
    return any(length is not None for row in observation.shadow.values() for length in row)
