"""The arms of a case: every fixed setting, and other systems' rules.

Knows policies' names and rates measured; nothing of engines.
"""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.regret.grid import Case
from benchmarks.regret.scoring import OFF, PhaseRates, best_on_odd, odd, whole
from sdcontrol.policies import Policy

__all__ = [
    "LENGTHS",
    "drafter_of",
    "fixed_specs",
    "outclassed",
    "rival_specs",
    "schedule_spec",
]

Spec = str | Mapping[str, object] | Policy
LENGTHS = {"ngram": (2, 4, 8, 16), "sparse_kv": (2, 4, 8), "draft_model": (1, 2, 4, 8)}
SCHEDULE = "concurrency_schedule"
IN_FULL = "budget_argmax"  # drafts as many for everyone as one sets it to
_LEAST_IN_FULL = 5
_RIVALS = ("smartspec", "ema_steps", "throughput_aware", "heuristic")
_OUTCLASSED = 0.95  # of the best of its sort
_OUTCLASSED_AT_ONCE = 0.8  # after a single block, which may merely have been slowed
_OUTCLASSED_IN_A_CELL = 0.75  # the same in a cell, whose blocks are shorter


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


def outclassed(
    rates: PhaseRates, case: Case, fixed: Sequence[str], rivals: Sequence[str]
) -> dict[str, float]:
    """Arms that odd blocks so far show to be behind, and how near to the best they came.

    Fixed ones in every phase and over all of them, since an oracle may choose per phase; rivals over
    all. Off always stays, and so does the best that drafts: rivals get its drafter.
    """
    table = {name: _over_off(rates, name, case) for name in (*fixed, *rivals)}
    groups = [{name: table[name] for name in fixed}, {name: table[name][-1:] for name in rivals}]
    shares: dict[str, float] = {}
    for group in groups:
        best = [max(column) for column in zip(*group.values(), strict=True)]
        for name, row in group.items():
            shares[name] = max(rate / top for rate, top in zip(row, best, strict=True))
    least = _OUTCLASSED
    if len(rates[OFF]) == 1:
        least = _OUTCLASSED_AT_ONCE if case.is_workload else _OUTCLASSED_IN_A_CELL
    drafting = [name for name in fixed if name != OFF]
    staying = {OFF, max(drafting, key=shares.__getitem__, default=OFF)}
    return {n: share for n, share in shares.items() if share < least and n not in staying}


def _over_off(rates: PhaseRates, name: str, case: Case) -> list[float]:
    """The mean over odd blocks of the rate over that of off: by phase, then over all phases."""
    rows = []
    for ours, plain in zip(odd(rates[name]), odd(rates[OFF]), strict=True):
        work = case.work[: len(ours)]
        both = zip((*ours, whole(ours, work)), (*plain, whole(plain, work)), strict=True)
        rows.append([rate / off for rate, off in both])
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def rival_specs(rates: PhaseRates, case: Case, fixed: Sequence[str]) -> dict[str, Spec]:
    """Other systems' rules with the drafter that did best, over all phases, as a fixed setting.

    Who drafts in full drafts as much as that setting did.
    """
    total = {name: [whole(block, case.work) for block in rates[name]] for name in fixed}
    best = best_on_odd(total, [name for name in fixed if name != OFF])
    drafter, length = drafter_of(best), int(best.rpartition(":")[2])
    specs: dict[str, Spec] = {kind: {"kind": kind, "drafter": drafter} for kind in _RIVALS}
    in_full = {"kind": IN_FULL, "drafter": drafter, "num_draft_tokens": max(length, _LEAST_IN_FULL)}
    return {**specs, IN_FULL: in_full, SCHEDULE: schedule_spec(rates, case, drafter)}


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
