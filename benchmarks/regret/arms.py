"""The arms of a case: every fixed setting, and other systems' rules.

Knows policies' names and rates measured; nothing of engines.
"""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.regret.grid import Case
from benchmarks.regret.scoring import OFF, PhaseRates, best_on_odd, whole

__all__ = ["LENGTHS", "drafter_of", "fixed_specs", "hopeless", "rival_specs", "schedule_spec"]

Spec = str | Mapping[str, object]
LENGTHS = {"ngram": (2, 4, 8), "sparse_kv": (2, 4), "draft_model": (1, 2, 4, 8)}
SCHEDULE = "concurrency_schedule"
_RIVALS = ("smartspec", "ema_steps", "budget_argmax", "heuristic")
_HOPELESS = 0.75  # of the best fixed, in every phase
_HOPELESS_PHASE = 0.85  # the same where an oracle may choose per phase


def fixed_specs(case: Case) -> dict[str, Spec]:
    """Off, and every drafter and length; `sparse_kv` where a context is longer than its budget."""
    longest = max(phase.context_tokens for phase in case.phases)
    arms = {family: family for family in LENGTHS}
    arms["sparse_kv"] = f"sparse_kv:{case.sparse_budget}"
    specs: dict[str, Spec] = {OFF: OFF}
    for family, lengths in LENGTHS.items():
        if family == "sparse_kv" and longest <= case.sparse_budget:
            continue
        specs |= {f"{arms[family]}:{n}": f"static:{arms[family]}:{n}" for n in lengths}
    return specs


def drafter_of(name: str) -> str:
    """The drafter of a fixed arm."""
    return name.rpartition(":")[0]


def hopeless(rates: PhaseRates, case: Case, fixed: Sequence[str]) -> dict[str, float]:
    """Fixed arms that are far from the best in every phase of every block, and how near they came.

    Off always stays.
    """

    def nearest(name: str) -> float:
        return max(
            rate / max(rates[other][block][phase] for other in fixed)
            for block, phases in enumerate(rates[name])
            for phase, rate in enumerate(phases)
        )

    least = _HOPELESS_PHASE if case.is_workload else _HOPELESS
    shares = {name: nearest(name) for name in fixed if name != OFF}
    return {name: share for name, share in shares.items() if share < least}


def rival_specs(
    rates: PhaseRates, case: Case, fixed: Sequence[str], work: Sequence[float]
) -> dict[str, Spec]:
    """Other systems' rules with the drafter that did best, over all phases, as a fixed setting."""
    total = {name: [whole(block, work) for block in rates[name]] for name in fixed}
    drafter = drafter_of(best_on_odd(total, [name for name in fixed if name != OFF]))
    specs: dict[str, Spec] = {kind: {"kind": kind, "drafter": drafter} for kind in _RIVALS}
    return {**specs, SCHEDULE: schedule_spec(rates, case, drafter)}


def schedule_spec(rates: PhaseRates, case: Case, drafter: str) -> Spec:
    """The table of `concurrency_schedule`: per batch size the drafter's best length on odd blocks."""
    table: dict[int, dict[int, list[float]]] = {}
    for name, blocks in rates.items():
        if name != OFF and drafter_of(name) != drafter:
            continue
        tokens = 0 if name == OFF else int(name.rpartition(":")[2])
        for p, phase in enumerate(case.phases):
            row = table.setdefault(phase.batch_size, {})
            row.setdefault(tokens, []).extend(block[p] for block in blocks[0::2])
    best = {
        batch: max(row, key=lambda n: statistics.median(row[n])) for batch, row in table.items()
    }
    return {"kind": SCHEDULE, "drafter": drafter, "schedule": best}
