"""Coupled verification on the device: the verdicts are all that the host is sent.

Knows logits and verification tasks; nothing of caches, requests or policies. The rule is
`CoupledVerifier`'s, and so are the verdicts; the work is the kernels' of `coupled_kernels`.

    verdicts [requests, 2 + nodes]    accepted nodes, next token | the accepted path
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdcontrol.engine.coupled import CoupledVerifier
from sdcontrol.engine.sampling import Row, check_sample, process_rows
from sdcontrol.engine.verify import Verdict, Verifier, VerifyTask
from sdcontrol.engine.walk import Walk

__all__ = ["Verify", "verify_of", "verify_on_device"]

Verify = Callable[[Tensor, Sequence[VerifyTask]], list[Verdict]]


def verify_of(verifier: Verifier, *, has_kernels: bool) -> Verify:
    """How an engine verifies: on the device where the rule and the requests allow it."""
    if not has_kernels or type(verifier) is not CoupledVerifier:
        return verifier.verify

    def verify(logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verdict]:
        if any(task.sampler.needs_prefix for task in tasks):
            return verifier.verify(logits, tasks)
        return verify_on_device(logits, tasks)

    return verify


def verify_on_device(logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verdict]:
    """See `Verifier.verify`; one copy to the device, one back. No processor may need the prefix.

    Every row of `logits` belongs to a task.
    """
    from sdcontrol.engine.kernels.coupled_kernels import sample_scores, walk_drafts

    rows = _rows(tasks)
    drafts = [task.draft for task in tasks]
    counts = [len(draft.tokens) if draft else 0 for draft in drafts]
    nodes = [(draft.tokens, draft.parents) for draft in drafts if draft]
    parts: list[NDArray[np.int64]] = [
        _int64([row.sampler.seed for row in rows]),
        _int64([row.position for row in rows]),
        _int64([row.sampler.do_sample for row in rows]),
        _int64(list(chain.from_iterable(tokens for tokens, _ in nodes))),
        _int64(list(chain.from_iterable(parents for _, parents in nodes))),
        _int64([task.first_row for task in tasks]),
        _int64(np.cumsum([0, *counts[:-1]]).tolist()),
        _int64(counts),
    ]
    flat = torch.from_numpy(np.concatenate(parts)).to(logits.device)
    seeds, positions, is_sampled, tokens, parents, first_rows, first_nodes, num_nodes = flat.split(
        [len(part) for part in parts]
    )
    samples = sample_scores(_scores(logits, rows), seeds, positions, is_sampled).tokens
    verdicts = logits.new_zeros((len(tasks), 2 + max(counts)), dtype=torch.int64)
    walk_drafts(
        samples,
        tokens,
        parents,
        first_rows=first_rows,
        first_nodes=first_nodes,
        num_nodes=num_nodes,
        verdicts=verdicts,
    )
    return [_verdict(row) for row in verdicts.tolist()]


def _rows(tasks: Sequence[VerifyTask]) -> list[Row]:
    """In the order of the logits: forwards pack requests as they like."""
    by_index: dict[int, Row] = {}
    for task in tasks:
        by_index |= Walk(task).open_rows()
    return [by_index[index] for index in range(len(by_index))]


def _int64(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _scores(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Processed scores; logits as they are, in their own type, where nobody processes them."""
    if any(row.sampler.tail for row in rows):
        return process_rows(logits, rows)
    return logits


def _verdict(row: Sequence[int]) -> Verdict:
    count, token, *path = row
    check_sample(token)
    return Verdict(tuple(path[:count]), token)
