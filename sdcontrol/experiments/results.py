"""What came of a comparison, as one file: for the page, the terminal and machines alike.

Knows facts and their names. Nothing here measures, decides or draws: the statistics fill it in,
whoever shows it adds no number of its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from sdcontrol.json_files import read_model
from sdcontrol.whole_files import write_whole

__all__ = [
    "LATENCIES",
    "AcceptanceFacts",
    "ArmResult",
    "BlockFacts",
    "Comparison",
    "Difference",
    "DriftResult",
    "Interval",
    "MetricSummary",
    "Results",
    "Roofline",
    "Setting",
    "StepSample",
    "Stopping",
    "TextCheck",
    "write_atomically",
]

LATENCIES = ("ttft_seconds", "tpot_seconds", "e2e_seconds")
Verdict = Literal["faster", "slower", "better", "worse", "no difference shown"]


class Record(BaseModel):
    """A frozen value that refuses unknown keys; NaN is written as null."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Setting(Record):
    """Where it ran."""

    machine: str
    processor: str
    threads: int
    device: str
    versions: Mapping[str, str]


class Interval(Record):
    """A value and an interval around it."""

    value: float
    low: float
    high: float


class MetricSummary(Interval):
    """One metric of one arm; the interval is a bootstrap over blocks, at 95 %."""

    unit: str  # "tokens/s", "s", "share", "FLOPs/byte", ..., or "" for a plain count
    higher_is_better: bool | None  # None: neither


class BlockFacts(Record):
    """One block of one arm."""

    block: int  # from 0, warm-up blocks included
    seconds: float
    tokens: int  # output tokens
    tokens_per_second: float
    start_seconds: float  # since the run began; time while it was interrupted is left out
    is_warmup: bool = False
    is_repeat: bool = False  # A/A: the baseline once more, in the same block
    metrics: Mapping[str, float] = Field(default_factory=dict)


class AcceptanceFacts(Record):
    """What became of one drafter's tokens."""

    drafted: int
    proposed: int
    accepted: int
    by_position: tuple[tuple[int, int], ...]  # of draft token j: (times tested, times accepted)
    acceptance_length: float  # tokens per verification of a draft, bonus token included


class StepSample(Record):
    """Evenly sampled steps of an arm, as columns of one length."""

    time_seconds: tuple[float, ...] = ()  # when it began, since the run began
    batch_size: tuple[int, ...] = ()  # decoding requests
    num_tokens: tuple[int, ...] = ()  # verified, prompt tokens of the step included
    kv_tokens: tuple[int, ...] = ()  # read, over all decoding requests
    intensity: tuple[float | None, ...] = ()  # FLOPs/byte of the verifying forward
    flops_per_second: tuple[float | None, ...] = ()
    predicted_seconds: tuple[float | None, ...] = ()  # the whole step, as the planner believed
    measured_seconds: tuple[float, ...] = ()  # the whole step
    draft_seconds: tuple[float, ...] = ()
    verify_seconds: tuple[float, ...] = ()
    controller_seconds: tuple[float, ...] = ()
    overhead_seconds: tuple[float, ...] = ()
    emitted: tuple[int, ...] = ()  # output tokens
    choices: tuple[Mapping[str, int], ...] = ()  # "ngram 4" or "off": requests


class Roofline(Record):
    """Ceilings of the machine."""

    peak_flops_per_second: float
    bandwidth_bytes_per_second: float
    ridge: float  # FLOPs/byte
    source: str = ""  # measured, or out of a table


class ArmResult(Record):
    """One arm of a comparison."""

    name: str
    description: str
    policy: Mapping[str, JsonValue]
    is_adaptive: bool = False  # its controller learned on through the blocks
    failed: str = ""  # why it ended before its time
    metrics: Mapping[str, MetricSummary] = Field(default_factory=dict)
    blocks: tuple[BlockFacts, ...] = ()
    lengths: Mapping[str, Mapping[str, int]] = Field(default_factory=dict)
    # ^ by drafter, "off" included, and draft length: requests times steps
    acceptance: Mapping[str, AcceptanceFacts] = Field(default_factory=dict)
    latencies: Mapping[str, tuple[float, ...]] = Field(default_factory=dict)
    # ^ one of LATENCIES: its quantiles from 0 to 100 %, in steps of 1 %
    steps: StepSample = StepSample()
    roofline: Roofline | None = None


class Comparison(Record):
    """One arm against another by one metric: inside each block, then over blocks."""

    arm: str
    baseline: str
    metric: str
    ratio: Interval  # of the arm over the baseline: geometric mean, extreme blocks trimmed
    p_value: float
    p_adjusted: float  # for the number of comparisons (Holm) and of looks
    num_blocks: int
    num_blocks_needed: int | None = None  # to show a difference as large as the one seen
    verdict: Verdict
    sentence: str


class DriftResult(Record):
    """The machine's own noise: the baseline run twice in the same blocks (A/A)."""

    metric: str = "tokens_per_second"  # the first of those compared
    ratio: Interval  # second over first
    noise: float  # standard deviation of the log ratio of one block, outliers aside
    per_block: tuple[tuple[int, float], ...]  # (block, ratio)
    smallest_ratio: float | None  # change for the worse that so many blocks show, with power 0.8
    # ^ None: they are too few to show any


class Difference(Record):
    """Where a text first differs from the baseline's."""

    arm: str
    request: str
    position: int  # of the output token, from 0


class TextCheck(Record):
    """Outputs of all arms against the baseline's, token for token."""

    num_compared: int
    num_differing: int
    first_differences: tuple[Difference, ...] = ()


class Stopping(Record):
    """Why it ended when it did."""

    num_blocks: int  # counted ones
    planned_blocks: int
    num_warmup_blocks: int = 0
    reason: str


class Results(Record):
    """A comparison, complete or so far."""

    version: Literal[1] = 1
    name: str
    title: str
    created: str  # ISO 8601, with its zone
    is_complete: bool
    is_simulated: bool
    setting: Setting
    config: Mapping[str, JsonValue]
    baseline: str
    arms: tuple[ArmResult, ...]
    comparisons: tuple[Comparison, ...] = ()
    drift: DriftResult | None = None
    texts: TextCheck
    verdict: str
    notes: tuple[str, ...] = ()
    stopping: Stopping

    @classmethod
    def load(cls, path: Path) -> Self:
        """From a file. Raises `ConfigError` where it holds no results."""
        remedy = "give the results.json of sdcontrol ab"
        return read_model(path, cls, what="comparison's results", remedy=remedy)

    def dump(self, path: Path) -> Path:
        """Write the file at one stroke; returns its path."""
        return write_atomically(path, self.model_dump_json(indent=1) + "\n")


def write_atomically(path: Path, text: str) -> Path:
    """Write all of the file or leave it as it was, whenever the machine stops; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())
    return path
