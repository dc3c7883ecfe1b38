"""Who would accept what: survival of draft tokens, per request, drafter arm and position.

Knows nothing of costs, plans or models: hints and outcomes in, probabilities out.

The model, for request `r`, arm `a`, position `j` and bucket `b` of what the hint says:

    hazard = P(draft token j is accepted | the ones before it are)
    logit hazard = logit(arm average[a, b, j]) + deviation[r, a]

The arm average is a ratio of counts in which only observed outcomes count (a draft accepted in
full says nothing of the next position), each shrunk: position to bucket to arm to prior. A request
counts ever less as it contributes more, so that one odd request cannot drag the average along. The
deviation is a mean-reverting random walk, tracked by an extended Kalman filter whose walk widens
when its errors keep their sign. A request's own counts per position correct what remains. Arms that
were seen to draft trees are counted by node: P(node accepted) takes the place of the hazard.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import BatchView, Confidence, FloatArray, Observation, Plan
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.confidence import ConfidenceCalibration
from sdcontrol.estimators.evidence import Evidence, gather, tested_confidence
from sdcontrol.estimators.hints import NUM_BUCKETS, prior_rates, read_hints

__all__ = ["AcceptanceEstimator"]

IntArray = NDArray[np.intp]

_PRIOR_ACCEPTANCE = 0.65
_SHRINK_TOKENS = 4.0  # tokens that the coarser level is worth
_ARM_MEMORY_TOKENS = 400.0  # weighted tokens per cell after which the arm average forgets
_FAIR_SHARE_TOKENS = 16.0  # tokens after which a request counts half in the arm average
_DEVIATION_VARIANCE = 1.0  # of requests around the arm average, in squared log-odds
_WALK_VARIANCE = 0.004  # of the deviation's walk, per update
_MOST_DEVIATION = 5.0
_OWN_SHRINK_TOKENS = 16.0  # tokens that the model is worth against a request's own counts
_OWN_MEMORY_TOKENS = 100.0
_TREND_RATE = 0.2
_KEEP_STEPS = 512  # an absent request is forgotten after this many steps


class AcceptanceEstimator:
    """Online acceptance of every (request, arm, position).

    `prior` maps an arm to the acceptance rate per token assumed before anything was observed.
    Positions beyond `max_draft_tokens` are not tracked.
    """

    def __init__(self, max_draft_tokens: int = 8, prior: Mapping[str, float] | None = None) -> None:
        if max_draft_tokens < 1:
            raise ConfigError(f"max_draft_tokens is {max_draft_tokens}; it must be at least 1")
        self.max_draft_tokens = max_draft_tokens
        self._prior = dict(prior or {})
        self._columns: IntArray = np.arange(max_draft_tokens)
        self._slot_of: dict[str, int] = {}  # by request; slot 0 is "a request never seen"
        self._free_slots: list[int] = []
        self._arm_of: dict[str, int] = {}  # arm 0 is "an arm never seen"
        self._trees: frozenset[str] = frozenset()
        self._calibration: dict[str, ConfidenceCalibration] = {}
        slots, depth = 1, max_draft_tokens
        self._last_seen: IntArray = np.zeros(slots, dtype=np.intp)
        self._mean: FloatArray = np.zeros((slots, 1))
        self._variance: FloatArray = np.full((slots, 1), _DEVIATION_VARIANCE)
        self._trend: FloatArray = np.zeros((slots, 1))  # running sum of standardised errors
        self._odds_ratio: FloatArray = np.ones((slots, 1))  # exp(mean)
        self._given: FloatArray = np.zeros((slots, 1))  # tokens given to the arm average
        self._own_tested: FloatArray = np.zeros((slots, 1, depth))
        self._own_accepted: FloatArray = np.zeros((slots, 1, depth))
        self._tested: FloatArray = np.zeros((1, NUM_BUCKETS, depth))
        self._accepted: FloatArray = np.zeros((1, NUM_BUCKETS, depth))
        self._prior_rates: FloatArray = prior_rates(_PRIOR_ACCEPTANCE)[None]
        self._odds: FloatArray = _average_odds(self._tested, self._accepted, self._prior_rates)

    # what is believed

    def survival(self, view: BatchView, max_tokens: int | None = None) -> dict[str, FloatArray]:
        """By arm, `[requests, K]`: P(draft node j is accepted); 0 where it may not be used."""
        depth = min(max_tokens or self.max_draft_tokens, self.max_draft_tokens)
        slots = self._slots(view)
        menus = [request.drafters for request in view.requests]
        distinct = dict.fromkeys(menus)
        survival: dict[str, FloatArray] = {}
        for arm in dict.fromkeys(arm for menu in distinct for arm in menu):
            allowed = {menu: arm in menu for menu in distinct}
            buckets, limits = read_hints(request.hints.get(arm) for request in view.requests)
            usable = self._columns[:depth] < limits[:, None]
            usable &= np.array([allowed[menu] for menu in menus])[:, None]
            rows = self._rates(slots, self._index(arm), buckets)[:, :depth] * usable
            survival[arm] = rows if arm in self._trees else _running_product(rows)
        return survival

    def uncertainty(self, view: BatchView, arm: str) -> FloatArray:
        """Standard deviation of each request's log-odds of acceptance by `arm`, `[requests]`."""
        index = self._index(arm)
        tokens = 1.0 + float(self._tested[index].sum())
        spread: FloatArray = np.sqrt(self._variance[self._slots(view), index] + 4.0 / tokens)
        return spread

    def condition(
        self,
        view: BatchView,
        plan: Plan,
        confidence: Confidence,
        survival: Mapping[str, FloatArray],
    ) -> dict[str, FloatArray]:
        """`survival` given the drafter's confidence in the tokens drafted so far.

        Drafted tokens take their calibrated confidence, later ones keep their hazards. A confidence
        that is not a finite number says nothing. Trees keep their survival.
        """
        conditioned = {arm: rows.copy() for arm, rows in survival.items()}
        for row, (choice, values) in enumerate(zip(plan.choices, confidence, strict=False)):
            arm = choice.drafter
            if arm is None or not values or arm not in conditioned or arm in self._trees:
                continue
            rates = _hazards(conditioned[arm][row])
            known = np.array(values[: len(rates)], dtype=float)
            usable = np.isfinite(known)
            calibrated = self._calibrated(arm, np.clip(np.where(usable, known, 0.0), 0.0, 1.0))
            rates[: len(known)] = np.where(usable, calibrated, rates[: len(known)])
            conditioned[arm][row] = np.cumprod(rates)
        return conditioned

    def _slots(self, view: BatchView) -> IntArray:
        slot_of = self._slot_of
        return np.array([slot_of.get(request.id, 0) for request in view.requests], dtype=np.intp)

    def _index(self, arm: str) -> int:
        return self._arm_of.get(arm, 0)

    def _rates(self, slots: IntArray, arm: int, buckets: IntArray) -> FloatArray:
        """Hazards (chains) or acceptance rates (trees) of one arm, `[requests, K]`."""
        odds = self._odds[arm][buckets] * self._odds_ratio[slots, arm][:, None]
        modelled = odds / (1.0 + odds)
        tested, accepted = self._own_tested[slots, arm], self._own_accepted[slots, arm]
        rates: FloatArray = accepted + _OWN_SHRINK_TOKENS * modelled
        rates /= tested + _OWN_SHRINK_TOKENS
        return rates

    def _calibrated(self, arm: str, confidence: FloatArray) -> FloatArray:
        calibration = self._calibration.get(arm)
        return confidence if calibration is None else calibration.acceptance(confidence)

    # what is learnt

    def update(self, observation: Observation) -> None:
        """Learn from the drafts that were verified, and from free drafters' shadows."""
        self._notice_trees(observation)
        self._admit(observation.view)
        self._calibrate(observation)
        evidence = gather(observation, self.max_draft_tokens, self._trees, self._calibrated)
        if len(evidence.rows):
            self._learn(observation.view, evidence)

    def _learn(self, view: BatchView, evidence: Evidence) -> None:
        slots = self._slots(view)[evidence.rows]
        for arm in dict.fromkeys(evidence.arms):
            if arm not in self._arm_of:
                self._arm_of[arm] = self._new_arm(arm)
        arms = np.array([self._arm_of[arm] for arm in evidence.arms], dtype=np.intp)
        hints = (
            view.requests[row].hints.get(arm)
            for row, arm in zip(evidence.rows.tolist(), evidence.arms, strict=True)
        )
        buckets, _ = read_hints(hints)
        self._track_deviation(slots, arms, buckets, evidence)
        self._count_own(slots, arms, buckets, evidence)
        self._count_arm(slots, arms, buckets, evidence)

    def _track_deviation(
        self, slots: IntArray, arms: IntArray, buckets: IntArray, evidence: Evidence
    ) -> None:
        """One step of the Kalman filter of each (request, arm)."""
        odds = self._odds[arms, buckets] * self._odds_ratio[slots, arms][:, None]
        rates = odds / (1.0 + odds)
        error = (evidence.accepted - evidence.tested * rates).sum(axis=1)
        information = (evidence.tested * rates * (1.0 - rates)).sum(axis=1) + 1e-9
        variance = self._variance[slots, arms]
        surprise = error / np.sqrt(information * (1.0 + information * variance))
        trend = (1.0 - _TREND_RATE) * self._trend[slots, arms] + _TREND_RATE * surprise
        drift = trend**2 * (2.0 - _TREND_RATE) / _TREND_RATE  # about chi-squared(1) without drift
        variance = variance + _WALK_VARIANCE * (1.0 + 10.0 * np.maximum(drift - 2.0, 0.0))
        variance = np.minimum(variance, _DEVIATION_VARIANCE)
        variance = variance / (1.0 + information * variance)
        mean = self._mean[slots, arms] * (1.0 - _WALK_VARIANCE) + variance * error
        mean = np.clip(mean, -_MOST_DEVIATION, _MOST_DEVIATION)
        self._mean[slots, arms], self._variance[slots, arms] = mean, variance
        self._trend[slots, arms], self._odds_ratio[slots, arms] = trend, np.exp(mean)

    def _count_own(
        self, slots: IntArray, arms: IntArray, buckets: IntArray, evidence: Evidence
    ) -> None:
        """Counts per position of each request, where no hint mixes different situations."""
        plain = (buckets == 0)[:, None]
        tested = self._own_tested[slots, arms] + evidence.tested * plain
        accepted = self._own_accepted[slots, arms] + evidence.accepted * plain
        drift = self._trend[slots, arms] ** 2 * (2.0 - _TREND_RATE) / _TREND_RATE
        memory = _OWN_MEMORY_TOKENS / (1.0 + np.maximum(drift - 2.0, 0.0))
        fade = np.minimum(1.0, memory[:, None] / np.maximum(tested, 1.0))
        self._own_tested[slots, arms] = tested * fade
        self._own_accepted[slots, arms] = accepted * fade

    def _count_arm(
        self, slots: IntArray, arms: IntArray, buckets: IntArray, evidence: Evidence
    ) -> None:
        """The arm averages; the more a request has given, the less it adds."""
        given = self._given[slots, arms]
        weight = (1.0 / (1.0 + given / _FAIR_SHARE_TOKENS))[:, None]
        self._given[slots, arms] = given + evidence.tested.sum(axis=1)
        np.add.at(self._tested, (arms, buckets), evidence.tested * weight)
        np.add.at(self._accepted, (arms, buckets), evidence.accepted * weight)
        fade = np.minimum(1.0, _ARM_MEMORY_TOKENS / np.maximum(self._tested, 1.0))
        self._tested *= fade
        self._accepted *= fade
        self._odds = _average_odds(self._tested, self._accepted, self._prior_rates)

    def _calibrate(self, observation: Observation) -> None:
        if observation.confidence is None:
            return
        arms = {choice.drafter for choice in observation.plan.choices if choice.drafter is not None}
        for arm in arms - self._trees:
            confidence, was_accepted = tested_confidence(observation, arm)
            if len(confidence):
                calibration = self._calibration.setdefault(arm, ConfidenceCalibration())
                calibration.update(confidence, was_accepted)

    def _notice_trees(self, observation: Observation) -> None:
        """An arm whose accepted path once skipped a node drafts trees; count it by node from now."""
        if observation.accepted_nodes is None:
            return
        for choice, nodes in zip(observation.plan.choices, observation.accepted_nodes, strict=True):
            arm = choice.drafter
            if arm is not None and arm not in self._trees and nodes != tuple(range(len(nodes))):
                self._trees |= {arm}
                self._forget_arm(arm)

    # who is known

    def _forget_arm(self, arm: str) -> None:
        index = self._arm_of.get(arm)
        if index is not None:
            for array in (self._tested, self._accepted):
                array[index] = 0.0
            for array in (self._own_tested, self._own_accepted):
                array[:, index] = 0.0

    def _new_arm(self, arm: str) -> int:
        """Room for one more arm, with its prior."""
        index = len(self._arm_of) + 1
        rates = prior_rates(self._prior.get(arm, _PRIOR_ACCEPTANCE))[None]
        self._prior_rates = np.concatenate([self._prior_rates, rates])
        self._tested = _grown(self._tested, 0, index + 1)
        self._accepted = _grown(self._accepted, 0, index + 1)
        for name, blank in _BLANK.items():
            setattr(self, name, _grown(getattr(self, name), 1, index + 1, blank))
        self._odds = _average_odds(self._tested, self._accepted, self._prior_rates)
        return index

    def _admit(self, view: BatchView) -> None:
        """A slot for every request of the view; the long absent leave when room runs out."""
        new = [r.id for r in view.requests if r.id not in self._slot_of]
        if len(new) > len(self._free_slots):
            self._make_room(view, len(new))
        for request_id in new:
            self._slot_of[request_id] = self._free_slots.pop()
        self._last_seen[self._slots(view)] = view.step

    def _make_room(self, view: BatchView, needed: int) -> None:
        for request_id, slot in list(self._slot_of.items()):
            if self._last_seen[slot] < view.step - _KEEP_STEPS:
                self._free_slots.append(self._slot_of.pop(request_id))
                self._blank(slot)
        if needed > len(self._free_slots):
            size = len(self._last_seen)
            target = max(2 * size, size + needed, 64)
            self._last_seen = np.concatenate([self._last_seen, np.zeros(target - size, np.intp)])
            for name, blank in _BLANK.items():
                setattr(self, name, _grown(getattr(self, name), 0, target, blank))
            self._free_slots.extend(range(target - 1, size - 1, -1))

    def _blank(self, slot: int) -> None:
        for name, blank in _BLANK.items():
            getattr(self, name)[slot] = blank


_BLANK = {
    "_mean": 0.0,
    "_variance": _DEVIATION_VARIANCE,
    "_trend": 0.0,
    "_odds_ratio": 1.0,
    "_given": 0.0,
    "_own_tested": 0.0,
    "_own_accepted": 0.0,
}


def _average_odds(tested: FloatArray, accepted: FloatArray, prior: FloatArray) -> FloatArray:
    """Odds of the arm averages, `[arms, buckets, K]`: positions shrunk to buckets to the prior."""
    bucket = accepted.sum(axis=2) + _SHRINK_TOKENS * prior
    bucket = bucket / (tested.sum(axis=2) + _SHRINK_TOKENS)
    rates = (accepted + _SHRINK_TOKENS * bucket[:, :, None]) / (tested + _SHRINK_TOKENS)
    rates = np.clip(rates, 1e-4, 1.0 - 1e-4)
    odds: FloatArray = rates / (1.0 - rates)
    return odds


def _running_product(rates: FloatArray) -> FloatArray:
    """Cumulative product along the positions, in place."""
    for column in range(1, rates.shape[1]):
        rates[:, column] *= rates[:, column - 1]
    return rates


def _hazards(survival: FloatArray) -> FloatArray:
    """Hazards of one chain, `[K]`."""
    before = np.concatenate([[1.0], survival[:-1]])
    rates = np.zeros_like(survival)
    np.divide(survival, before, out=rates, where=before > 0)
    return rates


def _grown(array: FloatArray, axis: int, size: int, blank: float = 0.0) -> FloatArray:
    shape = list(array.shape)
    shape[axis] = size - shape[axis]
    return np.concatenate([array, np.full(shape, blank)], axis=axis)
