"""Workloads that are made up, or put together from others.

    GeneratedWorkload.model_validate({"kind": "generated", "num_requests": 1000,
        "arrivals": {"kind": "poisson", "rate_per_second": 4},
        "requests": [{"prompt_tokens": {"kind": "fixed", "tokens": 500}, ...}]}).workload()

    with_drafters(texts, {"draft_model": process})    recorded texts, further drafters drawn
    with_contexts_of(texts, lengths)                  the prompts' lengths of another workload
    mixture("mixed", {edits: 1, chats: 2})            requests of several in one stream

Everything is drawn from seeds, request by request, so that a workload is the same at every reading
and never in memory as a whole. Knows numbers; nothing of policies or costs.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from sdcontrol.errors import ConfigError
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.plain_numbers import PlainNumbers
from sdcontrol.traces.acceptance_process import AcceptanceProcess
from sdcontrol.traces.arrivals import Arrivals
from sdcontrol.traces.workload import SimulatedRequest, Workload

__all__ = [
    "Fixed",
    "GeneratedWorkload",
    "Lengths",
    "LogNormal",
    "RequestKind",
    "Uniform",
    "mixture",
    "with_contexts_of",
    "with_drafters",
]

_MOST_TOKENS = 1 << 24


class _Config(PlainNumbers):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Fixed(_Config):
    """Always the same."""

    kind: Literal["fixed"] = "fixed"
    tokens: int = Field(ge=1, le=_MOST_TOKENS)

    def draw(self, generator: np.random.Generator) -> int:
        """Tokens."""
        return self.tokens


class Uniform(_Config):
    """Any length from `low` to `high`, both included."""

    kind: Literal["uniform"] = "uniform"
    low: int = Field(ge=1, le=_MOST_TOKENS)
    high: int = Field(ge=1, le=_MOST_TOKENS)

    @model_validator(mode="after")
    def _is_range(self) -> "Uniform":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self

    def draw(self, generator: np.random.Generator) -> int:
        """Tokens."""
        return int(generator.integers(self.low, self.high, endpoint=True))


class LogNormal(_Config):
    """Long-tailed around a median, cut at `most`."""

    kind: Literal["log_normal"] = "log_normal"
    median: float = Field(ge=1, le=_MOST_TOKENS)
    sigma: float = Field(gt=0, le=4, description="standard deviation of the logarithm")
    most: int = Field(1 << 17, ge=1, le=_MOST_TOKENS)

    def draw(self, generator: np.random.Generator) -> int:
        """Tokens."""
        drawn = self.median * math.exp(self.sigma * generator.standard_normal())
        return max(1, min(round(drawn), self.most))


Lengths = Annotated[Fixed | Uniform | LogNormal, Field(discriminator="kind")]


class RequestKind(_Config):
    """Requests that are alike: their lengths and how each drafter fares in them."""

    name: str = Field("request", min_length=1)
    share: float = Field(1.0, gt=0, description="of the requests, in relation to the other kinds")
    prompt_tokens: Lengths
    output_tokens: Lengths
    acceptance: Mapping[str, AcceptanceProcess] = Field(default_factory=dict, description="by arm")
    temperature: float = Field(0.0, ge=0)


class GeneratedWorkload(_Config):
    """Requests of several kinds, mixed at random, at drawn times."""

    kind: Literal["generated"] = "generated"
    name: str = Field("generated", min_length=1)
    num_requests: int = Field(ge=1)
    arrivals: Arrivals
    requests: tuple[RequestKind, ...] = Field(min_length=1)
    seed: int = Field(0, ge=0)

    def workload(self) -> Workload:
        """The requests, drawn anew and alike at every reading."""
        arms = dict.fromkeys(arm for kind in self.requests for arm in kind.acceptance)
        return Workload(self.name, tuple(arms), self._draw, self.model_dump(mode="json"))

    def _draw(self) -> Iterator[SimulatedRequest]:
        generator = np.random.default_rng(self.seed)
        times = self.arrivals.times(generator.spawn(1)[0])
        bounds = np.cumsum([kind.share for kind in self.requests])
        for number, arrival in zip(range(self.num_requests), times, strict=False):
            place = int(np.searchsorted(bounds, generator.random() * bounds[-1], side="right"))
            kind = self.requests[min(place, len(bounds) - 1)]
            output_tokens = kind.output_tokens.draw(generator)
            yield SimulatedRequest(
                id=f"{kind.name}-{number}",
                arrival_seconds=arrival,
                prompt_tokens=kind.prompt_tokens.draw(generator),
                output_tokens=output_tokens,
                acceptance=_drawn(kind.acceptance, generator, output_tokens),
                temperature=kind.temperature,
            )


def with_drafters(
    workload: Workload, processes: Mapping[str, AcceptanceProcess], *, seed: int = 0
) -> Workload:
    """The same requests with further arms, whose acceptance is drawn; the name does not change.

    Raises `ConfigError` for an arm that the workload has.
    """
    if taken := [arm for arm in processes if arm in workload.arms]:
        raise ConfigError(f"workload {workload.name!r} has the arms {taken}; give other names")

    def make() -> Iterator[SimulatedRequest]:
        for number, request in enumerate(workload):
            generator = np.random.default_rng((seed, number))
            drawn = _drawn(processes, generator, request.output_tokens)
            yield replace(request, acceptance={**request.acceptance, **drawn})

    simulated = {arm: process.model_dump(mode="json") for arm, process in processes.items()}
    origin = {**workload.origin, "simulated_acceptance": simulated, "seed": seed}
    return Workload(workload.name, (*workload.arms, *processes), make, origin)


def with_contexts_of(texts: Workload, lengths: Workload) -> Workload:
    """The outputs of `texts` after the prompts of `lengths`, one by one, repeated as needed.

    Only a prompt's length and its shared blocks are taken, so a look-up's acceptance, which is that
    of the text's own prompt, is a lower bound.
    """

    def make() -> Iterator[SimulatedRequest]:
        prompts = itertools.chain.from_iterable(iter(lengths) for _ in itertools.count())
        if next(iter(lengths), None) is None:
            raise ConfigError(f"workload {lengths.name!r} has no requests to take prompts from")
        for text, prompt in zip(texts, prompts, strict=False):
            yield replace(
                text,
                prompt_tokens=prompt.prompt_tokens,
                contents=prompt.contents,
                tokens_per_content=prompt.tokens_per_content,
            )

    origin = {"texts": {texts.name: texts.origin}, "prompts": {lengths.name: lengths.origin}}
    return Workload(f"{texts.name} after {lengths.name}", texts.arms, make, origin)


def mixture(
    name: str, parts: Sequence[tuple[Workload, float]], num_requests: int, *, seed: int = 0
) -> Workload:
    """Requests of several workloads, each next one of a part drawn by its weight, all at once.

    A part is read again when it ends. Give the mixture arrivals with `with_arrivals_of`. Raises
    `ConfigError` for weights that are not positive, parts that offer different arms, or none.
    """
    if not parts or not all(0.0 < weight < math.inf for _, weight in parts):
        raise ConfigError(f"mixture {name!r}: give at least one part, and positive weights")
    arms = {part.arms for part, _ in parts}
    if len(arms) > 1:
        raise ConfigError(f"mixture {name!r}: its parts have different arms {sorted(arms)}")
    weights = np.array([weight for _, weight in parts])

    def make() -> Iterator[SimulatedRequest]:
        generator = np.random.default_rng(seed)
        sources = [_endless(part) for part, _ in parts]
        for number in range(num_requests):
            place = int(generator.choice(len(parts), p=weights / weights.sum()))
            request = next(sources[place])
            yield replace(request, id=f"{number}:{request.id}", arrival_seconds=0.0)

    origin = {
        "mixture": {part.name: {"weight": weight, **part.origin} for part, weight in parts},
        "seed": seed,
    }
    return Workload(name, parts[0][0].arms, make, origin)


def _endless(workload: Workload) -> Iterator[SimulatedRequest]:
    while True:
        request = None
        for request in workload:
            yield request
        if request is None:
            raise ConfigError(f"workload {workload.name!r} has no requests to mix")


def _drawn(
    processes: Mapping[str, AcceptanceProcess],
    generator: np.random.Generator,
    output_tokens: int,
) -> dict[str, ArmOutcomes]:
    return {arm: process.outcomes(generator, output_tokens) for arm, process in processes.items()}
