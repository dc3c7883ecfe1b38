"""A step between its launch and its verdicts, and what the next one takes from it.

Knows batches, plans and drafts; nothing of models, verifiers or how a step is made.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from sdcontrol.core import BatchView, Plan
from sdcontrol.engine.batch import Batch
from sdcontrol.engine.clock import StepClock
from sdcontrol.engine.copies import upload
from sdcontrol.engine.drafting import Drafts
from sdcontrol.engine.gumbel_max import INVALID
from sdcontrol.engine.request import Request
from sdcontrol.engine.sampling import check_sample
from sdcontrol.engine.shadows import ShadowDrafts
from sdcontrol.engine.verify import Verdict, VerifyTask

__all__ = ["Flight"]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step whose forward the device was asked for."""

    batch: Batch
    view: BatchView
    plan: Plan
    drafts: Drafts
    logits: Tensor | None  # None: there was nothing to compute
    tasks: Sequence[VerifyTask]
    clock: StepClock
    num_made: int  # graphs and kernels, before the step
    faults: tuple[str, ...]  # of the planner
    observe_seconds: float = 0.0  # that were spent before the launch
    shadows: ShadowDrafts | None = None  # None: not drafted yet
    rows: Sequence[int] | None = None  # of its verdicts, those that still count; None: all

    @property
    def ending(self) -> set[str]:
        """The requests, by id, that can be given no more than one token, which ends them."""
        pieces = self.batch.decoding
        return {p.request.id for p in pieces if p.request.remaining_tokens <= 1}

    def next_ids(self, tokens: Tensor, requests: Sequence[Request]) -> Tensor:
        """Of the `tokens` that its tasks are given, int64 `[tasks]`, those of these requests, in their order.

        Where nothing could be sampled, any token: landing raises what is wrong.
        """
        known = tokens.clamp(min=0)
        if len(requests) == len(tokens):
            return known
        rows = range(len(tokens)) if self.rows is None else self.rows
        row_of = {p.request.id: row for row, p in zip(rows, self.batch.decoding, strict=True)}
        index = np.array([row_of[request.id] for request in requests], dtype=np.int64)
        return known[upload(index, tokens.device)]

    def counted(self, verdicts: list[Verdict]) -> list[Verdict]:
        """Those of requests that have not ended since.

        Raises `UnsupportedGeneration` where one of them could be given no token.
        """
        rows = range(len(verdicts)) if self.rows is None else self.rows
        counted = [verdicts[row] for row in rows]
        tokens = [verdict.next_token for verdict in counted]
        if INVALID in tokens:
            check_sample(INVALID, self.tasks[rows[tokens.index(INVALID)]].sampler)
        return counted

    def without(self, ended: Collection[Request]) -> "Flight | None":
        """The same without requests that have ended meanwhile; None where that leaves nobody."""
        decoding = self.batch.decoding
        rows = [row for row, piece in enumerate(decoding) if piece.request not in ended]
        if len(rows) == len(decoding):
            return self
        self.batch.keep(rows)
        view = replace(self.view, requests=tuple([self.view.requests[row] for row in rows]))
        plan, drafts = Plan.off(view, self.plan.reason), Drafts.none(len(rows))
        return replace(self, view=view, plan=plan, drafts=drafts, rows=rows) if rows else None
