"""Chains drafted in rounds, one token per open request and round, all in one forward.

    asking the host       after every round: a planner may stop chains early
    without the host      where nobody stops: a round's tokens feed the next on the device, and one
                          copy brings all of them in the end

Both give the same drafts. Knows models and sampling; nothing of policies, blocks or verification.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from sdcontrol.engine.chained_forwards import ChainedForwards
from sdcontrol.engine.copies import upload
from sdcontrol.engine.drafters.base import Draft, DraftInFull, DraftTask, KeepDrafting
from sdcontrol.engine.packing import IntArray, Segment
from sdcontrol.engine.request import Request
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.sampling import Row, RowSampler, check_sample, draft_sample, sample_rows
from sdcontrol.engine.walk import take_rows

__all__ = ["RoundModel", "draft_in_rounds", "request_of"]

MakeSegment = Callable[[Request, Sequence[int]], Segment]
"""The forward piece of a request, given what has been drafted for it in this step."""


def request_of(task: DraftTask) -> Request:
    """The engine's own request behind a task."""
    assert isinstance(task.request, Request)
    return task.request


@dataclass(frozen=True, slots=True)
class RoundModel:
    """The model of a drafter, and how its drafts are to be verified."""

    runner: ModelRunner
    segment: MakeSegment
    verification: str
    vocab_size: int  # the target's

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Logits `[segments, vocab]`: one row each."""
        logits, first_rows = self.runner.forward(segments)
        return self.fitted(take_rows(logits, first_rows))

    def fitted(self, logits: Tensor) -> Tensor:
        """`[rows, ours]` as `[rows, vocab]`: padding cut off, missing tokens never drafted."""
        missing = self.vocab_size - logits.shape[-1]
        if missing <= 0:
            return logits[:, : self.vocab_size]
        return functional.pad(logits, (0, missing), value=float("-inf"))


class _Chain:
    """One request's draft while it grows."""

    def __init__(self, task: DraftTask) -> None:
        self.request = request_of(task)
        self.limit = task.num_draft_tokens
        self.tokens: list[int] = []
        self.confidence: list[float] = []
        self.distribution: list[Tensor] = []

    @property
    def is_open(self) -> bool:
        return len(self.tokens) < self.limit

    @property
    def sampler(self) -> RowSampler:
        return self.request.sampler

    @property
    def row(self) -> Row:
        return Row(self.sampler, self.request.tokens, tuple(self.tokens))

    def draft(self) -> Draft:
        distribution = torch.stack(self.distribution) if self.distribution else None
        return Draft.chain(self.tokens, self.confidence, distribution)


def draft_in_rounds(
    tasks: Sequence[DraftTask], keep_drafting: KeepDrafting, model: RoundModel
) -> list[Draft]:
    """A chain for every task, as long as it may be."""
    chains = [_Chain(task) for task in tasks]
    if isinstance(keep_drafting, DraftInFull) and _need_no_host(chains, model):
        _draft_on_device(sorted(chains, key=lambda chain: -chain.limit), model)
    else:
        _draft_by_rounds(chains, keep_drafting, model)
    return [chain.draft() for chain in chains]


def _draft_by_rounds(
    chains: Sequence[_Chain], keep_drafting: KeepDrafting, model: RoundModel
) -> None:
    while open_chains := [chain for chain in chains if chain.is_open]:
        logits = model.forward(
            [model.segment(chain.request, chain.tokens) for chain in open_chains]
        )
        _extend(open_chains, logits, model.verification)
        if any(chain.is_open for chain in open_chains):
            limits = keep_drafting([chain.draft() for chain in chains])
            for chain, limit in zip(chains, limits, strict=True):
                chain.limit = min(chain.limit, limit)


def _extend(chains: Sequence[_Chain], logits: Tensor, verification: str) -> None:
    sample = draft_sample(logits, [chain.row for chain in chains], verification=verification)
    for index, chain in enumerate(chains):
        chain.tokens.append(sample.tokens[index])
        chain.confidence.append(sample.confidence[index])
        if sample.distribution is not None and chain.sampler.do_sample:
            chain.distribution.append(sample.distribution[index])


# Without the host


def _need_no_host(chains: Sequence[_Chain], model: RoundModel) -> bool:
    """Whether no processor looks at the draft so far, and no law of a sample is asked for."""
    samplers = [chain.sampler for chain in chains]
    if any(sampler.needs_prefix for sampler in samplers):
        return False
    return model.verification == "coupled" or not any(sampler.do_sample for sampler in samplers)


def _draft_on_device(chains: Sequence[_Chain], model: RoundModel) -> None:
    """Fill `chains`, the longest first, from one copy of all rounds' tokens and confidences."""
    logits, forwards = _first_round(chains, model)
    sampler = _RoundSampler(chains, model.runner)
    rounds = [sampler.sample(logits, 0)]
    for index in range(1, chains[0].limit):
        assert forwards is not None
        # What nothing could be sampled from is found in the end; until then it must be a token.
        fed = rounds[-1][0].clamp(min=0)
        rounds.append(sampler.sample(model.fitted(forwards.forward(fed)), index))
    # Token ids are exact in float64: one copy brings all.
    drawn = [torch.stack((tokens.double(), chance.double())) for tokens, chance in rounds]
    ids, confidence = torch.cat(drawn, dim=1).tolist()
    check_sample(min(ids))
    first = 0
    for tokens, _ in rounds:
        for row, chain in enumerate(chains[: len(tokens)], start=first):
            chain.tokens.append(int(ids[row]))
            chain.confidence.append(confidence[row])
        first += len(tokens)


def _first_round(
    chains: Sequence[_Chain], model: RoundModel
) -> tuple[Tensor, ChainedForwards | None]:
    """Logits `[chains, vocab]`, and what makes the forwards of the rounds that follow, if any do.

    Where nobody has to catch up, the first round is one of the others: they share their tables. Else the
    others are made ready while the device computes it.
    """
    firsts = [model.segment(chain.request, ()) for chain in chains]
    if all(len(first.tokens) == 1 for first in firsts):
        pairs = zip(firsts, chains, strict=True)
        whole = [_prolonged(first, chain, chain.limit, model) for first, chain in pairs]
        forwards = ChainedForwards(model.runner, whole)
        ids = upload(_int64([first.tokens[0] for first in firsts]), model.runner.device)
        return model.fitted(forwards.forward(ids)), forwards
    logits = model.forward(firsts)
    seconds = [(model.segment(chain.request, (0,)), chain) for chain in chains if chain.limit > 1]
    rest = [_prolonged(second, chain, chain.limit - 1, model) for second, chain in seconds]
    return logits, ChainedForwards(model.runner, rest) if rest else None


def _prolonged(first: Segment, chain: _Chain, count: int, model: RoundModel) -> Segment:
    """The `count` tokens that a chain feeds from its segment `first` on, whatever they will be."""
    cache = model.runner.cache
    assert cache is not None
    slots = chain.request.slots(first.start, count, cache.block_size)
    return first._replace(tokens=[0] * count, slots=slots)


class _RoundSampler:
    """`draft_sample` of chains, the longest first, whose tokens stay on the device."""

    def __init__(self, chains: Sequence[_Chain], runner: ModelRunner) -> None:
        self._samplers = [chain.sampler for chain in chains]
        self._tokens = [chain.request.tokens for chain in chains]
        self._has_kernels = runner.has_kernels
        members: dict[object, list[int]] = {}
        for index, sampler in enumerate(self._samplers):
            members.setdefault(sampler.tail_key, []).append(index)
        self._groups = [(group, upload(_int64(group), runner.device)) for group in members.values()]
        columns = [
            (s.seed, len(t), s.do_sample) for s, t in zip(self._samplers, self._tokens, strict=True)
        ]
        self._facts = upload(_int64(columns).T.copy(), runner.device)

    def sample(self, logits: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Tokens int64 and confidences `[open]` after `index` tokens of each chain."""
        scores = self._processed(logits)
        count = len(scores)
        if self._has_kernels:
            from sdcontrol.engine.kernels.coupled_kernels import sample_scores

            seeds, lengths, is_sampled = self._facts[:, :count]
            sampled = sample_scores(scores, seeds, lengths + index, is_sampled)
            return sampled.tokens, sampled.confidence
        drafted = (0,) * index  # which tokens does not matter: see `_need_no_host`
        pairs = zip(self._samplers[:count], self._tokens[:count], strict=True)
        tokens = sample_rows(scores, [Row(sampler, own, drafted) for sampler, own in pairs])
        chance = (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp()
        return tokens, chance.nan_to_num(0.0).clamp(max=1.0)

    def _processed(self, logits: Tensor) -> Tensor:
        """`process_rows`, whose groups are known to the device; kernels take logits as they are."""
        if self._has_kernels and not any(sampler.tail for sampler in self._samplers):
            return logits
        scores = logits.float()
        if len(self._groups) == 1:
            return self._samplers[0].apply_tail(scores)
        processed = torch.empty_like(scores)
        for members, places in self._groups:
            chosen = places[: bisect_left(members, len(scores))]
            if len(chosen):
                sampler = self._samplers[members[0]]
                processed[chosen] = sampler.apply_tail(scores[chosen])
        return processed


def _int64(values: object) -> IntArray:
    return np.array(values, dtype=np.int64)
