"""Verification that accepts what the target's own samples turn out to be.

The samples depend on (seed, position) only, so the text does not depend on the drafts (Daliri,
Musco and Suresh 2024). Knows nothing of policies, caches or time.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sdcontrol.engine.copies import on_its_way
from sdcontrol.engine.gumbel_max import greedy_argmax
from sdcontrol.engine.sampling import Row, check_sample, process_rows, sample_rows
from sdcontrol.engine.walk import Asked, Verdict, VerifyTask, Walk, take_rows

__all__ = ["CoupledVerifier"]


class CoupledVerifier:
    """Accepts a draft token when it is the target's own sample. Greedy requests included.

    One device-to-host copy per step; requests whose processors look at the prefix need another
    for each token that they accept.
    """

    supports_trees = True

    def verify(self, logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verdict]:
        """See `Verifier`."""
        walks = waiting = [Walk(task) for task in tasks]
        while waiting:
            samples = _sample_open_rows(logits, waiting)
            waiting = [walk for walk in waiting if not self._has_ended(walk, samples)]
        return [walk.verdict() for walk in walks]

    def ask(self, logits: Tensor, tasks: Sequence[VerifyTask]) -> Asked:
        """The same, said to the device first where nobody drafts and no processor looks at the prefix."""
        if any(_has_draft(task) or task.sampler.needs_prefix for task in tasks):
            verdicts = self.verify(logits, tasks)
            return Asked(lambda: verdicts)
        tokens = _sample_next(logits, tasks)
        there = on_its_way(tokens)
        return Asked(lambda: [Verdict((), token) for token in there().tolist()], tokens)

    def _has_ended(self, walk: Walk, samples: Mapping[int, int]) -> bool:
        """Go on as far as samples are known; whether that was the end."""
        first_row, parents = walk.task.first_row, walk.draft.parents
        node = walk.node
        sample = samples[walk.logits_row]
        # Parents stand before children, so one pass over the nodes meets the whole path.
        for child in range(node + 1, len(parents)):
            if parents[child] == node and self._accepts(walk, child, sample):
                walk.path.append(child)
                node = child
                if first_row + 1 + node not in samples:
                    return False
                sample = samples[first_row + 1 + node]
        check_sample(sample, walk.task.sampler)
        walk.next_token = sample
        return True

    def _accepts(self, walk: Walk, child: int, sample: int) -> bool:
        """Whether the path goes on to `child`; `sample` is the target's after its parent."""
        return walk.draft.tokens[child] == sample


def _has_draft(task: VerifyTask) -> bool:
    return task.draft is not None and bool(task.draft.tokens)


def _sample_next(logits: Tensor, tasks: Sequence[VerifyTask]) -> Tensor:
    """The target's sample after the last token of each task, none of which has a draft: int64 `[tasks]`."""
    logits = take_rows(logits, [task.first_row for task in tasks])
    if all(task.sampler.is_plain for task in tasks):
        return greedy_argmax(logits)
    rows = [Row(task.sampler, task.tokens) for task in tasks]
    return sample_rows(process_rows(logits, rows), rows)


def _sample_open_rows(logits: Tensor, walks: Sequence[Walk]) -> dict[int, int]:
    """The target's samples by row, for all rows of `walks` that can be computed now; one copy."""
    plain = [walk for walk in walks if walk.task.sampler.is_plain]
    if len(plain) == len(walks):
        return dict(enumerate(greedy_argmax(logits).tolist()))
    processed: dict[int, Row] = {}
    for walk in walks:
        if not walk.task.sampler.is_plain:
            processed |= walk.open_rows()
    rows = list(processed.values())
    sampled = sample_rows(process_rows(take_rows(logits, list(processed)), rows), rows)
    if not plain:
        return dict(zip(processed, sampled.tolist(), strict=True))
    both = torch.cat((sampled, greedy_argmax(logits))).tolist()
    samples = dict(zip(processed, both, strict=False))
    for walk in plain:
        for row in walk.all_rows:
            samples[row] = both[len(processed) + row]
    return samples
