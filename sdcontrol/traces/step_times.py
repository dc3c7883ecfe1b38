"""How long a simulated step takes: a `Cost`, straight lines, noise.

Knows what a step computes and reads; nothing of requests, policies or schedulers. Times fitted from
a recording are in `fitted_times`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sdcontrol.core import Cost, FloatArray, Planner, Timing
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.known_machine import KnownMachine
from sdcontrol.estimators.price import forward_seconds

__all__ = [
    "CostTimes",
    "DraftWork",
    "LinearCost",
    "LinearDrafter",
    "NoisyTimes",
    "StepTimes",
    "StepWork",
    "is_compute_bound",
    "tell_engine",
]


@dataclass(frozen=True, slots=True)
class DraftWork:
    """The drafting of one family in one step."""

    requests_by_round: tuple[int, ...]  # that draft a token in it
    kv_tokens_by_round: tuple[int, ...]  # that they read
    catch_up_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes and reads."""

    num_requests: int  # decoding
    draft_tokens: int  # verified
    kv_tokens: int  # context of the decoding requests
    prefill_tokens: int
    emitted_tokens: int
    drafts: Mapping[str, DraftWork] = field(default_factory=dict)  # by family
    verified_kv_tokens: int = 0  # context, once for every draft token of its request
    longest_draft: int = 0  # verified tokens of the request that has most
    offered_arms: int = 0  # that drafters were asked about, over all requests
    shadow_drafts: int = 0  # made afterwards, to see how free drafters would have done

    @property
    def num_tokens(self) -> int:
        """Packed into the target's forward."""
        return self.num_requests + self.draft_tokens + self.prefill_tokens


class StepTimes(Protocol):
    """How long a step takes.

    One may have `token_edges`, the numbers of tokens that forwards are padded to, and a known `machine`:
    a simulation tells them to its planner, as an engine does. One may have a `cost`, its prices as a `Cost`:
    they are what the policy `oracle` plans by. One that has `launched_ahead` says whether the
    step that was timed last was launched ahead of its tokens.
    """

    def timing(self, work: StepWork) -> Timing:
        """Seconds of the phases of the step that does `work`."""
        ...


def tell_engine(times: StepTimes, planner: Planner) -> None:
    """Tell a planner that prices forwards to what these are padded, and on what machine, if that is known."""
    edges, pad_to = getattr(times, "token_edges", ()), getattr(planner, "pad_to", None)
    if edges and pad_to is not None:
        pad_to(edges)
    machine, price_by = getattr(times, "machine", None), getattr(planner, "price_by", None)
    if machine is not None and price_by is not None:
        price_by(machine)


class CostTimes:
    """Any `Cost` as step times. `controller_seconds` is what planning and observing take."""

    def __init__(self, cost: Cost, *, controller_seconds: float = 0.0) -> None:
        if controller_seconds < 0.0:
            raise ConfigError(f"controller_seconds {controller_seconds}; give 0 or more")
        self.cost = cost
        self._controller_seconds = controller_seconds
        self._catch_up = getattr(cost, "catch_up_seconds", None)

    def timing(self, work: StepWork) -> Timing:
        """The formula of design section 4, term by term."""
        load = work.num_tokens, work.kv_tokens, work.num_requests, work.longest_draft
        return Timing(
            draft_seconds={family: self._draft(family, w) for family, w in work.drafts.items()},
            verify_seconds=forward_seconds(self.cost, *load),
            controller_seconds=self._controller_seconds,
            overhead_seconds=self.cost.overhead_seconds(),
        )

    def _draft(self, family: str, work: DraftWork) -> float:
        requests = np.array(work.requests_by_round, dtype=float)
        kv_tokens = np.array(work.kv_tokens_by_round, dtype=float)
        seconds = float(np.sum(self.cost.draft_seconds(family, requests, kv_tokens)))
        if self._catch_up is not None and work.catch_up_tokens:
            seconds += float(self._catch_up(family, work.catch_up_tokens))
        return seconds


class NoisyTimes:
    """Step times multiplied by a log-normal factor of mean 1, the same at every run of a seed."""

    def __init__(self, times: StepTimes, *, relative_noise: float, seed: int = 0) -> None:
        if not 0.0 <= relative_noise <= 1.0:
            raise ConfigError(f"relative_noise {relative_noise}; give 0 to 1")
        self._times = times
        self.token_edges: tuple[int, ...] = getattr(times, "token_edges", ())
        self.machine: KnownMachine | None = getattr(times, "machine", None)
        self.cost: Cost | None = getattr(times, "cost", None)
        self.launched_ahead = False
        self._sigma = math.sqrt(math.log1p(relative_noise**2))
        self._generator = np.random.default_rng(seed)

    def timing(self, work: StepWork) -> Timing:
        """Every phase of a step is slowed down alike."""
        timing = self._times.timing(work)
        self.launched_ahead = getattr(self._times, "launched_ahead", False)
        factor = math.exp(self._sigma * self._generator.standard_normal() - self._sigma**2 / 2)
        return Timing(
            {family: factor * seconds for family, seconds in timing.draft_seconds.items()},
            factor * timing.verify_seconds,
            factor * timing.controller_seconds,
            factor * timing.overhead_seconds,
        )


@dataclass(frozen=True, slots=True)
class LinearDrafter:
    """Seconds of a drafting round of one family; of a catch-up, `per_request_seconds` a token."""

    constant_seconds: float = 0.0
    per_request_seconds: float = 0.0
    per_kv_token_seconds: float = 0.0

    def round_seconds(
        self, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """Of one round; 0 where nobody drafts in it. Arguments broadcast."""
        requests, kv = np.asarray(num_requests, dtype=float), np.asarray(kv_tokens, dtype=float)
        drafting = self.per_request_seconds * requests + self.per_kv_token_seconds * kv
        return np.where(requests > 0, self.constant_seconds + drafting, 0.0)


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A `Cost` of straight lines, as published coefficients are; a family without one is free.

    A fitted slope may be negative; a forward never takes less than `least_seconds`.
    """

    constant_seconds: float
    per_token_seconds: float
    per_kv_token_seconds: float = 0.0
    per_request_seconds: float = 0.0
    drafters: Mapping[str, LinearDrafter] = field(default_factory=dict)
    step_overhead_seconds: float = 0.0
    least_seconds: float = 1e-6

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """One target forward over `num_tokens` packed tokens reading `kv_tokens` of KV in all."""
        seconds = (
            self.constant_seconds
            + self.per_token_seconds * num_tokens
            + self.per_kv_token_seconds * kv_tokens
            + self.per_request_seconds * num_requests
        )
        return np.maximum(seconds, self.least_seconds)

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """One drafting round; 0 where nobody drafts in it."""
        return self.drafters.get(family, _FREE).round_seconds(num_requests, kv_tokens)

    def catch_up_seconds(self, family: str, num_tokens: float) -> float:
        """What the tokens that a drafter's cache lacks take beside its first round."""
        return self.drafters.get(family, _FREE).per_request_seconds * num_tokens

    def overhead_seconds(self) -> float:
        """What a step costs beside its forwards."""
        return self.step_overhead_seconds


_FREE = LinearDrafter()


def is_compute_bound(times: StepTimes, work: StepWork) -> bool:
    """Whether twice the tokens, reading the same KV, would take the forward half as long again.

    Where reading weights and KV is what takes the time, more tokens are nearly free.
    """
    more = StepWork(
        work.num_requests,
        work.draft_tokens + work.num_tokens,
        work.kv_tokens,
        work.prefill_tokens,
        work.emitted_tokens,
        verified_kv_tokens=2 * work.verified_kv_tokens,
        longest_draft=2 * work.longest_draft,
    )
    return times.timing(more).verify_seconds > 1.5 * times.timing(work).verify_seconds
