"""What is in a trace: counts, acceptance, choices, times, in one pass over its steps.

    print("\\n".join(summarise(Trace("runs/monday")).lines()))

Knows observations; nothing of files, or of what should have been chosen.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from sdcontrol.core import Choice, Observation
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.regimes import Regime, RegimeFinder

__all__ = ["ArmSummary", "CostSummary", "TraceSummary", "summarise"]

_SITUATION_EDGES = {"batch": (1, 4, 16, 64), "context": (512, 2048, 8192, 32768)}
_LEARNING_STEPS = 20  # of the cost estimate, before its predictions are counted


@dataclass(slots=True)
class ArmSummary:
    """One drafter arm. Lists follow positions in the draft."""

    times_chosen: int = 0  # requests times steps
    drafted: int = 0
    proposed: int = 0
    accepted: int = 0
    tested_at: list[int] = field(default_factory=list)  # chains: drafts verified up to here
    accepted_at: list[int] = field(default_factory=list)  # ... and accepted here

    @property
    def acceptance_rates(self) -> list[float]:
        """By position: accepted, given that those before it were."""
        return [a / t for a, t in zip(self.accepted_at, self.tested_at, strict=True) if t]

    def add_chain(self, proposed: int, accepted: int) -> None:
        """Count one verified chain by position."""
        missing = proposed - len(self.tested_at)
        self.tested_at.extend([0] * missing)
        self.accepted_at.extend([0] * missing)
        for position in range(min(proposed, accepted + 1)):
            self.tested_at[position] += 1
            self.accepted_at[position] += position < accepted


@dataclass(frozen=True, slots=True)
class CostSummary:
    """How well step times are foreseen by an online estimate that sees each step but once."""

    num_steps: int
    median_error: float  # |predicted / measured - 1|

    def __str__(self) -> str:
        return f"{self.num_steps} steps foreseen with a median error of {self.median_error:.0%}"


@dataclass(slots=True)
class TraceSummary:
    """What `summarise` found."""

    header_words: str
    cut: str
    num_requests: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0  # of the requests that have a record
    emitted_tokens: int = 0  # in decoding steps
    decoded_requests: int = 0  # requests times steps
    duration_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    arms: dict[str, ArmSummary] = field(default_factory=dict)
    choices: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    regimes: tuple[Regime, ...] = ()
    cost: CostSummary | None = None  # None: too few steps

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole duration; of a cut trace, which knows no requests in flight, those of its steps."""
        tokens = max(self.output_tokens, self.emitted_tokens) if self.cut else self.output_tokens
        return tokens / self.duration_seconds if self.duration_seconds else 0.0

    def lines(self) -> list[str]:
        """The summary in words."""
        return [*_counts(self), *_arm_lines(self.arms), *_choice_lines(self), *_closing(self)]


def summarise(trace: Trace) -> TraceSummary:
    """Read a trace once and say what is in it."""
    summary = TraceSummary(_words_of_header(trace), trace.cut)
    for record in trace.requests():
        summary.num_requests += 1
        summary.prompt_tokens += record.prompt_tokens
        summary.output_tokens += record.output_tokens
        summary.finish_reasons[record.finish_reason or "not ended"] += 1
    regimes, cost, errors = RegimeFinder(trace.num_steps), _cost_of(trace), []
    for step in trace.steps():
        observation = step.observation
        end = step.start_seconds + _measured(observation.timing.total_seconds)
        summary.duration_seconds = max(summary.duration_seconds, _measured(end))
        _add(summary, observation)
        regimes.add(summary.num_steps, observation)
        summary.num_steps += 1
        errors.append(_error(cost, observation))
    summary.regimes = regimes.found()
    known = [error for error in errors[_LEARNING_STEPS:] if error is not None]
    if known:
        summary.cost = CostSummary(len(known), median(known))
    return summary


def _cost_of(trace: Trace) -> OnlineCost:
    """As a fresh one would have been in the run."""
    if trace.machine is None:
        return OnlineCost(token_edges=trace.token_edges)
    return trace.machine.online_cost(trace.token_edges)


def _error(cost: OnlineCost, observation: Observation) -> float | None:
    """How far the cost estimate was off, before it learns of the step."""
    cost.last_prediction = None
    cost.update(observation)
    said = cost.last_prediction
    if said is None or said.measured_seconds <= 0.0:
        return None
    return abs(said.predicted_seconds / said.measured_seconds - 1.0)


def _add(summary: TraceSummary, observation: Observation) -> None:
    timing = observation.timing
    spent = {f"draft {family}": seconds for family, seconds in timing.draft_seconds.items()}
    spent["verify"] = timing.verify_seconds
    spent["controller"] = timing.controller_seconds
    spent["overhead"] = timing.overhead_seconds
    for phase, seconds in spent.items():
        summary.seconds[phase] = summary.seconds.get(phase, 0.0) + _measured(seconds)
    summary.faults.update(fault.partition(":")[0] for fault in observation.faults)
    summary.emitted_tokens += sum(observation.emitted)
    summary.decoded_requests += len(observation.view.requests)
    batch = _bucket("batch", len(observation.view.requests))
    for row, choice in enumerate(observation.plan.choices):
        context = _bucket("context", observation.view.requests[row].context_tokens)
        summary.choices.setdefault((batch, context), Counter())[_name(choice)] += 1
        if choice.drafter is not None:
            _add_draft(summary.arms.setdefault(choice.drafter, ArmSummary()), observation, row)


def _measured(seconds: float) -> float:
    """0 where nobody measured."""
    return seconds if math.isfinite(seconds) else 0.0


def _add_draft(arm: ArmSummary, observation: Observation, row: int) -> None:
    proposed, accepted = observation.proposed[row], observation.accepted[row]
    arm.times_chosen += 1
    arm.drafted += observation.drafted[row]
    arm.proposed += proposed
    arm.accepted += accepted
    if observation.accepted_nodes is None:
        arm.add_chain(proposed, accepted)


def _bucket(kind: str, value: int) -> str:
    """The range that `value` is in, in words."""
    low = 0
    for edge in _SITUATION_EDGES[kind]:
        if value <= edge:
            return f"{kind} {low + 1}-{edge}" if low + 1 < edge else f"{kind} {edge}"
        low = edge
    return f"{kind} above {low}"


def _name(choice: Choice) -> str:
    return f"{choice.drafter}:{choice.num_draft_tokens}" if choice.drafter else "off"


# ---- words


def _words_of_header(trace: Trace) -> str:
    header = trace.header
    policy = dict(header.policy or {"kind": "an unknown policy"})
    kind = str(policy.pop("kind"))
    model = header.models.get("target")
    return (
        f"{header.source} {header.created}"
        + (f", {model.name}" if model else "")
        + (f" on {header.hardware['device']}" if "device" in header.hardware else "")
        + ", "
        + " ".join([kind, *(f"{name}={_word(value)}" for name, value in policy.items())])
    )


def _word(value: object) -> str:
    """A setting as one would write it on a command line or in YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def _counts(summary: TraceSummary) -> Iterator[str]:
    yield summary.header_words
    if summary.cut:
        yield f"CUT: {summary.cut}"
    ends = ", ".join(f"{count} {reason}" for reason, count in summary.finish_reasons.most_common())
    yield (
        f"{summary.num_requests} requests ({ends}): {summary.prompt_tokens} prompt and "
        f"{summary.output_tokens} output tokens"
    )
    per_step = summary.emitted_tokens / max(summary.decoded_requests, 1)
    yield (
        f"{summary.num_steps} steps in {summary.duration_seconds:.2f} s, "
        f"{summary.tokens_per_second:.0f} tokens/s, {per_step:.2f} tokens per request and step"
    )
    total = sum(summary.seconds.values()) or 1.0
    longest = sorted(summary.seconds.items(), key=lambda item: -item[1])
    shares = [f"{name} {spent / total:.0%}" for name, spent in longest]
    yield f"time: {', '.join(shares)}"


def _arm_lines(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    for name, arm in sorted(arms.items()):
        rates = " ".join(f"{rate:.2f}" for rate in arm.acceptance_rates)
        yield (
            f"{name}: chosen {arm.times_chosen} times, {arm.drafted} tokens drafted, "
            f"{arm.proposed} submitted, {arm.accepted} accepted"
            + (f"; acceptance by position {rates}" if rates else "")
        )


def _choice_lines(summary: TraceSummary) -> Iterator[str]:
    for (batch, context), counts in sorted(summary.choices.items()):
        total = sum(counts.values())
        common = ", ".join(f"{name} {n / total:.0%}" for name, n in counts.most_common(4))
        yield f"{batch}, {context}: {common}"


def _closing(summary: TraceSummary) -> Iterator[str]:
    yield from map(str, summary.regimes)
    if summary.cost is not None:
        yield f"cost: {summary.cost}"
    for fault, count in summary.faults.most_common():
        yield f"fault: {fault}, {count} times"
