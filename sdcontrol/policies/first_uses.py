"""How many may begin to catch up at once, while it was hardly measured what that takes.

What a drafter's catch-up takes is assumed until it is measured, and may take several times as much. A batch
that believed it would pay for all of its prompts in one step. So where that is believed to take longer than
three plain steps, the first steps let one request begin, and then as many tokens be caught up with as were before:
what is wrong is known after few, and the others wait for a step or two.
Knows what catch-ups are believed to take; nothing of how plans are made. A fold over observations.
"""

from collections import Counter
from collections.abc import Iterator

from sdcontrol.columns import said_of
from sdcontrol.core import BatchView, Choice, Cost, Observation, Plan, family_of

__all__ = ["FirstUses", "waits"]

_KNOWN = 4  # steps with catch-ups after which anybody may begin: the first are trusted little
_AT_ONCE = 3.0  # plain steps' time that may be paid for what nobody measured
_NEVER = 64  # steps of drafting without any, after which none is looked for
_WAIT = " wait until it is known what catching up takes"

_Begin = tuple[int, str, int]  # request, family, tokens to catch up with


class FirstUses:
    """Tokens of first catch-ups, by family, until what those take is known."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()  # with such catch-ups
        self._others: Counter[str] = Counter()  # steps of drafting without
        self._known: set[str] = set()

    def update(self, observation: Observation) -> None:
        """Take note of who caught up."""
        used = _families(observation.plan) - self._known
        if not used:  # as most steps
            return
        caught_up: Counter[str] = Counter()
        if said_of(observation.view).lags:
            for _, family, lag in self._begin(observation.view, observation.plan):
                caught_up[family] += lag
        self._tokens.update(caught_up)
        self._steps.update(caught_up.keys())
        self._others.update(used - caught_up.keys())
        self._known |= {
            family
            for family in used
            if self._steps[family] >= _KNOWN or self._others[family] >= _NEVER
        }

    def limited(self, view: BatchView, plan: Plan, cost: Cost) -> Plan:
        """`plan` with few enough who begin: those with most tokens to go."""
        if not said_of(view).lags or self._known.issuperset(_families(plan)):
            return plan
        begin = list(self._begin(view, plan))
        if len(begin) < 2 or _seconds(begin, cost) <= _AT_ONCE * _plain(view, cost):
            return plan
        begin.sort(key=lambda found: -view.requests[found[0]].remaining_tokens)
        choices, spent, waiting = list(plan.choices), Counter[str](), 0
        for r, family, lag in begin:
            if spent[family] and spent[family] + lag > self._tokens[family]:
                choices[r], waiting = Choice.off(), waiting + 1
            spent[family] += lag
        if not waiting:
            return plan
        return Plan(tuple(choices), f"{plan.reason}; {waiting}{_WAIT}")

    def _begin(self, view: BatchView, plan: Plan) -> Iterator[_Begin]:
        """Who lags by most of the context, of a family whose catch-ups are not known."""
        for r, (request, choice) in enumerate(zip(view.requests, plan.choices, strict=True)):
            arm = choice.drafter or ""
            hint = request.hints.get(arm)
            if hint is None or 2 * hint.catch_up_tokens < max(request.context_tokens, 1):
                continue
            if (family := family_of(arm)) not in self._known:
                yield r, family, hint.catch_up_tokens


def _families(plan: Plan) -> set[str]:
    """That it drafts with."""
    arms = dict.fromkeys([choice.drafter for choice in plan.choices])
    return {family_of(arm) for arm in arms if arm is not None}


def _seconds(begin: list[_Begin], cost: Cost) -> float:
    """That catch-ups are believed to take; nothing where nothing is believed."""
    price = getattr(cost, "catch_up_seconds", None)
    if price is None:
        return 0.0
    return float(sum(price(family, lag) for _, family, lag in begin))


def _plain(view: BatchView, cost: Cost) -> float:
    """Seconds of the step without drafts."""
    batch = len(view.requests)
    kv_tokens = sum(request.context_tokens for request in view.requests)
    return float(cost.verify_seconds(float(batch), float(kv_tokens), batch))


def waits(plan: Plan) -> bool:
    """Whether somebody waits in it, who may begin in the next step."""
    return _WAIT in plan.reason
