"""Verification on the device: the verdicts are all that the host is sent.

Knows logits and verification tasks; nothing of caches, requests or policies. The rules are those of
`CoupledVerifier` and `SyntheticVerifier`, and so are the verdicts; the work is the kernels' of
`coupled_kernels`. Nothing waits for the device before the verdicts do: what is sent to it is made
ready while it still computes the logits.

    verdicts [requests, 2 + nodes]    accepted nodes, next token | the accepted path
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdcontrol.engine.copies import on_its_way, upload
from sdcontrol.engine.coupled import CoupledVerifier
from sdcontrol.engine.sampling import process_runs
from sdcontrol.engine.synthetic import SyntheticVerifier
from sdcontrol.engine.verify import Verdict, Verifier, VerifyTask
from sdcontrol.engine.walk import Asked, depths_of

__all__ = ["Stands", "Verify", "answers_on_device", "verify_of", "verify_on_device"]

Verify = Callable[[Tensor, Sequence[VerifyTask]], Asked]
"""Asks for verdicts on the step's logits, which may be written over once it returns."""

_OURS = (CoupledVerifier, SyntheticVerifier)

Stands = Callable[[Sequence[VerifyTask]], NDArray[np.bool_]]
"""Of all nodes, one task after the other: whether a node is accepted where its parent is."""


def answers_on_device(verifier: Verifier) -> TypeGuard[CoupledVerifier]:
    """Whether its verdicts can be asked for and read later."""
    return type(verifier) in _OURS


def verify_of(verifier: Verifier, *, has_kernels: bool) -> Verify:
    """How an engine verifies: on the device where the rule and the requests allow it."""
    if not answers_on_device(verifier):
        return partial(_verify_at_once, verifier)
    if not has_kernels:
        return verifier.ask
    stands = verifier.stands if isinstance(verifier, SyntheticVerifier) else None

    def verify(logits: Tensor, tasks: Sequence[VerifyTask]) -> Asked:
        if any(task.sampler.needs_prefix for task in tasks):
            return _verify_at_once(verifier, logits, tasks)
        return verify_on_device(logits, tasks, stands)

    return verify


def _verify_at_once(verifier: Verifier, logits: Tensor, tasks: Sequence[VerifyTask]) -> Asked:
    verdicts = verifier.verify(logits, tasks)
    return Asked(lambda: verdicts)


def verify_on_device(
    logits: Tensor, tasks: Sequence[VerifyTask], stands: Stands | None = None
) -> Asked:
    """See `Verifier.verify`; one copy to the device, one back. No processor may need the prefix.

    Every row of `logits` belongs to a task. A node is accepted after its parent where it is the
    target's sample, or where `stands` says so.
    """
    from sdcontrol.engine.kernels.coupled_kernels import sample_scores, walk_drafts

    in_order = sorted(tasks, key=lambda task: task.first_row)
    counts = [_num_nodes(task) for task in tasks]
    drafts = [task.draft for task in tasks if task.draft]
    sent = _sent(
        [
            *_row_columns(in_order),
            _flat([draft.tokens for draft in drafts]),
            _flat([draft.parents for draft in drafts]),
            [] if stands is None else stands(tasks),
            [task.first_row for task in tasks],
            np.cumsum([0, *counts[:-1]]),
            counts,
        ],
        logits.device,
    )
    seeds, positions, is_sampled, tokens, parents, stand, first_rows, first_nodes, num_nodes = sent
    samples = sample_scores(_scores(logits, in_order), seeds, positions, is_sampled).tokens
    verdicts = logits.new_zeros((len(tasks), 2 + max(counts)), dtype=torch.int64)
    walk_drafts(
        samples,
        tokens,
        parents,
        None if stands is None else stand,
        first_rows=first_rows,
        first_nodes=first_nodes,
        num_nodes=num_nodes,
        verdicts=verdicts,
    )
    rows = on_its_way(verdicts)
    return Asked(lambda: [_verdict(row) for row in rows().tolist()], verdicts[:, 1])


def _num_nodes(task: VerifyTask) -> int:
    return len(task.draft.tokens) if task.draft else 0


def _row_columns(in_order: Sequence[VerifyTask]) -> tuple[list[int], list[int], list[int]]:
    """Seed, position and whether it is sampled, of every row; requests are packed in any order."""
    seeds: list[int] = []
    positions: list[int] = []
    is_sampled: list[int] = []
    for task in in_order:
        length, num_rows = len(task.tokens), 1 + _num_nodes(task)
        seeds.extend([task.sampler.seed] * num_rows)
        is_sampled.extend([int(task.sampler.do_sample)] * num_rows)
        positions.append(length)
        if task.draft:
            positions.extend([length + 1 + depth for depth in depths_of(task.draft)])
    return seeds, positions, is_sampled


def _flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return [value for row in rows for value in row]


def _sent(
    columns: "Sequence[Sequence[int] | NDArray[np.bool_] | NDArray[np.int64]]", device: torch.device
) -> Sequence[Tensor]:
    """Each column on the device, int64: one copy, for which nobody waits."""
    flat = np.concatenate([np.asarray(column, dtype=np.int64) for column in columns])
    lengths = [len(column) for column in columns]
    there: Sequence[Tensor] = upload(flat, device).split(lengths)
    return there


def _scores(logits: Tensor, in_order: Sequence[VerifyTask]) -> Tensor:
    """Processed scores; logits as they are, in their own type, where nobody processes them."""
    if not any(task.sampler.tail for task in in_order):
        return logits
    return process_runs(logits, [(task.sampler, 1 + _num_nodes(task)) for task in in_order])


def _verdict(row: Sequence[int]) -> Verdict:
    count, token, *path = row
    return Verdict(tuple(path[:count]), token)
