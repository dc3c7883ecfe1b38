"""What a simulation decodes: requests in order of arrival, each with what drafts would achieve.

Values only: knows nothing of files, schedulers, policies or time beyond arrivals. A workload is
read lazily, as often as wanted, so that 100,000 requests need not be in memory together.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from sdcontrol.errors import ConfigError, TraceError
from sdcontrol.outcomes import ArmOutcomes, DraftConfidence

__all__ = ["SimulatedRequest", "Workload"]


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRequest:
    """One request: when it comes, how long it is, and what each drafter arm would achieve.

    `acceptance` has one `ArmOutcomes` of `output_tokens` positions per arm that may be used; an
    empty one opts out of speculation. Raises `TraceError` for what cannot be.
    """

    id: str
    arrival_seconds: float  # since the beginning of the workload
    prompt_tokens: int
    output_tokens: int  # emitted in the end, whatever is drafted
    acceptance: Mapping[str, ArmOutcomes] = field(default_factory=dict)
    temperature: float = 0.0
    max_output_tokens: int | None = None  # asked for; None: as many as came
    contents: NDArray[np.int64] | None = None  # of the text's beginning: equal ids, equal tokens
    tokens_per_content: int = 1  # each id stands for so many tokens
    drafted: DraftConfidence = field(default_factory=dict)  # in drafts that were made; else guessed

    def __post_init__(self) -> None:
        most = self.most_output_tokens
        if self.prompt_tokens < 1 or not 1 <= self.output_tokens <= most:
            raise TraceError(
                f"request {self.id!r}: {self.prompt_tokens} prompt tokens, {self.output_tokens} of "
                f"at most {most} output tokens; a request has at least 1 of each"
            )
        if not 0.0 <= self.arrival_seconds < float("inf"):
            raise TraceError(
                f"request {self.id!r} arrives at {self.arrival_seconds} s; give 0 or more"
            )
        for arm, outcomes in self.acceptance.items():
            if outcomes.output_tokens != self.output_tokens:
                raise TraceError(
                    f"request {self.id!r}, arm {arm!r}: acceptance at {outcomes.output_tokens} "
                    f"positions of {self.output_tokens}; give one value per output token"
                )

    @property
    def most_output_tokens(self) -> int:
        """What was asked for: it bounds drafts, as in the engine."""
        return self.output_tokens if self.max_output_tokens is None else self.max_output_tokens

    def token_contents(self) -> NDArray[np.int64]:
        """`[known tokens]`, prompt first: equal beginnings mean equal text; empty: none is known."""
        if self.contents is None:
            return np.empty(0, dtype=np.int64)
        most = self.prompt_tokens + self.output_tokens
        if self.tokens_per_content == 1:
            return self.contents[:most]
        within = np.arange(self.tokens_per_content)
        spread = self.contents[:, None] * self.tokens_per_content + within
        return spread.reshape(-1)[: self.prompt_tokens].astype(np.int64)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, made anew by `make` at every reading.

    `origin` says what it was made of, for reports. `arms` are those that its requests can answer.
    Of a closed loop, `concurrency` requests are in flight: the next arrives when one has ended.
    """

    name: str
    arms: tuple[str, ...]
    make: Callable[[], Iterable[SimulatedRequest]]
    origin: Mapping[str, object] = field(default_factory=dict)
    concurrency: int | None = None  # None: arrivals are the requests' own

    @staticmethod
    def of(name: str, requests: Iterable[SimulatedRequest], **origin: object) -> "Workload":
        """A workload of requests that are in memory, put in order of arrival."""
        kept = sorted(requests, key=lambda request: request.arrival_seconds)
        arms = dict.fromkeys(arm for request in kept for arm in request.acceptance)
        return Workload(name, tuple(arms), lambda: kept, origin)

    def __iter__(self) -> Iterator[SimulatedRequest]:
        """The requests; raises `TraceError` where one arrives before its predecessor."""
        latest = 0.0
        for request in self.make():
            if request.arrival_seconds < latest:
                raise TraceError(
                    f"request {request.id!r} arrives at {request.arrival_seconds} s, after one of "
                    f"{latest} s; sort the requests by arrival"
                )
            latest = request.arrival_seconds
            yield request

    def first(self, num_requests: int) -> "Workload":
        """Only the first requests."""
        return replace(self, make=lambda: itertools.islice(iter(self), num_requests))

    def faster(self, factor: float) -> "Workload":
        """The same requests at `factor` times the load: arrivals are that much closer."""
        if not 0.0 < factor < float("inf"):
            raise ConfigError(f"load factor {factor}; give a positive number")

        def make() -> Iterator[SimulatedRequest]:
            for request in self:
                yield replace(request, arrival_seconds=request.arrival_seconds / factor)

        return replace(self, make=make, origin={**self.origin, "load_factor": factor})

    def at_once(self) -> "Workload":
        """Everything arrives at the beginning."""

        def make() -> Iterator[SimulatedRequest]:
            for request in self:
                yield replace(request, arrival_seconds=0.0)

        return replace(self, make=make, origin={**self.origin, "arrivals": "at once"})

    def in_closed_loop(self, concurrency: int) -> "Workload":
        """So many requests at a time, in their order, whenever they came."""
        return replace(self.at_once(), concurrency=concurrency)

    def with_arrivals_of(self, arrivals: "Workload") -> "Workload":
        """Arrivals of another workload, texts of this one, repeated as often as needed."""

        def make() -> Iterator[SimulatedRequest]:
            texts = itertools.chain.from_iterable(self.make() for _ in itertools.count())
            first = next(iter(self.make()), None)
            if first is None:
                raise ConfigError(f"workload {self.name!r} has no requests to take texts from")
            for number, (arrival, text) in enumerate(zip(arrivals, texts, strict=False)):
                yield replace(
                    text, id=f"{number}:{text.id}", arrival_seconds=arrival.arrival_seconds
                )

        origin = {"texts": {self.name: self.origin}, "arrivals": {arrivals.name: arrivals.origin}}
        return Workload(f"{self.name} at {arrivals.name}", self.arms, make, origin)
