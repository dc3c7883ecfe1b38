"""Rejection sampling of draft tokens: the most acceptances, for chains.

Leviathan et al. (2023), algorithm 1. `p` is the target's law, `q` the drafter's: a draft token x is
accepted with probability min(1, p(x) / q(x)), otherwise replaced by a sample of max(p - q, 0),
normalised. Knows nothing of policies, caches or time.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sdcontrol.engine.copies import upload
from sdcontrol.engine.coupled import CoupledVerifier
from sdcontrol.engine.gumbel_max import gumbel_argmax
from sdcontrol.engine.noise import ACCEPT, RESIDUAL, TARGET, uniform
from sdcontrol.engine.sampling import check_sample, process_rows
from sdcontrol.engine.walk import Verdict, VerifyTask, Walk, take_rows
from sdcontrol.errors import ConfigError

__all__ = ["RejectionVerifier"]


class RejectionVerifier:
    """Accepts a draft token x with probability min(1, p(x) / q(x)). Chains only.

    Greedy requests are verified as by `CoupledVerifier`: there p is a point mass. A draft without
    a distribution was chosen without chance: q is a point mass. Raises `ConfigError` for a tree.
    """

    supports_trees = False

    def verify(self, logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verdict]:
        """See `Verifier`."""
        for task in tasks:
            _check_chain(task)
        sampled = [task for task in tasks if task.sampler.do_sample]
        greedy = [task for task in tasks if not task.sampler.do_sample]
        verdicts = iter(self._verify_sampled(logits, sampled))
        exact = iter(CoupledVerifier().verify(logits, greedy))
        return [next(verdicts if task.sampler.do_sample else exact) for task in tasks]

    def _verify_sampled(self, logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verdict]:
        walks = [_SampledWalk(task) for task in tasks]
        _read_drafter_probabilities(walks)
        waiting = walks
        while waiting:
            _read_target_probabilities(logits, waiting)
            waiting = [walk for walk in waiting if not self._has_ended(walk)]
        _sample_last_tokens(walks)
        return [walk.verdict() for walk in walks]

    def _has_ended(self, walk: "_SampledWalk") -> bool:
        """Go on as far as p is known; whether that was the end."""
        seed = walk.task.sampler.seed
        while (row := walk.logits_row) in walk.p:
            child = walk.node + 1
            if child == len(walk.draft.tokens):
                return True
            u = uniform(seed, walk.position, ACCEPT)
            if not self._accepts(p=walk.p[row], q=walk.q[child], u=u):
                return True
            walk.path.append(child)
        return False

    def _accepts(self, *, p: float, q: float, u: float) -> bool:
        """The rule: p and q are the draft token's probabilities, u is uniform in (0, 1)."""
        return u * q < p


class _SampledWalk(Walk):
    """Adds what the rule needs; chains only, so that the child of node i is node i + 1."""

    __slots__ = ("p", "q", "scores")

    def __init__(self, task: VerifyTask) -> None:
        super().__init__(task)
        self.q: list[float] = []  # by node: the drafter's probability of its token
        self.p: dict[int, float] = {}  # by row: the target's probability of the drafted token
        self.scores: dict[int, Tensor] = {}  # by row: processed, [vocab]

    @property
    def was_rejected(self) -> bool:
        """Whether a draft token was turned down, rather than none left."""
        return len(self.path) < len(self.draft.tokens)

    def drafted_after(self, row: int) -> int:
        """The draft token that row `row` of the step's logits judges; any token at the end."""
        node = row - self.task.first_row
        return self.draft.tokens[node] if node < len(self.draft.tokens) else 0


def _check_chain(task: VerifyTask) -> None:
    if task.draft is not None and not task.draft.is_chain:
        raise ConfigError(
            f"drafter {task.drafter!r} made a tree of {len(task.draft.tokens)} nodes, rejection "
            "verifies chains only; use verification='coupled', or a drafter that makes chains"
        )


def _read_drafter_probabilities(walks: Sequence[_SampledWalk]) -> None:
    """Fill `walk.q`; one device-to-host copy, none if all drafters chose without chance."""
    known = []
    for walk in walks:
        walk.q = [1.0] * len(walk.draft.tokens)
        if walk.draft.distribution is not None and walk.q:
            known.append((walk, walk.draft.distribution))
    if not known:
        return
    tokens = np.array([token for walk, _ in known for token in walk.draft.tokens], dtype=np.int64)
    parts = upload(tokens, known[0][1].device).split([len(walk.q) for walk, _ in known])
    drafted = [
        law.gather(1, own.to(law.device)[:, None])[:, 0]
        for (_, law), own in zip(known, parts, strict=True)
    ]
    values = iter(torch.cat(drafted).tolist())
    for walk, _ in known:
        walk.q = [next(values) for _ in walk.q]


def _read_target_probabilities(logits: Tensor, walks: Sequence[_SampledWalk]) -> None:
    """Fill `walk.p` and `walk.scores` for the rows that can be computed now; one copy."""
    open_rows = [(walk, index, row) for walk in walks for index, row in walk.open_rows().items()]
    rows = [row for _, _, row in open_rows]
    scores = process_rows(take_rows(logits, [index for _, index, _ in open_rows]), rows)
    tokens = [walk.drafted_after(index) for walk, index, _ in open_rows]
    drafted = upload(np.array(tokens, dtype=np.int64), scores.device)[:, None]
    p = scores.softmax(dim=-1).gather(1, drafted)[:, 0].tolist()
    for number, (walk, index, _) in enumerate(open_rows):
        walk.p[index] = p[number]
        walk.scores[index] = scores[number]


def _sample_last_tokens(walks: Sequence[_SampledWalk]) -> None:
    """Fill `walk.next_token`: from max(p - q, 0) after a rejection, else from p; one copy."""
    rejected = [walk for walk in walks if walk.was_rejected]
    complete = [walk for walk in walks if not walk.was_rejected]
    parts = []
    if rejected:
        parts.append(_sample(rejected, _residual_scores(rejected), RESIDUAL))
    if complete:
        parts.append(_sample(complete, _last_scores(complete), TARGET))
    tokens = torch.cat(parts).tolist() if parts else []
    for walk, token in zip((*rejected, *complete), tokens, strict=True):
        check_sample(token, walk.task.sampler)
        walk.next_token = token


def _sample(walks: Sequence[_SampledWalk], scores: Tensor, stream: int) -> Tensor:
    seeds = [walk.task.sampler.seed for walk in walks]
    return gumbel_argmax(scores, seeds, [walk.position for walk in walks], stream)


def _last_scores(walks: Sequence[_SampledWalk]) -> Tensor:
    return torch.stack([walk.scores[walk.logits_row] for walk in walks])


def _residual_scores(walks: Sequence[_SampledWalk]) -> Tensor:
    """Scores `[n, vocab]` of the laws that replace the rejected tokens.

    p itself where rounding leaves nothing of max(p - q, 0).
    """
    p = _last_scores(walks).softmax(dim=-1)
    q = torch.zeros_like(p)
    for index, walk in enumerate(walks):
        child = walk.node + 1
        if walk.draft.distribution is None:
            q[index, walk.draft.tokens[child]] = 1.0
        else:
            q[index] = walk.draft.distribution[child]
    left = (p - q).clamp_min_(0.0)
    # NaN stays NaN either way, and is found when sampled.
    return torch.where(left.sum(dim=-1, keepdim=True) > 0.0, left, p).log_()
