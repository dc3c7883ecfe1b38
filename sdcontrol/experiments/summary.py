"""From blocks to `Results`: sums, means, quantiles, and the verdict in words.

Knows records and what `judge` says of them. Nothing but finished blocks goes in, so an interrupted
run has results too, and a resumed one the same as one that was not.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import numpy as np

from sdcontrol.experiments.config import Arm, Beginning, Experiment
from sdcontrol.experiments.judge import compare, counted, decide, drift_of, fewest_blocks
from sdcontrol.experiments.metrics import METRICS
from sdcontrol.experiments.records import BlockRecord, DraftCounts, Place, RunRecord
from sdcontrol.experiments.results import (
    LATENCIES,
    AcceptanceFacts,
    ArmResult,
    BlockFacts,
    Comparison,
    MetricSummary,
    Results,
    Stopping,
    TextCheck,
)
from sdcontrol.experiments.samples import joined
from sdcontrol.experiments.statistics import bootstrap_mean
from sdcontrol.experiments.workload_settings import Workload

__all__ = ["summarise"]

_MOST_DIFFERENCES = 20
_FIXED = ("off", "static", "concurrency_schedule")  # policies that learn nothing
_BEGINNINGS: Mapping[Beginning, str] = {
    "kept": "the controller learns on from block to block, as one that stays in service does",
    "cold": "a new controller in every block, which knows nothing when it begins",
    "warm": "a new controller in every block, told what the last steps of this arm's earlier blocks came to",
}
_RESUMED: Mapping[Beginning, str] = {  # live; simulated blocks are run again
    "kept": "; after an interruption it begins anew",
    "cold": "",
    "warm": "; after an interruption those begin anew",
}


def summarise(
    experiment: Experiment,
    blocks: Sequence[BlockRecord],
    place: Place,
    *,
    interrupted: bool = False,
) -> Results:
    """The results of these blocks."""
    decision = decide(experiment, blocks)
    comparisons = compare(experiment, blocks)
    arms = tuple(_arm(experiment, arm, blocks, place) for arm in experiment.arms)
    texts = _texts(blocks)
    kept = len(counted(blocks))
    stopped = "interrupted: " if interrupted and not decision.is_done else ""
    return Results(
        name=experiment.name,
        title=experiment.title or experiment.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        is_complete=decision.is_done,
        is_simulated=place.is_simulated,
        setting=place.setting,
        config=experiment.resolved(),
        baseline=experiment.reference,
        arms=arms,
        comparisons=comparisons,
        drift=drift_of(experiment, blocks),
        texts=texts,
        verdict=_verdict(comparisons, arms, texts, experiment.reference),
        notes=(*_notes(experiment, kept), *place.notes),
        stopping=Stopping(
            num_blocks=kept,
            planned_blocks=experiment.blocks,
            num_warmup_blocks=len(blocks) - kept,
            reason=stopped + decision.reason,
        ),
    )


def _arm(
    experiment: Experiment, arm: Arm, blocks: Sequence[BlockRecord], place: Place
) -> ArmResult:
    kept = [run for block in counted(blocks) if (run := block.run(arm.name)) is not None]
    failures = [r.failed for b in blocks for r in b.runs if r.arm == arm.name and r.failed]
    return ArmResult(
        name=arm.name,
        description=arm.description,
        policy=arm.policy.model_dump(mode="json"),
        is_adaptive=_is_adaptive(arm),
        failed=failures[0] if failures else "",
        metrics=_metrics(kept),
        blocks=tuple(
            _facts(block, run)
            for block in blocks
            for run in block.runs
            if run.arm == arm.name and not run.failed
        ),
        lengths=_lengths(kept),
        acceptance=_acceptance(kept),
        latencies=_latencies(kept),
        steps=joined([run.steps for run in kept]),
        roofline=place.roofline,
    )


def _is_adaptive(arm: Arm) -> bool:
    return getattr(arm.policy, "kind", "") not in _FIXED


def _facts(block: BlockRecord, run: RunRecord) -> BlockFacts:
    return BlockFacts(
        block=block.block,
        seconds=run.seconds,
        tokens=run.tokens,
        tokens_per_second=run.metrics.get("tokens_per_second", 0.0),
        start_seconds=run.start_seconds,
        is_warmup=block.is_warmup,
        is_repeat=run.is_repeat,
        metrics=run.metrics,
    )


def _metrics(runs: Sequence[RunRecord]) -> dict[str, MetricSummary]:
    """Means over blocks; one block has an interval of no width, and a note says so."""
    found: dict[str, MetricSummary] = {}
    for name, metric in METRICS.items():
        values = [run.metrics[name] for run in runs if name in run.metrics]
        if not values:
            continue
        mean = bootstrap_mean(values)
        low, high = (max(mean.low, 0.0), mean.high) if len(values) > 1 else (mean.value, mean.value)
        found[name] = MetricSummary(
            value=mean.value,
            low=low,
            high=high,
            unit=metric.unit,
            higher_is_better=metric.higher_is_better,
        )
    return found


def _lengths(runs: Sequence[RunRecord]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for run in runs:
        for drafter, lengths in run.lengths.items():
            mine = total.setdefault(drafter, {})
            for length, count in lengths.items():
                mine[length] = mine.get(length, 0) + count
    return {
        drafter: dict(sorted(lengths.items(), key=lambda item: int(item[0])))
        for drafter, lengths in sorted(total.items())
    }


def _acceptance(runs: Sequence[RunRecord]) -> dict[str, AcceptanceFacts]:
    drafters = sorted({drafter for run in runs for drafter in run.drafts})
    return {
        drafter: _added([run.drafts[drafter] for run in runs if drafter in run.drafts])
        for drafter in drafters
    }


def _added(counts: Sequence[DraftCounts]) -> AcceptanceFacts:
    positions = max(len(count.by_position) for count in counts)
    by_position = [(0, 0)] * positions
    for count in counts:
        for at, (tested, accepted) in enumerate(count.by_position):
            before = by_position[at]
            by_position[at] = before[0] + tested, before[1] + accepted
    accepted, steps = (sum(getattr(c, name) for c in counts) for name in ("accepted", "steps"))
    return AcceptanceFacts(
        drafted=sum(count.drafted for count in counts),
        proposed=sum(count.proposed for count in counts),
        accepted=accepted,
        by_position=tuple(by_position),
        acceptance_length=1.0 + accepted / steps if steps else 1.0,
    )


def _latencies(runs: Sequence[RunRecord]) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for name in LATENCIES:
        values = [value for run in runs for value in run.latencies.get(name, ())]
        if values:
            found[name] = tuple(float(q) for q in np.percentile(values, np.arange(101)))
    return found


def _texts(blocks: Sequence[BlockRecord]) -> TextCheck:
    differences = [difference for block in blocks for difference in block.differences]
    return TextCheck(
        num_compared=sum(block.num_texts for block in blocks),
        num_differing=len(differences),
        first_differences=tuple(differences[:_MOST_DIFFERENCES]),
    )


def _verdict(
    comparisons: Sequence[Comparison],
    arms: Sequence[ArmResult],
    texts: TextCheck,
    reference: str,
) -> str:
    alone = "There is one arm, so nothing is compared."
    nothing = "Nothing was compared yet." if len(arms) > 1 else alone
    said = [comparison.sentence for comparison in comparisons] or [nothing]
    said = [*_headline(comparisons, arms, reference), *said]
    said += [f"{arm.name} failed: {arm.failed}." for arm in arms if arm.failed]
    return " ".join([*said, *([_text_sentence(texts)] if texts.num_compared else [])])


def _headline(
    comparisons: Sequence[Comparison], arms: Sequence[ArmResult], reference: str
) -> list[str]:
    """What became of the adaptive arm, where there is one: against the baseline and the others."""
    adaptive = [arm.name for arm in arms if arm.is_adaptive]
    speeds = {
        c.baseline: c
        for c in comparisons
        if [c.arm] == adaptive and c.metric == "tokens_per_second"
    }
    if reference not in speeds or len(speeds) < 2:
        return []
    is_all = len(speeds) == len(arms) - 1
    others = "the other settings" if is_all else "those that it was compared with"
    first = speeds.pop(reference)
    hardest = min(speeds.values(), key=lambda comparison: comparison.ratio.value)
    return [
        f"{first.arm} ran at {_times(first)} the speed of {reference} and at {_times(hardest)} "
        f"that of {hardest.baseline}, the fastest of {others}."
    ]


def _times(comparison: Comparison) -> str:
    ratio = comparison.ratio
    return f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"


def _text_sentence(texts: TextCheck) -> str:
    if not texts.num_differing:
        return (
            f"All arms wrote the same text, token for token ({texts.num_compared} texts compared)."
        )
    first = texts.first_differences[0]
    return (
        f"{texts.num_differing} of {texts.num_compared} texts differ from the baseline's, first "
        f"that of {first.arm} for request {first.request!r} at output token {first.position}."
    )


def _notes(experiment: Experiment, num_blocks: int) -> tuple[str, ...]:
    notes: list[str] = []
    for begins, what in _BEGINNINGS.items():
        names = [
            arm.name for arm in experiment.arms if _is_adaptive(arm) and arm.controller == begins
        ]
        if names:
            resumed = _RESUMED[begins] if experiment.backend == "live" else ""
            notes.append(f"{', '.join(names)}: {what}{resumed}.")
    if experiment.workload.sampling.temperature and any(
        arm.verification == "rejection" for arm in experiment.arms
    ):
        notes.append("Rejection verification keeps the distribution of texts, not each text.")
    if experiment.backend == "trace" and _says_how_to_decode(experiment):
        notes.append(
            "Simulated requests are as long as recorded, and sampled as recorded: num_tokens, "
            "sampling and verification of the file change nothing."
        )
    if experiment.comparisons and fewest_blocks(experiment) > experiment.blocks:
        notes.append(
            f"{experiment.blocks} blocks cannot show any difference, however large, in "
            f"{len(experiment.comparisons) * len(experiment.metrics)} comparisons at "
            f"alpha {experiment.stopping.alpha:g}: plan at least {fewest_blocks(experiment)}."
        )
    if num_blocks == 1:
        notes.append("One block: nothing is known of how much values vary, so intervals are empty.")
    return tuple(notes)


def _says_how_to_decode(experiment: Experiment) -> bool:
    """Whether the file says of requests what only a model can follow."""
    said, unsaid = experiment.workload, Workload.model_fields
    is_coupled = all(arm.verification == "coupled" for arm in experiment.arms)
    return not is_coupled or any(
        getattr(said, name) != unsaid[name].default for name in ("num_tokens", "sampling")
    )
