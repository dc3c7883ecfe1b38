"""What is measured: cells that stay as they are, workloads that change, and their acceptance rates.

The phases of a workload were chosen by fixed settings alone, measured phase by phase, so that their
best ones differ; where one is best in all, there is nothing to adapt to. Contexts are multiples of
the block size: a prompt is one token longer, so that with its blocks in place only that token is left
to compute, and the request decodes at once. Knows no models and no time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = ["CELLS", "KINDS", "RATES", "WORKLOADS", "Case", "PhaseSpec", "quick"]

KINDS: Mapping[str, tuple[str, ...]] = {
    "copy": ("copy",),
    "code": ("code",),
    "free": ("prose",),
    "mixed": ("prose", "copy", "code", "records"),
}
"""Kinds of prompt as they are told apart here, by the bundled data's names; requests take turns."""

RATES: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "copy": {"ngram": (0.90, 0.93), "sparse_kv": (0.92,), "draft_model": (0.75, 0.80)},
    "code": {"ngram": (0.50, 0.65, 0.70), "sparse_kv": (0.88,), "draft_model": (0.70, 0.75)},
    "prose": {"ngram": (0.12, 0.30), "sparse_kv": (0.80,), "draft_model": (0.55, 0.60)},
    "records": {"ngram": (0.65, 0.75), "sparse_kv": (0.85,), "draft_model": (0.80,)},
}
"""Synthetic acceptance: P(accepted | its parent was), by depth; the last one holds beyond."""


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """Requests of one kind that decode together, each `stretch` times as long as usual."""

    name: str
    batch_size: int
    context_tokens: int
    kind: str
    stretch: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    """A cell, whose phases are alike and take turns, or a workload, which runs through its phases."""

    name: str
    pair: str  # "bundled", or "large" with synthetic acceptance
    dtype: str
    tokens: int  # per request, where nothing is stretched
    blocks: int  # counted ones
    phases: tuple[PhaseSpec, ...]
    is_workload: bool = False
    sparse_budget: int = 128
    shares_prompts: bool = False  # phases decode the first requests of the largest one
    is_closed: bool = False  # requests that end are not followed by others
    catches_up: bool = False  # the draft model knows no prompt before its first draft
    generations: int = (
        1  # requests in each place, one after the other, of which a run takes the time
    )

    @property
    def work(self) -> tuple[float, ...]:
        """Tokens per phase."""
        return tuple([float(p.batch_size * self.tokens * p.stretch) for p in self.phases])

    def phases_of(self, block: int) -> list[int]:
        """All phases of a workload. One of a cell's, the same in an odd block and the even one after."""
        if self.is_workload:
            return list(range(len(self.phases)))
        return [max(block - 1, 0) // 2 % len(self.phases)]


_BLOCKS = {
    (1, "bundled"): 120,
    (4, "bundled"): 60,
    (16, "bundled"): 40,
    (16, "large"): 40,
    (1, "large"): 40,
    (4, "large"): 30,
}
"""Counted blocks of a cell, by batch size and pair; 20 elsewhere."""


def _cell(
    batch: int, context: int, kind: str, pair: str, *, tokens: int, dtype: str = "bfloat16"
) -> Case:
    """Small batches take turns through several groups of prompts.

    The shorter a cell's blocks, the more there are: the smallest model's take a seventh of a second at
    batch 1, the largest's several at batch 32.
    """
    name = f"{pair}-b{batch}-c{context}-{kind}"
    groups = {1: 4, 4: 2}.get(batch, 1)
    phases = tuple(PhaseSpec(f"group {g}", batch, context, kind) for g in range(groups))
    budget = 512 if context >= 2048 else 128
    blocks = _BLOCKS.get((batch, pair), 20)
    return Case(name, pair, dtype, tokens, blocks, phases, sparse_budget=budget)


CELLS: tuple[Case, ...] = (
    _cell(1, 256, "copy", "bundled", tokens=192, dtype="float32"),
    _cell(1, 2048, "code", "bundled", tokens=160, dtype="float32"),
    _cell(1, 256, "free", "large", tokens=40),
    _cell(4, 256, "mixed", "bundled", tokens=128, dtype="float32"),
    _cell(4, 2048, "copy", "large", tokens=64),
    _cell(4, 2048, "free", "bundled", tokens=80, dtype="float32"),
    _cell(16, 256, "code", "bundled", tokens=80),
    _cell(16, 2048, "mixed", "bundled", tokens=48),
    _cell(16, 256, "copy", "large", tokens=64),
    _cell(32, 256, "free", "bundled", tokens=80),
    _cell(32, 256, "mixed", "large", tokens=48),
    _cell(32, 2048, "code", "large", tokens=32),
)


CLOSED: tuple[Case, ...] = tuple(
    replace(case, name=f"closed-{case.name}", phases=case.phases[:1], blocks=20, is_closed=True)
    for case in (
        _cell(8, 256, "mixed", "bundled", tokens=96, dtype="float32"),
        _cell(8, 256, "mixed", "large", tokens=48),
        _cell(16, 256, "mixed", "large", tokens=48),
    )
)
"""Batches that nothing follows, see `benchmarks.closed_batches`."""


LATE: tuple[Case, ...] = tuple(
    replace(
        case,
        name=f"late-{case.name}",
        phases=case.phases[:1],
        blocks=8,
        catches_up=True,
        generations=4,
    )
    for case in (
        _cell(4, 3072, "free", "large", tokens=64),
        _cell(8, 1024, "code", "large", tokens=96),
    )
)
"""Requests that follow each other, whose prompts a draft model has to compute, see `benchmarks.late_draft_model`."""


def _workload(name: str, phases: list[PhaseSpec], *, tokens: int) -> Case:
    return Case(name, "large", "bfloat16", tokens, 20, tuple(phases), is_workload=True)


_RAMP = (1, 8, 32, 8)  # and from the beginning
_ALTERNATION = ("free", "copy", "code", "copy")
_GROWTH = ((256, "free"), (1024, "free"), (2048, "code"), (3072, "copy"))

WORKLOADS: tuple[Case, ...] = (
    replace(
        _workload(
            "batch-ramps",
            [
                PhaseSpec(f"{i}: batch {b}", b, 256, "mixed", stretch=3 if b == 1 else 1)
                for i, b in enumerate(_RAMP)
            ],
            tokens=32,
        ),
        shares_prompts=True,
    ),
    _workload(
        "kinds-alternate",
        [PhaseSpec(f"{i}: {kind}", 8, 256, kind) for i, kind in enumerate(_ALTERNATION)],
        tokens=56,
    ),
    _workload(
        "contexts-grow",
        [PhaseSpec(f"context {c}: {kind}", 4, c, kind) for c, kind in _GROWTH],
        tokens=72,
    ),
)
"""A lone request is free text, a crowd is mixed. Kinds alternate. An agent's context grows: it thinks,
then codes, then copies, so that kinds change with it. The requests of these two last for some 9 to 60
steps: the first one or two of each, in which nobody can know its kind, are not most of them."""


def quick(case: Case) -> Case:
    """The same in a few seconds: every line of code runs, no figure means anything."""
    phases = tuple(
        replace(p, batch_size=min(p.batch_size, 4), context_tokens=min(p.context_tokens, 256))
        for p in case.phases[:2]
    )
    return replace(case, tokens=6, blocks=2, phases=phases, sparse_budget=128)
