"""From measured turns to what is written down, with the targets beside it."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.regret.grid import Case
from benchmarks.regret.rig import Rig
from benchmarks.regret.scoring import (
    ADAPTIVE,
    LEARNED,
    OFF,
    OURS,
    learned_to_adaptive,
    score_cell,
    score_workload,
)
from benchmarks.regret.turns import Turns

__all__ = ["TARGETS", "cell_result", "misses", "speed_misses", "summary", "workload_result"]

Result = dict[str, object]
TARGETS = {
    "to_best": 0.95,
    "to_best_high": 0.97,  # no interval may end below
    "median_to_best": 0.98,
    "to_off": 0.98,
    "controller_share": 0.03,
    "gap_closed": 0.70,
    "to_rival": 1.05,
    "learned_to_goodput": 1.0,  # no interval may end below
}


def cell_result(rig: Rig, turns: Turns) -> Result:
    """A cell's scores and what they rest on."""
    rates = {name: [block[0] for block in blocks] for name, blocks in turns.rates().items()}
    score = score_cell(rates)
    return {
        **_facts(rig, turns),
        "best_fixed": score.best,
        "to_best": score.to_best.to_dict(),
        "to_off": score.to_off.to_dict(),
        "learned_to_goodput": learned_to_adaptive(rates).to_dict(),
        **_controller(turns, ADAPTIVE),
        "learned": _controller(turns, LEARNED),
        "steps": {name: _step(turns, name) for name in dict.fromkeys((*OURS, score.best, OFF))},
        "rates": _rounded(rates),
    }


def workload_result(rig: Rig, turns: Turns) -> Result:
    """A workload's scores and what they rest on."""
    rates = turns.rates()
    score = score_workload(rates, turns.fixed_left, turns.rivals, rig.case.work)
    return {
        **_facts(rig, turns),
        "best_fixed": score.best,
        "oracle": list(score.oracle),
        "gap": score.gap.to_dict(),
        "to_best": score.to_best.to_dict(),
        "to_off": score.to_off.to_dict(),
        "learned_to_goodput": score.learned_to_adaptive.to_dict(),
        "best_rival": score.rival,
        "to_rival": score.to_rival.to_dict(),
        **_controller(turns, ADAPTIVE),
        "learned": _controller(turns, LEARNED),
        "phase_rates": {
            name: [round(statistics.median(p), 2) for p in zip(*blocks, strict=True)]
            for name, blocks in rates.items()
        },
    }


def misses(result: Mapping[str, object]) -> list[str]:
    """The targets that a result misses, in words."""
    return [*speed_misses(result), *_controller_misses(result)]


def speed_misses(result: Mapping[str, object]) -> list[str]:
    """Those of texts and of tokens per second."""
    found = []
    best, off = _ratio(result, "to_best"), _ratio(result, "to_off")
    if result["is_workload"]:
        gap = result["gap"]
        assert isinstance(gap, Mapping)
        if not gap["is_noise"] and gap["share"] < TARGETS["gap_closed"]:
            found.append(f"closes {gap['share']:.0%} of the gap")
        if (to_rival := _ratio(result, "to_rival"))["median"] < TARGETS["to_rival"]:
            found.append(f"{to_rival['median']:.3f} of {result['best_rival']}")
    else:
        if best["median"] < TARGETS["to_best"]:
            found.append(f"{best['median']:.3f} of the best fixed")
        if best["high"] < TARGETS["to_best_high"]:
            found.append(f"at most {best['high']:.3f} of the best fixed")
        if off["median"] < TARGETS["to_off"]:
            found.append(f"{off['median']:.3f} of off")
    texts = result["texts"]
    assert isinstance(texts, Mapping)
    if result["dtype"] == "float32" and texts["differing"]:  # in bf16 rounding may, with the shape
        found.append(f"{texts['differing']} of {texts['compared']} texts differ")
    return found


def _controller_misses(result: Mapping[str, object]) -> list[str]:
    share = result["controller_share"]
    assert isinstance(share, Mapping)
    if share["most"] <= TARGETS["controller_share"]:
        return []
    above = f"{share['steps_above']} of {share['steps']}"
    return [f"controller over 3 % in {above} steps"]


def summary(results: Sequence[Mapping[str, object]]) -> str:
    """The median over cells, and how many miss what."""
    cells = [_ratio(r, "to_best")["median"] for r in results if not r["is_workload"]]
    if not cells:
        return "no cell was measured"
    median = statistics.median(cells)
    met = "met" if median >= TARGETS["median_to_best"] else "MISSED"
    bad = sum(bool(misses(r)) for r in results)
    return (
        f"median over {len(cells)} cells {median:.3f} of the best fixed (target "
        f"{TARGETS['median_to_best']}: {met}); {bad} of {len(results)} miss a target"
    )


def _ratio(result: Mapping[str, object], key: str) -> Mapping[str, float]:
    ratio = result[key]
    assert isinstance(ratio, Mapping)
    return ratio


def _facts(rig: Rig, turns: Turns) -> Result:
    case: Case = rig.case
    return {
        "name": case.name,
        "is_workload": case.is_workload,
        "pair": case.pair,
        "dtype": case.dtype,
        "acceptance": "synthetic" if rig.pair.is_synthetic else "real",
        "tokens_per_request": case.tokens,
        "phases": [
            f"{p.name}: batch {p.batch_size}, context {p.context_tokens}, {p.kind}, "
            f"{case.tokens * p.stretch} tokens each"
            for p in case.phases
        ],
        "blocks": len(turns.runs[OFF]),
        "dropped": {n: round(share, 3) for n, share in turns.dropped.items()},
        "texts": {
            "compared": 0 if rig.pair.is_synthetic else turns.compared_texts,
            "differing": 0 if rig.pair.is_synthetic else turns.differing_texts,
        },
    }


def _controller(turns: Turns, name: str) -> Result:
    runs = [run for block in turns.runs[name] for run in block]
    shares = sorted(share for run in runs for share in run.controller_shares)
    spent = sum(run.stats.seconds["controller"] for run in runs)
    choices: Counter[str] = Counter()
    for run in runs:
        for (name, length), count in run.stats.lengths.items():
            choices[f"{name}:{length}" if length else name] += count
    return {
        "controller_share": {
            "of_time": round(spent / sum(run.seconds for run in runs), 4),
            "median": round(statistics.median(shares), 4),
            "p95": round(shares[int(0.95 * (len(shares) - 1))], 4),
            "most": round(shares[-1], 4),
            "steps_above": sum(share > TARGETS["controller_share"] for share in shares),
            "steps": len(shares),
        },
        "choices": dict(choices.most_common()),
        "faults": sorted({fault for run in runs for fault in run.stats.faults}),
    }


def _step(turns: Turns, name: str) -> Result:
    """Where an arm's steps went, in milliseconds, and tokens per request and step."""
    stats = [run.stats for block in turns.runs[name] for run in block]
    steps = sum(s.steps for s in stats)
    seconds: Counter[str] = Counter()
    for s in stats:
        seconds.update(s.seconds)
    emitted, decoded = sum(s.emitted for s in stats), sum(s.decoded_requests for s in stats)
    return {
        "milliseconds": {k: round(1e3 * v / steps, 3) for k, v in seconds.items()},
        "tokens_per_request": round(emitted / decoded, 3),
    }


def _rounded(rates: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [round(rate, 2) for rate in blocks] for name, blocks in rates.items()}
