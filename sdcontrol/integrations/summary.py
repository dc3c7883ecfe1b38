"""What speculation did, as lines for people and as a record for machines.

Knows the statistics of an engine; nothing of terminals or files.
"""

from dataclasses import asdict

from sdcontrol.engine.history import RequestHistory
from sdcontrol.engine.stats import EngineStats

__all__ = ["request_lines", "summary_lines", "summary_record"]

_HEADER = f"{'drafter':<20} {'steps':>7} {'proposed':>9} {'accepted':>9} {'rate':>6} {'length':>7}"


def summary_lines(stats: EngineStats) -> list[str]:
    """A few lines of text: speed, acceptance by drafter, where the time went, what went wrong."""
    seconds = sum(stats.seconds.values())
    lines = [
        f"{stats.emitted} tokens in {stats.steps} steps and {seconds:.2f} s: "
        f"{_per(stats.emitted, seconds):.1f} tokens/s, "
        f"{stats.tokens_per_step:.2f} tokens per request and step"
    ]
    lines += _drafter_lines(stats)
    shares = sorted(stats.seconds.items(), key=lambda item: -item[1])
    if seconds:
        parts = ", ".join(f"{name} {100 * spent / seconds:.0f}%" for name, spent in shares)
        lines.append(f"time: {parts}")
    if stats.faults:
        lines.append(f"faults: {stats.num_faults}, the first: {stats.faults[0]}")
    return lines


def request_lines(stats: EngineStats, most_requests: int = 16) -> list[str]:
    """What was chosen for each of the latest requests and why, in words."""
    latest = list(stats.requests.values())[-most_requests:]
    return [line for history in latest for line in history.lines()]


def summary_record(stats: EngineStats) -> dict[str, object]:
    """The same for machines: plain numbers, strings, lists and mappings."""
    drafters = {
        arm: {
            **asdict(drafter),
            "acceptance_rate": drafter.acceptance_rate,
            "acceptance_length": drafter.acceptance_length,
        }
        for arm, drafter in stats.drafters.items()
    }
    chosen = sorted(stats.lengths.items())
    return {
        "steps": stats.steps,
        "emitted_tokens": stats.emitted,
        "prefill_tokens": stats.prefill_tokens,
        "tokens_per_step": stats.tokens_per_step,
        "tokens_per_second": _per(stats.emitted, sum(stats.seconds.values())),
        "seconds": dict(stats.seconds),
        "drafters": drafters,
        "choices": [
            {"drafter": arm, "num_draft_tokens": length, "times": times}
            for (arm, length), times in chosen
        ],
        "shadows": {
            arm: {"tokens": shadow.proposed, "accepted": shadow.accepted}
            for arm, shadow in stats.shadows.items()
        },
        "requests": [_request_record(history) for history in stats.requests.values()],
        "num_faults": stats.num_faults,
        "faults": list(stats.faults),
    }


def _request_record(history: RequestHistory) -> dict[str, object]:
    return {
        "id": history.id,
        "steps": history.steps,
        "emitted_tokens": history.emitted,
        "proposed": dict(history.proposed),
        "accepted": dict(history.accepted),
        "choices": [
            {"drafter": c.drafter or "off", "num_draft_tokens": c.num_draft_tokens, "steps": steps}
            for c, steps in history.choices.items()
        ],
        "changes": [
            {
                "step": change.step,
                "generated_tokens": change.generated_tokens,
                "drafter": change.choice.drafter or "off",
                "num_draft_tokens": change.choice.num_draft_tokens,
                "reason": change.reason,
                "known": change.known,
            }
            for change in history.changes
        ],
    }


def _drafter_lines(stats: EngineStats) -> list[str]:
    if not stats.drafters:
        return ["no drafts"]
    off = sum(times for (arm, _), times in stats.lengths.items() if arm == "off")
    rows = [
        f"{arm:<20} {drafter.steps:>7} {drafter.proposed:>9} {drafter.accepted:>9} "
        f"{100 * drafter.acceptance_rate:>5.0f}% {drafter.acceptance_length:>7.2f}"
        for arm, drafter in sorted(stats.drafters.items())
    ]
    return [_HEADER, *rows, f"{'off':<20} {off:>7}"]


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0
