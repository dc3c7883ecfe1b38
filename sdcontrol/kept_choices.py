"""What requests were given lately, where steps are so short that planning anew would weigh.

Where hints say of each of a few requests about what they said a few steps ago, each gets what it was
given then. A request that has just come gets what others got in their first step. Knows nothing of how a
plan is made, nor of when choices may be kept.
"""

from collections.abc import Sequence, Set
from itertools import product
from typing import NamedTuple

from sdcontrol.core import BatchView, Choice, Plan, RequestView
from sdcontrol.estimators.hints import bucket_of_match

__all__ = ["MOST_REQUESTS", "YOUNG_TOKENS", "KeptChoices", "is_kept"]

MOST_REQUESTS = 4  # of a batch whose plan may be put together from earlier ones
_STEPS = 32  # observed, that a choice may stand for
YOUNG_TOKENS = 16  # generated; before that a request's choice stands until something is learnt
_MOST_CHOICES = 256
_MOST_OFFERS = 64  # of a choice, before those are dropped that stand no longer
_ALIKE_TOKENS = 2  # between choices that are about the same
_KEPT = "as a few steps ago: "

_Key = tuple[object, ...]
_Counts = tuple[int, ...]  # by arm that hints speak of
_Offers = tuple[_Counts, _Counts]  # buckets of matches; most tokens
_Arms = tuple[str, ...]  # that hints speak of


class _Made(NamedTuple):
    """A choice, and why; how long it stands, even if something is learnt."""

    choice: Choice
    used: _Counts  # its tokens, by arm that hints speak of
    reason: str
    num_learnt: int  # times
    last_step: int
    num_sharing: int  # requests that shared its drafting rounds; 0 where drafts are looked up


class KeptChoices:
    """By request and what hints said, what it was given. `came` are those of whom something was observed."""

    def __init__(self, most_draft_tokens: int, came: Set[str]) -> None:
        self._most_draft_tokens = most_draft_tokens
        self._came = came
        self._made: dict[_Key, dict[_Offers, _Made]] = {}
        self._said_of: tuple[BatchView, list[tuple[_Key, _Offers, _Arms]]] | None = None
        self._num_learnt = 0
        self._num_steps = 0  # observed: an engine's own count may begin again

    def repeated(self, view: BatchView) -> Plan | None:
        """What was chosen when hints last said about what they say now; None: make a plan."""
        if not self._keeps(view):
            return None
        choices: list[Choice] = []
        given: list[_Made] = []
        drafters: list[str | None] = []
        left = view.free_kv_tokens
        for request, (key, offers, _) in zip(view.requests, self._said(view), strict=True):
            then = self._standing(key, offers)
            if then is None:
                return None
            choice = _shortened(then, request, offers[1])
            left -= choice.num_draft_tokens
            choices.append(choice)
            given.append(then)
            drafters.append(then.choice.drafter)
        for then in given:  # its rounds are shared by no fewer than then
            if drafters.count(then.choice.drafter) < then.num_sharing:
                return None
        return Plan(tuple(choices), _KEPT + given[0].reason) if left >= 0 else None

    def pass_step(self) -> None:
        """A step was observed."""
        self._num_steps += 1

    def keep(self, view: BatchView, plan: Plan) -> None:
        """Take note of a plan that was made anew, before its requests count as observed."""
        if not self._keeps(view):
            return
        if len(self._made) + len(view.requests) > _MOST_CHOICES:
            self.forget()
        drafters = [choice.drafter for choice in plan.choices]
        rows = zip(view.requests, plan.choices, self._said(view), strict=True)
        for request, choice, (key, offers, arms) in rows:
            is_young = key[0] is not None and request.generated_tokens < YOUNG_TOKENS
            last_step = self._num_steps + (0 if is_young else _STEPS)
            drafter, length = choice.drafter, choice.num_draft_tokens
            used, sharing = [0] * len(arms), drafters.count(drafter) if length else 0
            if drafter in arms:
                row = arms.index(drafter)
                used[row] = length
                if offers[0][row]:  # a match: drafts take no rounds of a model
                    sharing = 0
            made = _Made(choice, tuple(used), plan.reason, self._num_learnt, last_step, sharing)
            self._keep_one(self._made.setdefault(key, {}), offers, made)

    def _keep_one(self, given: dict[_Offers, _Made], offers: _Offers, made: _Made) -> None:
        if len(given) >= _MOST_OFFERS:  # of a request that decodes for hours
            for other in [other for other, then in given.items() if not self._stands(then)]:
                del given[other]
        given[offers] = made

    def forget(self) -> None:
        """Whatever was given stands no longer."""
        self._made.clear()

    def outdate(self) -> None:
        """Something was learnt of acceptance."""
        self._num_learnt += 1

    def _standing(self, key: _Key, offers: _Offers) -> _Made | None:
        """What a request was given that still stands: for the same offers, or about the same."""
        given = self._made.get(key)
        if given is None:
            return None
        then = given.get(offers)
        if then is not None and self._stands(then):
            return then
        buckets, most = offers
        shorter: list[_Made] = []
        longer: list[_Made] = []
        for (buckets_then, most_then), then in given.items():
            if not self._stands(then):
                continue
            if most_then != most and not _is_on_offer(then.used, most_then, most):
                continue
            was_shorter, was_longer = _compared(buckets_then, buckets)
            if was_shorter and (was_longer or _is_longest(then.used, buckets_then, most_then)):
                return then
            if was_shorter:
                shorter.append(then)
            elif was_longer:
                longer.append(then)
        between = product(shorter, longer)
        return next((then for then, other in between if _is_alike(then.choice, other.choice)), None)

    def _stands(self, made: _Made) -> bool:
        return self._num_steps <= made.last_step or made.num_learnt == self._num_learnt

    def _keeps(self, view: BatchView) -> bool:
        return 0 < len(view.requests) <= MOST_REQUESTS and not view.prefill_tokens

    def _said(self, view: BatchView) -> Sequence[tuple[_Key, _Offers, _Arms]]:
        """By request, what its choice depends on but for what changes slowly; read once."""
        known = self._said_of
        if known is None or known[0] is not view:
            batch_size = len(view.requests)
            said = [self._of(request, batch_size) for request in view.requests]
            known = self._said_of = view, said
        return known[1]

    def _of(self, request: RequestView, batch_size: int) -> tuple[_Key, _Offers, _Arms]:
        """Whom hints speak of, None for whoever is new; what they say, catch-up aside: a match goes before a
        confidence.
        """
        who = request.id if request.id in self._came else None
        key: list[object] = [who, batch_size, request.drafters]
        arms: list[str] = []
        buckets: list[int] = []
        limits: list[int] = []
        hints, longest = request.hints, self._most_draft_tokens
        for arm in request.drafters:
            hint = hints.get(arm)
            if hint is not None:
                bucket, most = bucket_of_match(hint.match_tokens), hint.max_draft_tokens
                key.append(hint.confidence if bucket is None else None)
                arms.append(arm)
                buckets.append(bucket or 0)
                limits.append(longest if most is None or most > longest else most)
        return tuple(key), (tuple(buckets), tuple(limits)), tuple(arms)


def is_kept(plan: Plan) -> bool:
    """Whether it was put together from earlier ones."""
    return plan.reason.startswith(_KEPT)


def _is_on_offer(used: _Counts, most_then: _Counts, most: _Counts) -> bool:
    """Whether what was chosen can be had now, and nothing more than then that might be better.

    Of an arm that is not used there may be less on offer; of the one that is, less or, where that was not
    what ended the draft, more.
    """
    for tokens, before, now in zip(used, most_then, most, strict=True):
        if (now > before and not 0 < tokens < before) or (tokens and not now):
            return False
    return True


def _compared(then: _Counts, now: _Counts) -> tuple[bool, bool]:
    """Whether no match was longer then than now, and whether none was shorter."""
    was_shorter = was_longer = True
    for before, after in zip(then, now, strict=True):
        if before > after:
            was_shorter = False
        elif before < after:
            was_longer = False
    return was_shorter, was_longer


def _is_alike(choice: Choice, other: Choice) -> bool:
    difference = choice.num_draft_tokens - other.num_draft_tokens
    return choice.drafter == other.drafter and abs(difference) <= _ALIKE_TOKENS


def _is_longest(used: _Counts, buckets: _Counts, most: _Counts) -> bool:
    """Whether all that could be drafted of a match was chosen."""
    rows = zip(used, buckets, most, strict=True)
    return any(tokens >= limit > 0 and bucket > 0 for tokens, bucket, limit in rows)


def _shortened(made: _Made, request: RequestView, most: _Counts) -> Choice:
    """As far as what remains, and what is on offer, allow."""
    choice, limit = made.choice, max(request.remaining_tokens - 1, 0)
    for tokens, on_offer in zip(made.used, most, strict=True):
        if tokens > on_offer:
            limit = min(limit, on_offer)
    if choice.drafter is None or choice.num_draft_tokens <= limit:
        return choice
    return Choice.of(choice.drafter, limit)
