"""What observations teach a controller's estimators, and what requests may be given again meanwhile.

Knows nothing of when a part is due (`waiting` does), nor of how anything is learnt. Our own estimators
are taught part by part, outcomes of several steps at once; any other by its `update`, in the first part.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sdcontrol.core import BatchView, Confidence, Cost, FloatArray, Observation, Plan
from sdcontrol.estimators.acceptance import AcceptanceEstimator, Lesson
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.estimators.merging import typical
from sdcontrol.kept_choices import KeptChoices, is_kept
from sdcontrol.waiting import Due, Part, Seen, Waiting

__all__ = ["Acceptance", "Lessons"]


class Acceptance(Protocol):
    """What a controller asks of an acceptance estimator; `AcceptanceEstimator` has it."""

    def survival(self, view: BatchView, max_tokens: int) -> Mapping[str, FloatArray]:
        """By arm, `[requests, max_tokens]`: P(draft node j is accepted)."""
        ...

    def condition(
        self,
        view: BatchView,
        plan: Plan,
        confidence: Confidence,
        survival: Mapping[str, FloatArray],
    ) -> Mapping[str, FloatArray]:
        """`survival` given the drafter's confidence in the tokens drafted so far."""
        ...

    def update(self, observation: Observation) -> None:
        """Learn what came of a step."""
        ...


class Lessons:
    """Steps that wait to be learnt from: all of them, but by a `cost` of one's own a typical one.

    `may_rest`: plans may stand for other steps, and steps be noted later, where the controller's own time
    would weigh.
    """

    def __init__(
        self,
        acceptance: Acceptance,
        cost: Cost,
        most_draft_tokens: int,
        *,
        may_rest: bool,
    ) -> None:
        self._acceptance, self._cost, self._may_rest = acceptance, cost, may_rest
        # A variant of ours is taught by its own methods.
        self._ours = acceptance if type(acceptance) is AcceptanceEstimator else None
        self._our_cost = cost if type(cost) is OnlineCost else None
        self._update_cost: Callable[[Observation], None] | None = getattr(cost, "update", None)
        self._waiting = Waiting(most_draft_tokens)
        self._choices = KeptChoices(most_draft_tokens, self._waiting.came)
        self._unread: list[Observation] = []
        self._untimed: deque[Observation] = deque(maxlen=16)
        self._tried: Observation | None = None  # the last in which something was tried, untimed
        self._lesson: Lesson | None = None  # that was read, and not learnt
        self._parts: dict[Part, Callable[[], None]] = {
            "read outcomes": self._read_outcomes,
            "learn outcomes": self._learn_outcomes,
            "judge costs": self._judge_costs,
            "learn forwards": self._learn_forwards,
            "learn rounds": self._learn_rounds,
        }

    def repeated(self, view: BatchView) -> Plan | None:
        """A plan of what requests were given before; None: make one."""
        may_repeat = self._may_rest and self._waiting.puts_off
        return self._choices.repeated(view) if may_repeat else None

    def observe(self, observation: Observation, *, may_repeat: bool) -> Sequence[Observation]:
        """Learn as much as there is time for, and keep the plan where it `may_repeat`.

        The steps, in order, that were taken note of now: this one, or later.
        """
        if may_repeat and self._waiting.puts_off and not is_kept(observation.plan):
            self._choices.keep(observation.view, observation.plan)
        self._choices.pass_step()
        if observation.faults:
            self._choices.forget()
        seen = Seen(observation, is_try=self._may_rest and not may_repeat)
        due = self._waiting.observe(seen, may_rest=self._may_rest, error=self._cost_error)
        self.take(due)
        return [one.observation for one in due.notes]

    def finish(self) -> Sequence[Observation]:
        """Learn all that waits, and let no choice stand; the steps that were taken note of now."""
        self._choices.forget()
        due = self._waiting.finish()
        self.take(due)
        if self._unread:
            self._read_outcomes()
            self._learn_outcomes()
        if self._untimed:
            self._judge_costs()
            self._learn_forwards()
            self._learn_rounds()
        return [one.observation for one in due.notes]

    @property
    def _cost_error(self) -> float:
        """Log-ratio by which the last prediction of a step's time was off; 0 before there is one."""
        last = getattr(self._cost, "last_prediction", None)
        return abs(last.log_error) if last is not None else 0.0

    def take(self, due: Due) -> None:
        """Keep steps, then learn parts of all that were kept, in order; costs of a try before others."""
        for observation, is_try in due.notes:
            self._tried = observation if is_try else self._tried
            self._unread.append(observation)
            self._untimed.append(observation)
        for part in due.parts:
            self._parts[part]()

    def _read_outcomes(self) -> None:
        unread, self._unread = self._unread, []
        if self._ours is not None:
            self._lesson = self._ours.read(unread)
            return
        for one in unread:
            self._acceptance.update(one)

    def _learn_outcomes(self) -> None:
        if self._ours is not None and self._lesson is not None:
            self._ours.learn(self._lesson)
            self._lesson = None
        self._choices.outdate()

    def _judge_costs(self) -> None:
        one, self._tried = self._tried or typical(self._untimed), None
        steps = tuple(self._untimed)
        self._untimed.clear()
        if self._our_cost is not None:
            self._our_cost.judge(steps, one)
        elif self._update_cost is not None:
            self._update_cost(one)

    def _learn_forwards(self) -> None:
        if self._our_cost is not None:
            self._our_cost.learn_forwards()

    def _learn_rounds(self) -> None:
        if self._our_cost is not None:
            self._our_cost.learn_rounds()
