"""Results as tables in Markdown."""

from collections.abc import Mapping, Sequence

from benchmarks.regret.results import TARGETS, misses, summary

__all__ = ["markdown"]

Result = Mapping[str, object]


def markdown(results: Sequence[Result]) -> str:
    """A table of cells, one of workloads, and what it comes to."""
    cells = [_cell(r) for r in results if not r["is_workload"]]
    workloads = [_workload(r) for r in results if r["is_workload"]]
    head = (
        "cell",
        "acceptance",
        "best fixed",
        "of best fixed",
        "of off",
        "learned/goodput",
        "controller",
        "missed",
    )
    other = (
        "workload",
        "best fixed",
        "oracle/best",
        "gap closed",
        "best rival",
        "of rival",
        "learned/goodput",
        "missed",
    )
    parts = [_table(head, cells)] if cells else []
    parts += [_table(other, workloads)] if workloads else []
    return "\n\n".join([*parts, summary(results), *_places(results)])


def _places(results: Sequence[Result]) -> list[str]:
    """What was measured where and when; nothing where all was at once."""
    places: dict[str, list[str]] = {}
    for result in results:
        measured = result.get("measured")
        if isinstance(measured, Mapping):
            place = f"{measured['processor']}, {measured['date']}"
            places.setdefault(place, []).append(str(result["name"]))
    if len(places) < 2:
        return []
    return [
        "Measured in parts. " + ". ".join(f"{p}: {', '.join(n)}" for p, n in places.items()) + "."
    ]


def _cell(result: Result) -> tuple[str, ...]:
    return (
        str(result["name"]),
        str(result["acceptance"]),
        str(result["best_fixed"]),
        _ratio(result["to_best"]),
        _ratio(result["to_off"]),
        _learned(result),
        _share(result["controller_share"]),
        "; ".join(misses(result)) or "-",
    )


def _workload(result: Result) -> tuple[str, ...]:
    gap = result["gap"]
    assert isinstance(gap, Mapping)
    closed = f"{gap['share']:.0%} ({gap['low']:.0%} to {gap['high']:.0%})"
    return (
        str(result["name"]),
        str(result["best_fixed"]),
        _ratio(gap["oracle"]),
        "gap within noise" if gap["is_noise"] else closed,
        str(result["best_rival"]),
        _ratio(result["to_rival"]),
        _learned(result),
        "; ".join(misses(result)) or "-",
    )


def _ratio(ratio: object) -> str:
    assert isinstance(ratio, Mapping)
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


def _learned(result: Result) -> str:
    ratio = result.get("learned_to_goodput")
    if not isinstance(ratio, Mapping):
        return "not measured"  # in results from before there was the arm
    return _ratio(ratio) + (" below" if ratio["high"] < TARGETS["learned_to_goodput"] else "")


def _share(share: object) -> str:
    assert isinstance(share, Mapping)
    return f"{share['of_time']:.1%}, step p95 {share['p95']:.1%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
