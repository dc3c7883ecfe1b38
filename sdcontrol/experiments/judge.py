"""From blocks to comparisons: who is claimed to differ, and when a run may end.

Knows the statistics and how they go together; nothing of engines, files or pages.

A difference is claimed where the corrected p-value is at most alpha *and* the interval excludes 1.
P-values are taken at the planned looks only, corrected for all comparisons (Holm) and for the share
of alpha that a look has; the smallest of a comparison's looks counts. So the chance of any false
claim in a run stays below alpha, however early it ends.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.metrics import METRICS, ratio_of
from sdcontrol.experiments.records import BlockRecord
from sdcontrol.experiments.results import Comparison, DriftResult, Interval, Verdict
from sdcontrol.experiments.statistics import (
    Estimate,
    blocks_needed,
    holm,
    noise_of,
    signed_rank_p,
    smallest_effect,
    spending,
    trimmed_ratio,
)

__all__ = ["Decision", "compare", "counted", "decide", "drift_of", "fewest_blocks", "log_ratios"]

_SPEEDS = ("tokens_per_second", "slo_requests_per_second")
_NONE: Verdict = "no difference shown"
Key = tuple[str, str, str]
"""Arm, the arm it is compared with, metric."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a run ends here, and why."""

    is_done: bool
    reason: str


def counted(blocks: Sequence[BlockRecord]) -> list[BlockRecord]:
    """Without warm-up."""
    return [block for block in blocks if not block.is_warmup]


def decide(experiment: Experiment, blocks: Sequence[BlockRecord]) -> Decision:
    """Whether these blocks are enough."""
    kept = counted(blocks)
    if len(kept) >= experiment.blocks:
        return Decision(True, f"all {experiment.blocks} planned blocks were run")
    failed = {run.arm for block in blocks for run in block.runs if run.failed}
    if failed and not _may_go_on(experiment, failed):
        return Decision(True, "too few arms are left to compare")
    rule = experiment.stopping
    if rule.early and len(kept) in spending(experiment.blocks, rule.looks, rule.alpha):
        left = [pair for pair in experiment.comparisons if not failed & {*pair}]
        claimed = [c for c in compare(experiment, blocks) if c.verdict != _NONE]
        shown = sum((c.arm, c.baseline) in left for c in claimed)
        if left and shown == len(left) * len(experiment.metrics):
            which = "every comparison that is left" if failed else "every comparison"
            return Decision(True, f"{which} shows a difference after {len(kept)} blocks")
    return Decision(False, f"{len(kept)} of {experiment.blocks} planned blocks were run")


def _may_go_on(experiment: Experiment, failed: set[str]) -> bool:
    """Whether two arms that are to be compared are left."""
    return any(not failed & {arm, other} for arm, other in experiment.comparisons)


def compare(experiment: Experiment, blocks: Sequence[BlockRecord]) -> tuple[Comparison, ...]:
    """All comparisons for which there is at least one pair of runs."""
    kept = counted(blocks)
    found = {
        (arm, other, metric): log_ratios(kept, arm, other, metric)
        for metric in experiment.metrics
        for arm, other in experiment.comparisons
    }
    raw = {key: signed_rank_p(list(ratios.values())) for key, ratios in found.items()}
    adjusted = _adjusted(experiment, found, len(kept))
    return tuple(
        _comparison(experiment, key, list(found[key].values()), raw[key], adjusted[key])
        for key in found
        if found[key]
    )


def log_ratios(
    blocks: Sequence[BlockRecord], arm: str, other: str, metric: str
) -> dict[int, float]:
    """By place among the counted blocks, the log ratio where both arms have the metric."""
    ratios: dict[int, float] = {}
    for place, block in enumerate(blocks):
        mine, theirs = block.run(arm), block.run(other)
        if mine is not None and theirs is not None:
            ratio = ratio_of(metric, mine, theirs)
            if ratio is not None:
                ratios[place] = math.log(ratio)
    return ratios


def _adjusted(
    experiment: Experiment, found: Mapping[Key, Mapping[int, float]], num_blocks: int
) -> dict[Key, float]:
    """The smallest corrected p-value over the looks that there have been."""
    rule = experiment.stopping
    smallest = dict.fromkeys(found, 1.0)
    for look, share in spending(experiment.blocks, rule.looks, rule.alpha).items():
        if look > num_blocks or share <= 0:
            continue
        seen = [[r for place, r in ratios.items() if place < look] for ratios in found.values()]
        corrected = holm([signed_rank_p(ratios) for ratios in seen])
        for key, p_value in zip(found, corrected, strict=True):
            smallest[key] = min(smallest[key], p_value * rule.alpha / share)
    return smallest


def _comparison(
    experiment: Experiment, key: Key, ratios: Sequence[float], p_value: float, adjusted: float
) -> Comparison:
    arm, other, metric = key
    estimate = trimmed_ratio(ratios, confidence=1 - experiment.stopping.alpha)
    excludes = len(ratios) > 1 and not estimate.low <= 1.0 <= estimate.high
    is_claimed = adjusted <= experiment.stopping.alpha and excludes
    verdict = _verdict(metric, estimate.value) if is_claimed else _NONE
    interval = _interval(estimate, len(ratios))
    needed = _needed(experiment, ratios, estimate.value)
    return Comparison(
        arm=arm,
        baseline=other,
        metric=metric,
        ratio=interval,
        p_value=p_value,
        p_adjusted=adjusted,
        num_blocks=len(ratios),
        num_blocks_needed=needed,
        verdict=verdict,
        sentence=_sentence(key, interval, ratios, verdict=verdict, p_value=adjusted, needed=needed),
    )


def _interval(estimate: Estimate, num_blocks: int) -> Interval:
    """One block has an interval of no width: `summary` says so in a note."""
    if num_blocks == 1:
        return Interval(value=estimate.value, low=estimate.value, high=estimate.value)
    return Interval(value=estimate.value, low=estimate.low, high=estimate.high)


def _verdict(metric: str, ratio: float) -> Verdict:
    is_better = (ratio > 1) == bool(METRICS[metric].higher_is_better)
    if metric in _SPEEDS:
        return "faster" if is_better else "slower"
    return "better" if is_better else "worse"


def _sentence(
    key: Key,
    ratio: Interval,
    ratios: Sequence[float],
    *,
    verdict: Verdict,
    p_value: float,
    needed: int | None,
) -> str:
    arm, other, metric = key
    size = f"{ratio.value:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]"
    above = sum(r > 0 for r in ratios)
    counts = f"above 1 in {above} of {len(ratios)} blocks, corrected p = {p_value:.2g}"
    if verdict != _NONE:
        return f"{arm} is {verdict} than {other}: {metric} {size} ({counts})."
    more = f"; one of this size takes about {needed} blocks to show" if needed else ""
    return f"No difference shown between {arm} and {other}: {metric} {size} ({counts}{more})."


def fewest_blocks(experiment: Experiment) -> int:
    """With fewer planned blocks than these nothing can be claimed, however large."""
    number = blocks_needed(1e9, 0.0, alpha=_single_alpha(experiment))
    if number <= experiment.blocks:
        return number
    return fewest_blocks(experiment.model_copy(update={"blocks": number}))  # with looks elsewhere


def _single_alpha(experiment: Experiment) -> float:
    """What the last look leaves to the strictest of the comparisons."""
    rule = experiment.stopping
    last = list(spending(experiment.blocks, rule.looks, rule.alpha).values())[-1]
    return last / max(len(experiment.comparisons) * len(experiment.metrics), 1)


def _needed(experiment: Experiment, ratios: Sequence[float], ratio: float) -> int | None:
    if len(ratios) < 2 or abs(math.log(ratio)) < 1e-6:
        return None
    return blocks_needed(ratio - 1.0, noise_of(ratios), alpha=_single_alpha(experiment))


def drift_of(experiment: Experiment, blocks: Sequence[BlockRecord]) -> DriftResult | None:
    """The baseline's second run over its first, in blocks that have both; None without any.

    By the first of the compared metrics: under a load, say, output per second does not tell of latencies.
    """
    metric = experiment.metrics[0]
    ratios: list[tuple[int, float]] = []
    for block in counted(blocks):
        first = block.run(experiment.reference)
        second = block.run(experiment.reference, is_repeat=True)
        ratio = ratio_of(metric, second, first) if first and second else None
        if ratio is not None:
            ratios.append((block.block, math.log(ratio)))
    if not ratios:
        return None
    logs = [ratio for _, ratio in ratios]
    noise = noise_of(logs)
    estimate = trimmed_ratio(logs)
    smallest = None
    if len(logs) > 1:
        smallest = smallest_effect(len(counted(blocks)), noise, alpha=_single_alpha(experiment))
    if smallest is not None and not METRICS[metric].higher_is_better:
        smallest = 1.0 / smallest
    return DriftResult(
        metric=metric,
        ratio=_interval(estimate, len(logs)),
        noise=noise,
        per_block=tuple((block, math.exp(ratio)) for block, ratio in ratios),
        smallest_ratio=smallest,
    )
