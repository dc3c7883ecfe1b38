"""When to learn, where steps are so short that the controller's own time would weigh.

Learning who accepts what may wait: several steps at once take less than several times as long as
one, since what a forward pushed out of the caches is fetched once. So may learning what steps cost, which
changes slowly. Either is done in parts, and a step does one thing only: it is planned anew, or takes note of
what steps came to, or learns a part. Steps in which something else is done are set aside until then, unless something is
urgent. What many requests teach takes its time however many steps are learnt at once, and is never put off.
Knows nothing of what is learnt. A fold over observations, like all that decides:
how long the controller took is what they say, never measured again.
"""

from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Literal, NamedTuple

from sdcontrol.columns import ids_of
from sdcontrol.controller_share import ControllerShare
from sdcontrol.core import BatchView, Choice, Hint, Observation
from sdcontrol.kept_choices import MOST_REQUESTS, YOUNG_TOKENS, is_kept

__all__ = ["COSTS", "OUTCOMES", "Due", "Part", "Seen", "Waiting"]

Part = Literal["read outcomes", "learn outcomes", "judge costs", "learn forwards", "learn rounds"]
OUTCOMES: tuple[Part, ...] = ("read outcomes", "learn outcomes")
COSTS: tuple[Part, ...] = ("judge costs", "learn forwards", "learn rounds")

_NEW_STEPS = 8  # of a controller, each of which is news
_FIRST_STEPS = 32  # of a controller, in which little is put off
_EARLY_WAITING = 4  # observations that wait in those
_MOST_NEWS = 8  # observations that wait, the last one included
_MOST_WAITING = 16  # the same, with those that are no news
_MOST_ROWS = 32  # requests of all of them together
_MOST_STEPS_OF_MANY = 3  # the same as steps, where those have more requests
_MANY = 32  # requests, of more than which outcomes are learnt in every step
_MOST_ASIDE = 8  # steps that nobody took note of
_COST_STEPS = 8  # from one that costs are learnt from to the next
_SURE_COST_STEPS = 16  # the same, where the last was predicted well, or something is urgent in each
_SURPRISE, _SURE = 0.25, 0.1  # log-ratio of a step's measured to its predicted time
_MOST_YOUNG = 0.5  # of the requests, for observations to wait
_YOUNG_STEPS = 2  # of a request, each of which is news
_LONG_TOKENS = 4  # of a draft: nobody chooses it who expects all of it to be rejected
_MOST_KNOWN = 4096  # requests, of which it is kept that they came


class Seen(NamedTuple):
    """A step, and whether its plan tried something: then its costs are news."""

    observation: Observation
    is_try: bool


class Due(NamedTuple):
    """What a step has time for: steps to take note of, in order, then parts of what was noted to learn."""

    notes: Sequence[Seen]
    parts: Sequence[Part]


_NOTHING = Due((), ())


class Waiting:
    """How much waits to be learnt, and how far the controller's time weighs."""

    def __init__(self, most_draft_tokens: int) -> None:
        self._most_draft_tokens = most_draft_tokens
        self._share = ControllerShare()
        self._steps = 0  # noted: a loop's own count may begin again
        self._came: set[str] = set()  # requests observed
        self._present: tuple[str, ...] = ()  # those of the last step
        self._arrivals: deque[tuple[int, int]] = deque(maxlen=_YOUNG_STEPS)  # step, new requests
        self._aside: list[Seen] = []  # not noted
        self._begun: deque[Part] = deque()  # of what was noted, not done
        self._num_waiting, self._num_news = 0, 0  # observations; those that are news
        self._num_rows = 0  # requests of those that wait
        self._is_news = True  # the last one
        self._had_turn: tuple[Part, ...] = ()  # the last that was begun
        self._is_tried = False  # something, since costs were learnt
        self._cost_step = 0  # the last one that costs were learnt from

    @property
    def puts_off(self) -> bool:
        """Whether the controller's time weighs, once it has seen enough."""
        return self._share.weighs and self._steps >= _FIRST_STEPS

    @property
    def came(self) -> Set[str]:
        """Requests that were observed: the set itself, which grows."""
        return self._came

    def observe(self, seen: Seen, *, may_rest: bool, error: float) -> Due:
        """What there is time for in this step; nothing waits for long unless it `may_rest`.

        `error` is the log-ratio by which the step that costs were learnt from last was off. Outcomes and
        costs take turns.
        """
        self._aside.append(seen)
        if may_rest and error < _SURPRISE and self._rests(seen.observation):
            is_busy = not (self._begun and _has_time(seen.observation))
            return _NOTHING if is_busy else Due((), (self._begun.popleft(),))
        notes, self._aside = self._aside, []
        for one in notes:
            self._note(one)
        return Due(notes, self._parts(seen.observation, error, may_rest=may_rest))

    def finish(self) -> Due:
        """All that was set aside or begun: nothing follows soon. What is noted counts as learnt."""
        notes, self._aside = self._aside, []
        for one in notes:
            self._note(one)
        begun, self._begun = tuple(self._begun), deque()
        for parts in (OUTCOMES, COSTS):
            self._begin(parts)
        return Due(notes, begun)

    def _rests(self, observation: Observation) -> bool:
        """Whether the step is set aside: something else is done in it, and it is not urgent."""
        if not self.puts_off or observation.faults or len(self._aside) >= _MOST_ASIDE:
            return False
        if _has_many(observation):
            return False
        if ids_of(observation.view) != self._present or self._is_disappointed(observation):
            return False
        return bool(self._begun) or not _has_time(observation)

    def _note(self, seen: Seen) -> None:
        observation = seen.observation
        self._share.update(observation)
        self._steps += 1
        self._is_tried |= seen.is_try
        self._notice(observation.view)
        self._is_news = not (self.puts_off and self._is_expected(observation))
        self._num_waiting += 1
        self._num_news += self._is_news
        self._num_rows += len(observation.view.requests)

    def _parts(self, observation: Observation, error: float, *, may_rest: bool) -> Sequence[Part]:
        """What to do at once; the rest of what is begun waits for the next steps."""
        begun, is_urgent = self._begun, self._is_urgent(observation)
        if self.puts_off and not is_urgent:
            if _has_many(observation):
                return self._parts_of_many(error)
            if not begun:
                begun.extend(self._next(error))
            most = len(begun) if error >= _SURPRISE else 1 - may_rest
            return [begun.popleft() for _ in range(min(most, len(begun)))]
        outcomes, costs = self._patience(is_news=is_urgent or error >= _SURPRISE)
        takes = {OUTCOMES: self._num_waiting >= outcomes, COSTS: self._since_costs >= costs}
        for parts, is_due in takes.items():
            if is_due and parts[0] not in begun:  # else what is noted now is learnt with the rest
                begun.extend(self._begin(parts))
        due = [part for part in begun if takes[OUTCOMES if part in OUTCOMES else COSTS]]
        self._begun = deque([part for part in begun if part not in due])
        return due

    def _parts_of_many(self, error: float) -> Sequence[Part]:
        """Outcomes, those of earlier steps too, and one part of what steps cost where that is due; all of a surprise."""
        begun = [part for part in self._begun if part in OUTCOMES]
        costs = deque([part for part in self._begun if part in COSTS])
        due = begun if OUTCOMES[0] in begun else [*begun, *self._begin(OUTCOMES)]
        if not costs and self._takes_costs(error):
            costs.extend(self._begin(COSTS))
        now = min(len(costs), len(COSTS) if error >= _SURPRISE else 1)
        due += [costs.popleft() for _ in range(now)]
        self._begun = costs
        return due

    def _patience(self, *, is_news: bool) -> tuple[int, int]:
        """How many steps wait until outcomes are learnt, and costs: nothing is put off yet, or something is urgent."""
        if self.puts_off:
            return 1, _SURE_COST_STEPS
        if is_news or not self._share.weighs or self._steps <= _NEW_STEPS:
            return 1, 1
        return _EARLY_WAITING, _COST_STEPS

    def _next(self, error: float) -> tuple[Part, ...]:
        outcomes, costs = self._takes_outcomes(), self._takes_costs(error)
        if outcomes and not (costs and self._had_turn == OUTCOMES):
            return self._begin(OUTCOMES)
        return self._begin(COSTS) if costs else ()

    def _begin(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        self._had_turn = parts
        if parts is OUTCOMES:
            self._num_waiting = self._num_news = self._num_rows = 0
        else:
            self._is_tried, self._cost_step = False, self._steps
        return parts

    @property
    def _since_costs(self) -> int:
        """Steps noted since costs were learnt last."""
        return self._steps - self._cost_step

    def _takes_costs(self, error: float) -> bool:
        if error >= _SURPRISE or self._is_tried:
            return True
        most = _SURE_COST_STEPS if error < _SURE else _COST_STEPS
        return self._since_costs >= most

    def _takes_outcomes(self) -> bool:
        is_full = self._num_waiting >= _MOST_WAITING or self._num_news >= _MOST_NEWS
        most_rows = max(_MOST_ROWS, _MOST_STEPS_OF_MANY * len(self._present))
        return is_full or self._num_rows >= most_rows

    def _is_urgent(self, observation: Observation) -> bool:
        """Whether something was wrong, or most requests are so new that nothing, or something false, is known."""
        since = self._steps - _YOUNG_STEPS
        young = sum([num_new for step, num_new in self._arrivals if step > since])
        is_young = self._is_news and young > _MOST_YOUNG * len(self._present)
        return bool(observation.faults) or is_young or self._is_disappointed(observation)

    def _is_disappointed(self, observation: Observation) -> bool:
        """Whether what a few requests were given may not stand; where the controller's time is heavy, it does."""
        return not self._share.is_heavy and _disappoints(observation)

    def _is_expected(self, observation: Observation) -> bool:
        """Whether each of a few requests drafted all that it could and had all of it accepted."""
        requests, accepted = observation.view.requests, observation.accepted
        if accepted != observation.proposed or len(requests) > MOST_REQUESTS:
            return False
        rows = zip(requests, observation.plan.choices, accepted, strict=True)
        return not _is_scored(observation) and all(
            choice.num_draft_tokens == length and self._is_longest(choice, request.hints)
            for request, choice, length in rows
        )

    def _is_longest(self, choice: Choice, hints: Mapping[str, Hint]) -> bool:
        """Whether a draft that was looked up is as long as can be."""
        hint = hints.get(choice.drafter or "")
        if hint is None or hint.match_tokens is None:
            return False
        most = self._most_draft_tokens
        most = most if hint.max_draft_tokens is None else min(hint.max_draft_tokens, most)
        return choice.num_draft_tokens >= most

    def _notice(self, view: BatchView) -> None:
        """How many requests are there for the first time."""
        present = ids_of(view)
        if present == self._present:
            return
        if len(self._came) > _MOST_KNOWN + len(present):
            self._came.intersection_update(self._present)
        new = set(present) - self._came
        self._came.update(new)
        self._arrivals.append((self._steps, len(new)))
        self._present = present


def _has_time(observation: Observation) -> bool:
    """Whether a step has time for more than its plan: one of a few requests is as long as planning anew allows."""
    return is_kept(observation.plan) or len(observation.view.requests) > MOST_REQUESTS


def _has_many(observation: Observation) -> bool:
    return len(observation.view.requests) > _MANY


def _disappoints(observation: Observation) -> bool:
    """Whether a long draft of one of a few young requests was rejected from its first token on."""
    requests = observation.view.requests
    rows = zip(requests, observation.proposed, observation.accepted, strict=True)
    return len(requests) <= MOST_REQUESTS and any(
        proposed >= _LONG_TOKENS and not accepted and request.generated_tokens < YOUNG_TOKENS
        for request, proposed, accepted in rows
    )


def _is_scored(observation: Observation) -> bool:
    """Whether a drafter was scored in shadow."""
    return any(length is not None for row in observation.shadow.values() for length in row)
