"""Who would accept what: survival of draft tokens, per request, drafter arm and position.

Knows nothing of costs, plans or models: hints and outcomes in, probabilities out.

The model, for request `r`, arm `a`, position `j` and bucket `b` of what the hint says:

    hazard = P(draft token j is accepted | the ones before it are)
    logit hazard = logit(arm average[a, b, j]) + deviation[r, a]

The arm average is a ratio of counts in which only observed outcomes count: a draft accepted in full
says nothing of the next position. A request counts ever less as it gives more, the sooner the further
the arm's requests lie apart, and as it deviates more, so that one odd request cannot drag the average
along. The deviation has a probability at each of some levels (`levels`), by Bayes' rule; its companions
tell of it too, where they seem to be of one kind. Own counts per position correct what remains. Arms
seen to draft trees are counted by node: P(node accepted). All of that is of drafts that come; how often one that is asked
for does is a factor of its own (`coming`).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import ACCEPTED as ACCEPTED_TOKENS
from sdcontrol.columns import (
    ARM,
    NOBODY,
    PROPOSED,
    Outcomes,
    Said,
    ids_of,
    read_steps,
    said_of,
)
from sdcontrol.core import BatchView, Confidence, FloatArray, Observation, Plan
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.averages import ArmAverages
from sdcontrol.estimators.confidence import ConfidenceCalibration, condition, flattened
from sdcontrol.estimators.deviations import Deviations
from sdcontrol.estimators.evidence import NO_NODES, node_table
from sdcontrol.estimators.learning import absorb
from sdcontrol.estimators.merging import accepted_nodes, confidences
from sdcontrol.estimators.survival import Survival
from sdcontrol.outcomes import DEPTH

__all__ = ["AcceptanceEstimator", "Lesson", "Survival"]

IntArray = NDArray[np.int64]

_NO_CONFIDENCE = flattened(())
_LEAST_TRUST = 0.05  # in confidences, from which they are heeded


class Lesson(NamedTuple):
    """Steps, and what was read of them, to be learnt from."""

    observations: Sequence[Observation]
    said: Said
    outcomes: Outcomes


class AcceptanceEstimator:
    """Online acceptance of every (request, arm, position).

    `prior` maps an arm to the acceptance rate per token assumed before anything was observed.
    Positions beyond `max_draft_tokens` are not tracked.
    """

    def __init__(
        self, max_draft_tokens: int = DEPTH, prior: Mapping[str, float] | None = None
    ) -> None:
        if not (hasattr(max_draft_tokens, "__index__") and max_draft_tokens >= 1):
            raise ConfigError(
                f"max_draft_tokens is {max_draft_tokens!r}; give a whole number, at least 1"
            )
        self.max_draft_tokens = max_draft_tokens
        self._averages = ArmAverages(max_draft_tokens, prior or {})
        num_arms = self._averages.num_arms
        self._requests = Deviations(max_draft_tokens, num_arms)
        self._calibration = ConfidenceCalibration(num_arms)
        self._is_tree: NDArray[np.bool_] = np.zeros(num_arms, np.bool_)
        self._trees: set[str] = set()  # the same by name
        self._heeded: set[str | None] = set()  # arms whose confidences say anything
        self._seated: tuple[tuple[str, ...], IntArray] | None = None  # see `_slots`
        self._believed: dict[tuple[str, ...], IntArray] = {}  # see `_index`
        self._columns: dict[tuple[str, ...], IntArray] = {}  # see `_column_of`

    # what is believed

    def survival(self, view: BatchView, max_tokens: int | None = None) -> Survival:
        """By arm, `[requests, K]`: P(draft node j is accepted); 0 where it may not be used."""
        return self.believed(view, max_tokens).now()

    def believed(self, view: BatchView, max_tokens: int | None = None) -> Survival:
        """`survival`, computed when first asked for: to be asked before the next `update`."""
        arms, requests = said_of(view).arms, self._requests
        averages = self._averages.odds, self._is_tree, self._averages.coming
        kept = requests.seated(self._slots(view)), requests.population
        depth = min(max_tokens or self.max_draft_tokens, self.max_draft_tokens)
        return Survival(view, arms, (self._index(arms), averages, kept, depth))

    def _index(self, arms: tuple[str, ...]) -> IntArray:
        """Where each arm's average is, `[arms]`."""
        index = self._believed.get(arms)
        if index is None:
            index = np.array([self._averages.index(arm) for arm in arms], np.int64)
            self._believed[arms] = index
        return index

    def uncertainty(self, view: BatchView, arm: str) -> FloatArray:
        """Standard deviation of each request's log-odds of acceptance by `arm`, `[requests]`."""
        index = self._averages.index(arm)
        tokens = 1.0 + float(self._averages.tested[index].sum())
        spread: FloatArray = np.sqrt(self._requests.variance(view, index) + 4.0 / tokens)
        return spread

    def condition(
        self,
        view: BatchView,
        plan: Plan,
        confidence: Confidence,
        survival: Mapping[str, FloatArray],
    ) -> Mapping[str, FloatArray]:
        """`survival` given the drafter's confidence in the tokens drafted so far.

        Drafted tokens take their calibrated confidence, later ones keep their hazards. A confidence
        that is not a finite number says nothing. Trees keep their survival. What was computed when
        asked for still is: to be asked before the next `update`.
        """
        drafters = [choice.drafter for choice in plan.choices]
        known = flattened(confidence)
        calibration = self._calibration.curve, self._calibration.trust
        if isinstance(survival, Survival):
            rows = {arm: row for row, arm in enumerate(survival.arms)}
            used = np.array([rows.get(drafter or "", NOBODY) for drafter in drafters], np.int64)
            return survival.given((used, known, calibration))
        conditioned = dict(survival)
        for arm in {drafter for drafter in drafters if drafter is not None}.intersection(survival):
            used = np.array([0 if drafter == arm else NOBODY for drafter in drafters], np.int64)
            table = np.array([survival[arm]], np.float64)
            given = used, known, calibration
            condition(table, given, self._index((arm,)), self._is_tree, np.ones(table.shape[:2]))
            conditioned[arm] = table[0]
        return conditioned

    def heeds(self, plan: Plan) -> bool:
        """Whether confidences say anything of what `plan` drafts."""
        heeded = self._heeded
        return bool(heeded) and any(choice.drafter in heeded for choice in plan.choices)

    # what is learnt

    def update(self, observation: Observation) -> None:
        """Learn from one step. Raises `ObservationError` for columns of unequal length."""
        observation.check()
        self.update_all((observation,))

    def update_all(self, observations: Sequence[Observation]) -> None:
        """Learn from several steps at once, each of which was checked."""
        lesson = self.read(observations)
        if lesson is not None:
            self.learn(lesson)

    def read(self, observations: Sequence[Observation]) -> Lesson | None:
        """Several steps, each of which was checked; None where they teach nothing."""
        said, outcomes = read_steps(observations)
        return Lesson(observations, said, outcomes) if outcomes.table.shape[1] else None

    def learn(self, lesson: Lesson) -> None:
        """Learn what `read` read last."""
        observations, said, outcomes = lesson
        averages, requests = self._averages, self._requests
        used = self._know(outcomes)
        nodes = self._nodes(observations, used)
        confidence = self._calibrated(observations, used, outcomes)
        ids = [*chain.from_iterable([ids_of(one.view) for one in observations])]
        self._seated = None
        slots = requests.admit(ids, observations[-1].view.step)
        absorb(
            (outcomes.table, _indices(outcomes.shadows), self._index(outcomes.arms)),
            (self._is_tree, nodes, *confidence, self._calibration.curve, self._calibration.trust),
            (said.values, *said.is_allowed.shape, self._column_of(said.arms)),
            (requests.seated(slots), requests.population),
            (averages.tables, averages.coming),
        )

    def _nodes(self, observations: Sequence[Observation], used: set[str]) -> NDArray[np.bool_]:
        """The nodes that were accepted, where some drafts were trees."""
        if all(one.accepted_nodes is None for one in observations):
            return NO_NODES
        if not used <= self._trees:
            self._notice_trees(observations)
        if used.isdisjoint(self._trees):
            return NO_NODES
        return node_table(accepted_nodes(observations), self.max_draft_tokens)

    def _calibrated(
        self, observations: Sequence[Observation], used: set[str], outcomes: Outcomes
    ) -> tuple[FloatArray, IntArray]:
        """Confidences, flattened, once it was learnt what they are worth."""
        said = None if used <= self._trees else confidences(observations)
        if said is None:
            return _NO_CONFIDENCE
        drafters, confidence = outcomes.table[ARM], flattened(said)
        arms = np.where(drafters < 0, NOBODY, self._index(outcomes.arms)[drafters])
        submitted = arms, outcomes.table[PROPOSED], outcomes.table[ACCEPTED_TOKENS]
        self._calibration.update(submitted, confidence, self._is_tree)
        trust = self._calibration.trust.tolist()
        index_of = self._averages.index_of.items()
        self._heeded = {arm for arm, index in index_of if trust[index] > _LEAST_TRUST}
        return confidence

    def _slots(self, view: BatchView) -> IntArray:
        """The slot of each request, 0 for a new one; looked up again when others decode, or are known."""
        ids = ids_of(view)
        if self._seated is None or self._seated[0] != ids:
            self._seated = ids, self._requests.slots(view)
        return self._seated[1]

    def _column_of(self, arms: tuple[str, ...]) -> IntArray:
        """Which of the columns of `arms` is of each arm that was seen; `NOBODY` where none is."""
        column_of = self._columns.get(arms)
        if column_of is None:
            index_of = self._averages.index_of
            row = {index_of[arm]: column for column, arm in enumerate(arms) if arm in index_of}
            rows = [row.get(index, NOBODY) for index in range(self._averages.num_arms)]
            column_of = self._columns[arms] = np.array(rows, np.int64)
        return column_of

    def _know(self, outcomes: Outcomes) -> set[str]:
        """Room for every arm that was used or scored; those that were used."""
        known, arms = self._averages.index_of, outcomes.arms
        used = [arms[index] for index in sorted({*outcomes.table[ARM].tolist()}) if index >= 0]
        for arm in (*used, *[arms[index] for index in outcomes.shadows]):
            if arm not in known:
                self._add(arm)
        return set(used)

    def _add(self, arm: str) -> None:
        """It is known once there is room for it everywhere: else an interrupt would let compiled loops miss it."""
        num_arms = self._averages.num_arms + 1
        self._requests.add_arms(num_arms)
        self._calibration.add_arms(num_arms)
        more = np.zeros(num_arms - len(self._is_tree), np.bool_)
        self._is_tree = np.concatenate([self._is_tree, more])
        self._believed.clear()
        self._columns.clear()
        self._averages.add(arm)

    def _notice_trees(self, observations: Sequence[Observation]) -> None:
        """An arm whose accepted path once skipped a node drafts trees: count it by node from now."""
        for one in observations:
            for choice, nodes in zip(one.plan.choices, one.accepted_nodes or (), strict=False):
                skipped = bool(nodes) and nodes[-1] != len(nodes) - 1
                if skipped and choice.drafter is not None and choice.drafter not in self._trees:
                    self._become_tree(choice.drafter)

    def _become_tree(self, arm: str) -> None:
        index = self._averages.index_of[arm]
        self._is_tree[index] = True
        self._trees.add(arm)
        self._averages.become_tree(arm, self._requests.priors[index])
        self._requests.forget_counts(index)


@cache
def _indices(numbers: tuple[int, ...]) -> IntArray:
    return np.array(numbers, np.int64)
