"""The requests of a comparison as its author describes them: prompts, arrivals, sampling.

Knows what may be said; nothing of files' contents, tokens or engines.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from sdcontrol.engine.bundled import KINDS
from sdcontrol.plain_numbers import PlainNumbers

__all__ = ["ClosedLoop", "OpenLoop", "Recorded", "Sampling", "Settings", "Workload", "nearest"]


def nearest(name: str, valid: "tuple[str, ...] | list[str]") -> str:
    """ "did you mean ...", with all that is valid."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return f"did you mean {close[0]!r}? Valid: {', '.join(valid)}" if close else "there are none"


class Settings(PlainNumbers):
    """Frozen, and unknown keys are refused; so are numbers that are none."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class ClosedLoop(Settings):
    """So many requests at a time; the next begins when one has ended."""

    kind: Literal["closed"] = "closed"
    concurrency: int = Field(8, ge=1, le=4096, description="requests in flight, 1 to 4096")


class OpenLoop(Settings):
    """Requests come whether or not others have ended: a Poisson process, by the block's seed."""

    kind: Literal["open"] = "open"
    requests_per_second: float = Field(gt=0, le=1e6, description="a rate above 0")


class Recorded(Settings):
    """Requests come when the file says: `arrival_seconds` of each line, or the trace's."""

    kind: Literal["recorded"] = "recorded"
    speed: float = Field(1.0, gt=0, le=1e6, description="2 lets time pass twice as fast")


Arrivals = Annotated[ClosedLoop | OpenLoop | Recorded, Field(discriminator="kind")]


class Sampling(Settings):
    """Greedy unless there is a temperature."""

    temperature: float = Field(0.0, ge=0, le=100, description="0 is greedy")
    top_k: int | None = Field(None, ge=1, description="a whole number from 1")
    top_p: float | None = Field(None, gt=0, le=1, description="above 0, at most 1")


class Workload(Settings):
    """The requests of one block; the same for every arm."""

    kinds: Mapping[str, Annotated[int, Field(ge=0, le=4096)]] = Field(
        default_factory=dict,
        description=f"bundled prompts per block, by kind: {', '.join(KINDS)}",
    )
    min_tokens: int = Field(0, ge=0, le=4096, description="length of bundled prompts; 0: mixed")
    files: tuple[str, ...] = Field(
        (), description='JSON lines with "prompt", or text files of one prompt each'
    )
    trace: str | None = Field(
        None, min_length=1, description="a trace to take requests from: its folder, or bundled:NAME"
    )
    requests_per_block: int = Field(
        8, ge=1, le=4096, description="requests taken from files or a trace for one block"
    )
    num_tokens: int = Field(128, ge=1, le=65536, description="most output tokens per request")
    arrivals: Arrivals = ClosedLoop()
    sampling: Sampling = Sampling()

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: Mapping[str, int]) -> Mapping[str, int]:
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"no kind of prompt {kind!r}; {nearest(kind, KINDS)}")
        return kinds

    @model_validator(mode="after")
    def _has_requests(self) -> Self:
        sources = [bool(sum(self.kinds.values())), bool(self.files), self.trace is not None]
        if sum(sources) != 1:
            raise ValueError("give exactly one of kinds (with a number above 0), files and trace")
        if isinstance(self.arrivals, Recorded) and self.kinds:
            raise ValueError("bundled prompts have no recorded arrivals; use closed or open")
        return self
