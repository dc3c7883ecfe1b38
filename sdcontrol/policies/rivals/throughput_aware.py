"""One length for the batch by expected tokens over a table of step times: SGLang's throughput-aware rule.

Acceptance is that of positions, over all requests and batch sizes together; step times go by batch size and
length alone, at one context length. It always drafts: none of its candidates is 0. That system measures
its table before the first step; here the belief's cost is the table.
"""

from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from sdcontrol.core import BatchView, Belief, FloatArray, Observation, Plan, family_of
from sdcontrol.estimators.price import sparse_budget
from sdcontrol.policies.asking import verify_seconds
from sdcontrol.policies.rivals.one_drafter import CandidatesConfig, OneDrafter

__all__ = ["ThroughputAware", "ThroughputAwareConfig"]

_WINDOW_BATCHES = 20
_INTERVAL_BATCHES = 5
_MARGIN = 1.1  # times the present length's score is what another one must have
_DECIDED = (
    "throughput_aware: "  # and the length: so that whoever has the observation alone knows it
)


class ThroughputAwareConfig(CandidatesConfig):
    """`candidates` maps the largest batch to its lengths; the last row serves larger batches. The table of
    step times is that of `context_tokens` per request.
    """

    kind: Literal["throughput_aware"] = "throughput_aware"
    least_tokens: ClassVar[int] = 1
    candidates: dict[int, tuple[int, ...]] = Field(default={1024: (1, 3, 5, 7)}, min_length=1)
    initial_tokens: int = Field(default=3, ge=1)
    context_tokens: int = Field(default=128, ge=1)

    def build(self) -> "ThroughputAware":
        """The policy."""
        return ThroughputAware(
            self.drafter, dict(self.candidates), self.initial_tokens, self.context_tokens
        )


class ThroughputAware(OneDrafter):
    """k = argmax of (1 + sum of p_j, j < k) / step(batch, k) among candidates, every 5 batches.

    `p_j` is the mean over the last 20 batches of the share of requests that had more than `j` draft tokens
    accepted; where none was that long, what follows from the positions before it, as a geometric series. Another
    length is taken if its score is 1.1 times as high, once every position of the present one was seen in
    20 batches; what was seen of longer ones is forgotten on the way down. A batch size that does not have the present
    length among its candidates takes the best of those at once.
    """

    def __init__(
        self,
        drafter: str | None,
        candidates: dict[int, tuple[int, ...]],
        initial_tokens: int,
        context_tokens: int,
    ) -> None:
        super().__init__(drafter)
        self.candidates = candidates
        self.context_tokens = context_tokens
        lengths = {length for row in candidates.values() for length in row}
        first = next(iter(candidates.values()))
        self._tokens = initial_tokens if initial_tokens in lengths else first[len(first) // 2]
        self._shares = [deque[float](maxlen=_WINDOW_BATCHES) for _ in range(max(lengths))]
        self._num_batches = 0  # since it was last time to decide

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The present length, or every 5 batches, and where the batch size asks for it, another one."""
        drafter = self.drafter_for(view)
        if drafter is None:
            return Plan.off(view, "throughput_aware, undecided: nobody can draft")
        lengths, tokens = self._lengths(len(view.requests)), self._tokens
        scores = dict(zip(lengths, self._scores(view, drafter, lengths, belief), strict=True))
        best = max(lengths, key=scores.__getitem__)
        if tokens not in scores:
            tokens = best if self._shares[0] else lengths[len(lengths) // 2]
        is_due = self._num_batches >= _INTERVAL_BATCHES and self._is_known(tokens)
        if is_due and scores[best] > _MARGIN * scores[tokens]:
            tokens = best
        return self.uniform(view, tokens, f"{_DECIDED}{tokens}")

    def update(self, observation: Observation) -> None:
        """Keep what was decided, and what it came to."""
        _, said, decided = observation.plan.reason.partition(_DECIDED)
        if not (said and decided.isdecimal() and int(decided) in range(len(self._shares) + 1)):
            return
        if int(decided) < self._tokens:
            for shares in self._shares[int(decided) :]:
                shares.clear()
        self._tokens = int(decided)
        self._num_batches %= _INTERVAL_BATCHES
        pairs = zip(observation.accepted, observation.proposed, strict=True)
        accepted = [count for count, proposed in pairs if proposed]
        if not accepted:
            return
        self._num_batches += 1
        for j, shares in enumerate(self._shares[: self._tokens]):
            shares.append(sum(count > j for count in accepted) / len(accepted))

    def _lengths(self, batch: int) -> tuple[int, ...]:
        rows = self.candidates.items()
        return next((row for most, row in rows if batch <= most), list(rows)[-1][1])

    def _is_known(self, tokens: int) -> bool:
        """Whether every position up to `tokens` was seen often enough."""
        return all(len(shares) == _WINDOW_BATCHES for shares in self._shares[:tokens])

    def _scores(
        self, view: BatchView, drafter: str, lengths: Sequence[int], belief: Belief
    ) -> list[float]:
        """Expected tokens per second of each length."""
        batch, tokens, cost = len(view.requests), np.array(lengths, dtype=np.float64), belief.cost
        reads = min(self.context_tokens, sparse_budget(drafter) or self.context_tokens)
        one = float(cost.draft_seconds(family_of(drafter), float(batch), float(batch * reads)))
        kv_tokens = float(batch * self.context_tokens)
        seconds = verify_seconds(cost, batch * (1.0 + tokens), kv_tokens, batch)
        seconds += cost.overhead_seconds() + tokens * one
        expected: FloatArray = 1.0 + np.cumsum(self._survival())[np.array(lengths) - 1]
        return list((batch * expected / np.maximum(seconds, 1e-9)).tolist())

    def _survival(self) -> list[float]:
        """The share of requests that accept more than j tokens, for each j; 0 where nothing is known."""
        known: list[float] = []
        for shares in self._shares:
            if shares:
                known.append(sum(shares) / len(shares))
            else:
                known.append(_next(known))
        return known


def _next(shares: Sequence[float]) -> float:
    """What follows `shares` in a geometric series."""
    if len(shares) < 2:
        return shares[0] if shares else 0.0
    first, last = shares[0], shares[-1]
    ratio = (last / first) ** (1.0 / (len(shares) - 1)) if first > 0.0 else 0.0
    return min(last, last * ratio)
