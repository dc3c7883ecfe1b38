"""From logits to tokens: transformers' own logits processors, and noise that depends on no batch.

Knows nothing of acceptance, caches or policies: a row of logits and the tokens before it in, a
token out. A row is processed as `generate` would have processed it, wherever in a draft it stands.
"""

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from sdcontrol.engine.blame import blame
from sdcontrol.engine.copies import upload
from sdcontrol.engine.gumbel_max import INVALID, greedy_argmax, gumbel_argmax
from sdcontrol.engine.noise import DRAFT, TARGET, as_int64, derive_seed
from sdcontrol.engine.processors import (
    Processor,
    check_processors,
    num_head,
    parameters_of,
    processors_of_row,
)
from sdcontrol.errors import ConfigError, UnsupportedGeneration

__all__ = [
    "DraftSample",
    "Processor",
    "Row",
    "RowSampler",
    "check_processors",
    "check_sample",
    "draft_sample",
    "process_rows",
    "process_runs",
    "processors_of_row",
    "sample_rows",
]


class RowSampler:
    """How one request turns a row of logits into a token.

    `processors` are those of this request's row alone (see `processors_of_row`); `pad_tokens` are
    shown to them before the request's own tokens, as `generate` shows its left padding. Noise
    depends on `seed` and on the number of real tokens before the sampled one.

    Raises `UnsupportedGeneration` for a processor that is not a function of one row, `ConfigError` for a
    seed that is no whole number.
    """

    def __init__(
        self,
        *,
        processors: LogitsProcessorList | None = None,
        do_sample: bool = False,
        seed: int = 0,
        pad_tokens: Sequence[int] = (),
    ) -> None:
        all_processors: list[Processor] = list(processors or ())
        check_processors(all_processors)
        self.do_sample = do_sample
        self.seed = as_int64(_whole(seed))
        split = num_head(all_processors)
        self.head = tuple(all_processors[:split])
        self.tail = tuple(all_processors[split:])
        self.tail_key = tuple(parameters_of(processor) for processor in self.tail)
        self._shown = _ShownTokens(pad_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether the token is the argmax of the row as it is."""
        return not (self.do_sample or self.head or self.tail)

    @property
    def needs_prefix(self) -> bool:
        """Whether a processor looks at the tokens before the row, so that rows go one by one."""
        return bool(self.head)

    def process(self, logits: Tensor, prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Processed scores `[n, vocab]`, float32; row `i` follows the tokens `prefixes[i]`."""
        return process_rows(logits, [Row(self, (), prefix) for prefix in prefixes])

    def apply_head(self, scores: Tensor, tokens: Sequence[int], draft: Sequence[int]) -> Tensor:
        """What the processors up to the last that needs the prefix make of `scores` `[1, vocab]`.

        `scores` may be overwritten. `tokens` must begin with those of the call before, or be
        shorter.
        """
        input_ids = self._shown.show(tokens, draft, scores.device)
        try:
            for processor in self.head:
                scores = processor(input_ids, scores)
        except Exception as error:
            blame(error, self)
            raise
        return scores

    def apply_tail(self, scores: Tensor) -> Tensor:
        """What the other processors make of `scores` `[n, vocab]`."""
        no_ids = torch.zeros((len(scores), 0), dtype=torch.int64, device=scores.device)
        for processor in self.tail:
            scores = processor(no_ids, scores)
        return scores


def _whole(seed: int) -> int:
    """As an int, which numpy's are not."""
    try:
        return operator.index(seed)
    except TypeError as error:
        raise ConfigError(f"seed is {seed!r}; give a whole number, None for a fresh one") from error


class _ShownTokens:
    """The `[1, length]` input ids that processors see; holds committed tokens between steps.

    ids    | padding | committed, held      | committed, new | draft |
           0         pad                    pad + held       ...     length
    """

    def __init__(self, pad_tokens: Sequence[int]) -> None:
        self._num_pad = len(pad_tokens)
        self._num_held = 0
        self._ids = torch.tensor(list(pad_tokens), dtype=torch.int64)

    def show(self, tokens: Sequence[int], draft: Sequence[int], device: torch.device) -> Tensor:
        held = min(self._num_held, len(tokens))
        new = torch.tensor([*tokens[held:], *draft], dtype=torch.int64)
        start = self._num_pad + held
        end = start + len(new)
        if end > len(self._ids):
            self._ids = torch.cat((self._ids, self._ids.new_zeros(end)))
        self._ids = self._ids.to(device)
        self._ids[start:end] = new.to(device)
        self._num_held = len(tokens)
        return self._ids[None, :end].clone()


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits: whose it is, and the tokens before it."""

    sampler: RowSampler
    tokens: Sequence[int]  # committed ones; only grow from step to step
    draft: Sequence[int] = ()  # draft tokens after them, on the path to this row

    @property
    def position(self) -> int:
        """The number of real tokens before the one that the row predicts."""
        return len(self.tokens) + len(self.draft)


def process_rows(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Processed scores, float32 `[n, vocab]`, of `logits` `[n, vocab]` that belong to `rows`.

    Processors that need no prefix are called once for all rows with the same parameters.
    """
    runs = [(own, len(list(run))) for own, run in groupby(rows, lambda row: row.sampler)]
    return _apply_tails(_apply_heads(logits.float(), rows), runs)


def process_runs(logits: Tensor, runs: Sequence[tuple[RowSampler, int]]) -> Tensor:
    """`process_rows` where no processor needs the prefix.

    `runs` are samplers, each with the number of its rows, which follow one another.
    """
    return _apply_tails(logits.float(), runs)


def _apply_tails(scores: Tensor, runs: Sequence[tuple[RowSampler, int]]) -> Tensor:
    """Nobody waits for what the device was asked to do before."""
    groups: dict[Hashable, tuple[RowSampler, list[int]]] = {}
    first = 0
    for sampler, count in runs:
        _, members = groups.setdefault(sampler.tail_key, (sampler, []))
        members.extend(range(first, first + count))
        first += count
    if len(groups) == 1:
        return runs[0][0].apply_tail(scores)
    processed = torch.empty_like(scores)
    sizes = [len(members) for _, members in groups.values()]
    order = [index for _, members in groups.values() for index in members]
    places = upload(np.array(order, dtype=np.int64), scores.device).split(sizes)
    for (sampler, _), chosen in zip(groups.values(), places, strict=True):
        processed[chosen] = sampler.apply_tail(scores[chosen])
    return processed


def _apply_heads(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    if not any(row.sampler.head for row in rows):
        return scores
    scores = scores.clone()
    for index, row in enumerate(rows):
        if row.sampler.head:
            own = scores[index : index + 1].clone()
            scores[index] = row.sampler.apply_head(own, row.tokens, row.draft)[0]
    return scores


def sample_rows(scores: Tensor, rows: Sequence[Row], stream: int = TARGET) -> Tensor:
    """Token ids, int64 `[n]`, chosen from processed `scores` `[n, vocab]`: argmax or sample.

    A sampled row whose largest score is not finite gives -1: see `check_sample`. A greedy one
    gives what argmax gives, as in `generate`.
    """
    sampled = [index for index, row in enumerate(rows) if row.sampler.do_sample]
    if not sampled:
        return greedy_argmax(scores)
    chosen = [rows[index] for index in sampled]
    seeds = [_noise_seed(row, stream) for row in chosen]
    positions = [row.position for row in chosen]
    if len(sampled) == len(rows):
        return gumbel_argmax(scores, seeds, positions, stream)
    tokens = greedy_argmax(scores)
    index = upload(np.array(sampled, dtype=np.int64), scores.device)
    tokens[index] = gumbel_argmax(scores[index], seeds, positions, stream)
    return tokens


def _noise_seed(row: Row, stream: int) -> int:
    """The row's seed. A drafter's own noise is fresh at each step, however often it drafts there.

    Rejected drafts are drawn again at the next step: were their noise the same, what was cut or
    kept in the first step could bias the second.
    """
    if stream == DRAFT:
        return derive_seed(row.sampler.seed, len(row.tokens), DRAFT)
    return row.sampler.seed


def check_sample(token: float, sampler: RowSampler | None = None) -> None:
    """Raise `UnsupportedGeneration` if this is what `sample_rows` gives where nothing is finite.

    It is the `sampler`'s fault, where one is known.
    """
    if token == INVALID:
        error = UnsupportedGeneration(
            "the largest processed score of a row that must be sampled is NaN or infinite: either "
            "the model's logits overflowed (try another dtype) or the logits processors leave no "
            "token (loosen them, or set remove_invalid_values=True)"
        )
        blame(error, sampler)
        raise error


@dataclass(frozen=True, slots=True)
class DraftSample:
    """One draft token per row."""

    tokens: list[int]
    confidence: list[float]  # largest probability of the processed row
    distribution: Tensor | None  # `[n, vocab]`, under rejection where a row was sampled


def draft_sample(
    logits: Tensor, rows: Sequence[Row], *, verification: str = "coupled"
) -> DraftSample:
    """What a drafter that samples should draft, from its own `logits` `[n, vocab]`.

    The rows pass the request's own processors. Under "coupled" the noise is the target's, so the
    token is what the target would pick if its logits were these. Under "rejection" it is the
    drafter's own, and the law it was drawn from comes back. The confidence never depends on the
    token that was drawn; it is 0 where it is not a number.

    Raises `UnsupportedGeneration` for a row that nothing can be sampled from.
    """
    scores = process_rows(logits, rows)
    draws_own = verification == "rejection" and any(row.sampler.do_sample for row in rows)
    tokens = sample_rows(scores, rows, DRAFT if verification == "rejection" else TARGET)
    largest = (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp().nan_to_num(0.0).clamp(max=1.0)
    # Token ids are exact in float64: one copy brings both.
    ids, confidence = torch.stack((tokens.double(), largest.double())).tolist()
    check_sample(min(ids, default=0))
    return DraftSample(
        tokens=[int(token) for token in ids],
        confidence=confidence,
        distribution=scores.softmax(dim=-1) if draws_own else None,
    )
