"""Who would accept what: survival of draft tokens, per request, drafter arm and position.

Knows nothing of costs, plans or models: hints and outcomes in, probabilities out.

The model, for request `r`, arm `a`, position `j` and bucket `b` of what the hint says:

    hazard = P(draft token j is accepted | the ones before it are)
    logit hazard = logit(arm average[a, b, j]) + deviation[r, a]

The arm average is a ratio of counts in which only observed outcomes count: a draft accepted in full
says nothing of the next position. A request counts ever less as it gives more, and as it deviates
more, so that one odd request cannot drag the average along. The deviation is a mean-reverting random walk, tracked by an
extended Kalman filter whose walk widens while its errors keep their sign. A request's own counts per
position correct what remains. Arms that were seen to draft trees are counted by node: P(node is
accepted) takes the place of the hazard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import BatchView, Confidence, FloatArray, Observation, Plan
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.averages import ArmAverages
from sdcontrol.estimators.confidence import ConfidenceCalibration
from sdcontrol.estimators.deviations import DEVIATION_VARIANCE, Deviations
from sdcontrol.estimators.evidence import Evidence, gather, tested_confidence
from sdcontrol.estimators.hints import read_hints

__all__ = ["AcceptanceEstimator"]

IntArray = NDArray[np.intp]

_FAIR_SHARE_STEPS = 24.0  # drafts after which a request counts half in the arm average
_SHARE_RETURNS = 0.005  # of what a request gave, per draft
_ODD_DEVIATION = 2.0  # log-odds at which a request counts half again
_WALK_VARIANCE = 0.002  # of the deviation's walk, per update
_MOST_DEVIATION = 5.0
_OWN_SHRINK_TOKENS = 16.0  # tokens that the model is worth against a request's own counts
_OWN_MEMORY_TOKENS = 80.0
_FEW_RATES = 1024  # up to which numpy's own accumulate is the faster way
_TREND_RATE = 0.2
_DRIFT_SCALE = (2.0 - _TREND_RATE) / _TREND_RATE  # makes trend^2 chi-squared(1) without drift


@dataclass(frozen=True, slots=True)
class _ViewHints:
    """What the hints of one view say."""

    view: BatchView
    index_of: dict[str, int]
    buckets: IntArray  # [arms, requests]
    limits: IntArray  # [arms, requests]


class AcceptanceEstimator:
    """Online acceptance of every (request, arm, position).

    `prior` maps an arm to the acceptance rate per token assumed before anything was observed.
    Positions beyond `max_draft_tokens` are not tracked.
    """

    def __init__(self, max_draft_tokens: int = 8, prior: Mapping[str, float] | None = None) -> None:
        if max_draft_tokens < 1:
            raise ConfigError(f"max_draft_tokens is {max_draft_tokens}; it must be at least 1")
        self.max_draft_tokens = max_draft_tokens
        self._averages = ArmAverages(max_draft_tokens, prior or {})
        self._requests = Deviations(max_draft_tokens, self._averages.num_arms)
        self._trees: frozenset[str] = frozenset()
        self._calibration: dict[str, ConfidenceCalibration] = {}
        self._hints: _ViewHints | None = None  # of the last view: a memory that changes no answer
        self._columns: IntArray = np.arange(max_draft_tokens)

    # what is believed

    def survival(self, view: BatchView, max_tokens: int | None = None) -> dict[str, FloatArray]:
        """By arm, `[requests, K]`: P(draft node j is accepted); 0 where it may not be used."""
        depth = min(max_tokens or self.max_draft_tokens, self.max_draft_tokens)
        menus = [request.drafters for request in view.requests]
        distinct = dict.fromkeys(menus)
        arms = list(dict.fromkeys(arm for menu in distinct for arm in menu))
        if not arms:
            return {}
        buckets, limits = self._read_hints(view, arms)
        rates = self._rates(self._requests.slots(view), arms, buckets)[:, :, :depth]
        if len(distinct) > 1:
            limits = limits * _allowed(menus, arms)
        if limits.min() < depth:
            rates *= self._columns[:depth] < limits[:, :, None]
        is_chain = [arm not in self._trees for arm in arms] if self._trees else []
        survival = _running_product(rates, is_chain)
        return dict(zip(arms, survival, strict=True))

    def _read_hints(self, view: BatchView, arms: Sequence[str]) -> tuple[IntArray, IntArray]:
        """`read_hints`, from memory where `view` is the one that was planned. Do not write to it."""
        last = self._hints
        if last is not None and last.view is view and all(arm in last.index_of for arm in arms):
            rows = [last.index_of[arm] for arm in arms]
            return last.buckets[rows], last.limits[rows]
        buckets, limits = read_hints(view, arms)
        index_of = {arm: index for index, arm in enumerate(arms)}
        self._hints = _ViewHints(view, index_of, buckets, limits)
        return buckets, limits

    def uncertainty(self, view: BatchView, arm: str) -> FloatArray:
        """Standard deviation of each request's log-odds of acceptance by `arm`, `[requests]`."""
        index = self._averages.index(arm)
        tokens = 1.0 + float(self._averages.tested[index].sum())
        variance = self._requests.variance[self._requests.slots(view), index]
        spread: FloatArray = np.sqrt(variance + 4.0 / tokens)
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
        conditioned = dict(survival)
        for arm in dict.fromkeys(choice.drafter for choice in plan.choices):
            if arm is None or arm in self._trees or arm not in survival:
                continue
            rows = [
                row
                for row, choice in enumerate(plan.choices)
                if choice.drafter == arm and row < len(confidence) and confidence[row]
            ]
            if rows:
                known = _padded([confidence[row] for row in rows], survival[arm].shape[1])
                conditioned[arm] = survival[arm].copy()
                conditioned[arm][rows] = self._given(arm, survival[arm][rows], known)
        return conditioned

    def _given(self, arm: str, survival: FloatArray, known: FloatArray) -> FloatArray:
        """Survival of chains given confidences, all `[rows, K]`, NaN where nothing is known."""
        hazards, before = survival.copy(), survival[:, :-1]
        np.divide(survival[:, 1:], before, out=hazards[:, 1:], where=before > 0)
        calibrated = self._calibrated(arm, np.clip(known, 0.0, 1.0))
        given: FloatArray = np.where(np.isfinite(known), calibrated, hazards).cumprod(axis=1)
        return given

    def _rates(self, slots: IntArray, arms: list[str], buckets: IntArray) -> FloatArray:
        """Hazards (chains) or acceptance rates (trees), `[arms, requests, K]`."""
        index = np.array([self._averages.index(arm) for arm in arms], dtype=np.intp)[:, None]
        rates = self._averages.odds[index, buckets]
        rates *= self._requests.odds_ratio[slots, index][:, :, None]
        rates /= 1.0 + rates
        rates *= _OWN_SHRINK_TOKENS
        rates += self._requests.accepted[slots, index]
        rates /= self._requests.tested[slots, index] + _OWN_SHRINK_TOKENS
        return rates

    def _calibrated(self, arm: str, confidence: FloatArray) -> FloatArray:
        calibration = self._calibration.get(arm)
        return confidence if calibration is None else calibration.acceptance(confidence)

    # what is learnt

    def update(self, observation: Observation) -> None:
        """Learn from the drafts that were verified, and from free drafters' shadows."""
        slots = self._requests.admit(observation.view)
        self._notice_trees(observation)
        self._calibrate(observation)
        evidence = gather(
            observation, self.max_draft_tokens, self._trees, self._calibrated, self._read_hints
        )
        if not len(evidence.rows):
            return
        for arm in evidence.names:
            self._know(arm)
        index = np.array([self._averages.index(arm) for arm in evidence.names], dtype=np.intp)
        cells = slots[evidence.rows], index[evidence.arms]
        drift = self._track(cells, evidence)
        self._count_own(cells, drift, evidence)
        self._count_for_arms(cells, evidence)

    def _know(self, arm: str) -> None:
        if arm not in self._averages.index_of:
            self._averages.add(arm)
            self._requests.add_arms(self._averages.num_arms)

    def _track(self, cells: tuple[IntArray, IntArray], evidence: Evidence) -> FloatArray:
        """One step of each deviation's Kalman filter; how strongly each drifts, `[entries]`."""
        state = self._requests
        odds = self._averages.odds[cells[1], evidence.buckets]
        odds *= state.odds_ratio[cells][:, None]
        rates = odds / (1.0 + odds)
        expected = evidence.tested * rates
        error = (evidence.accepted - expected).sum(axis=1)
        information = (expected * (1.0 - rates)).sum(axis=1) + 1e-9
        variance = state.variance[cells]
        surprise = error / np.sqrt(information * (1.0 + information * variance))
        trend = state.trend[cells] + _TREND_RATE * (surprise - state.trend[cells])
        drift: FloatArray = np.maximum(_DRIFT_SCALE * trend**2 - 1.5, 0.0)
        variance = np.minimum(variance + _WALK_VARIANCE * (1.0 + 10.0 * drift), DEVIATION_VARIANCE)
        variance /= 1.0 + information * variance
        mean = (1.0 - _WALK_VARIANCE) * state.mean[cells] + variance * error
        mean = np.minimum(np.maximum(mean, -_MOST_DEVIATION), _MOST_DEVIATION)
        state.mean[cells], state.variance[cells] = mean, variance
        state.trend[cells], state.odds_ratio[cells] = trend, np.exp(mean)
        return drift

    def _count_own(
        self, cells: tuple[IntArray, IntArray], drift: FloatArray, evidence: Evidence
    ) -> None:
        """Counts per position of each request, where no hint mixes different situations."""
        plain = (evidence.buckets == 0)[:, None]
        tested = self._requests.tested[cells] + evidence.tested * plain
        accepted = self._requests.accepted[cells] + evidence.accepted * plain
        memory = _OWN_MEMORY_TOKENS / (1.0 + 2.0 * drift)
        fade = np.minimum(1.0, memory[:, None] / np.maximum(tested, 1.0))
        self._requests.tested[cells] = tested * fade
        self._requests.accepted[cells] = accepted * fade

    def _count_for_arms(self, cells: tuple[IntArray, IntArray], evidence: Evidence) -> None:
        """The arm averages; the more a request gave, and the odder it is, the less it adds."""
        given = self._requests.given[cells] * (1.0 - _SHARE_RETURNS)
        self._requests.given[cells] = given + 1.0
        oddness = 1.0 + (self._requests.mean[cells] / _ODD_DEVIATION) ** 2
        weight = (1.0 / (oddness * (1.0 + given / _FAIR_SHARE_STEPS)))[:, None]
        where = cells[1], evidence.buckets
        self._averages.count(where, evidence.tested * weight, evidence.accepted * weight)

    def _calibrate(self, observation: Observation) -> None:
        if observation.confidence is None:
            return
        for arm in dict.fromkeys(choice.drafter for choice in observation.plan.choices):
            if arm is not None and arm not in self._trees:
                confidence, was_accepted = tested_confidence(observation, arm)
                if len(confidence):
                    calibration = self._calibration.setdefault(arm, ConfidenceCalibration())
                    calibration.update(confidence, was_accepted)

    def _notice_trees(self, observation: Observation) -> None:
        """An arm whose accepted path once skipped a node drafts trees: count it by node from now."""
        if observation.accepted_nodes is None:
            return
        for choice, nodes in zip(observation.plan.choices, observation.accepted_nodes, strict=True):
            arm = choice.drafter
            skipped = bool(nodes) and nodes[-1] != len(nodes) - 1
            if skipped and arm is not None and arm not in self._trees:
                self._know(arm)
                self._trees |= {arm}
                self._averages.become_tree(arm)
                self._requests.forget_counts(self._averages.index(arm))


def _allowed(menus: list[tuple[str, ...]], arms: list[str]) -> IntArray:
    """1 where a request may use an arm, else 0; broadcasts to `[arms, requests]`."""
    distinct = {menu: index for index, menu in enumerate(dict.fromkeys(menus))}
    table = np.array([[arm in menu for menu in distinct] for arm in arms], dtype=np.intp)
    return table[:, [distinct[menu] for menu in menus]] if len(distinct) > 1 else table


def _running_product(rates: FloatArray, is_chain: list[bool]) -> FloatArray:
    """Cumulative product of the chains' rates along the positions, in place; empty: all chains."""
    if not all(is_chain):
        rates[is_chain] = np.cumprod(rates[is_chain], axis=2)
    elif rates.size < _FEW_RATES:
        np.multiply.accumulate(rates, axis=2, out=rates)
    else:
        for column in range(1, rates.shape[2]):
            rates[:, :, column] *= rates[:, :, column - 1]
    return rates


def _padded(rows: list[tuple[float, ...]], width: int) -> FloatArray:
    """Ragged rows as `[rows, width]`, NaN beyond their ends."""
    padded = np.full((len(rows), width), np.nan)
    for index, values in enumerate(rows):
        padded[index, : len(values)] = values[:width]
    return padded
