"""The models, the prompts, and the verification that a case decodes with.

"bundled" is the trained pair: real prompts, real acceptance. "large" has random weights: a target of
100 M parameters in bf16 and a draft model of a tenth; its acceptance is synthetic.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.regret.grid import KINDS, RATES, Case, PhaseSpec
from sdcontrol.core import Hint, family_of
from sdcontrol.engine.bundled import held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.engine.drafters.base import Draft, DraftRequest, DraftTask, KeepDrafting
from sdcontrol.engine.drafters.draft_model import DraftModelDrafter
from sdcontrol.engine.drafters.ngram import NgramDrafter
from sdcontrol.engine.request import Request
from sdcontrol.engine.verify import CoupledVerifier, SyntheticVerifier, Verifier
from sdcontrol.engine.walk import VerifyTask

__all__ = [
    "LateDraftModel",
    "Pair",
    "Prompt",
    "TirelessNgram",
    "load_pair",
    "prompts_of",
    "seed_of",
]

_NAMES = tuple(RATES)  # kinds of prompt, in the order that seeds count them
_PASSAGE_TOKENS = 64  # of a random prompt, repeated so that the n-gram drafter finds matches
_VOCABULARY = 32000
_CONTEXT = 4096


_NO_LIMIT = Hint()
_ANY_LENGTH = MappingProxyType({"ngram": _NO_LIMIT})


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the bundled data's name for their kind."""

    tokens: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Pair:
    """What an engine is made of. Without drafts `verifier` gives the same as any other."""

    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    ngram: NgramDrafter
    verifier: Verifier
    is_synthetic: bool


class TirelessNgram(NgramDrafter):
    """Looks up in earnest and drafts in any case: a random model's text hardly repeats itself.

    Needs a `SyntheticEngine` where anybody learns: that text says nothing of the synthetic rates.
    """

    def hint(self, request: DraftRequest, arm: str) -> Hint:
        """The look-up is made; its outcome limits nothing."""
        super().hint(request, arm)
        return _NO_LIMIT

    def offers(self, requests: Sequence[DraftRequest]) -> Sequence[Mapping[str, Hint | None]]:
        """As `hint` says."""
        return [_ANY_LENGTH] * len(super().offers(requests))

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> list[Draft]:
        """Chains as long as asked for."""
        super().propose(tasks, keep_drafting)
        return [Draft.chain([t.request.tokens[-1]] * t.num_draft_tokens) for t in tasks]


class LateDraftModel(DraftModelDrafter):
    """Computes each request's prompt itself, whoever had the same one before."""

    def _set_cached(self, request: Request, num_tokens: int) -> None:
        self._cached[request.id] = num_tokens  # no block is marked as filled


def seed_of(kind: str, block: int, index: int) -> int:
    """The seed of a request, from which the synthetic verification reads its kind."""
    return (1009 * block + index) * len(_NAMES) + _NAMES.index(kind)


def _rates_of(task: VerifyTask) -> tuple[float, ...]:
    """Those of the request's kind, which its seed tells."""
    return RATES[_NAMES[task.sampler.seed % len(_NAMES)]][family_of(task.drafter)]


def load_pair(case: Case, *, is_tiny: bool = False) -> Pair:
    """The models of a case, greedy and without an end of text; `is_tiny` for trying the code out."""
    dtype = getattr(torch, case.dtype)
    if case.pair == "bundled":
        target, draft = (load_bundled(name, dtype=dtype) for name in ("target", "draft"))
        ngram = NgramDrafter(name="ngram", max_branches=2)
        pair = Pair(target, draft, ngram, CoupledVerifier(), is_synthetic=False)
    else:
        shapes = ((64, 1), (64, 1)) if is_tiny else ((768, 12), (256, 2))
        target, draft = (_random(*shape, dtype, is_tiny=is_tiny) for shape in shapes)
        verifier = SyntheticVerifier(_rates_of, shares_luck=True)  # where one arm is lucky, all are
        pair = Pair(target, draft, TirelessNgram(max_branches=1), verifier, is_synthetic=True)
    for model in (target, draft):
        model.generation_config.eos_token_id = None
    return pair


def prompts_of(phase: PhaseSpec, *, is_synthetic: bool, seed: int) -> list[Prompt]:
    """One prompt of `context_tokens + 1` tokens per request, kinds in turn."""
    kinds = KINDS[phase.kind]
    names = [kinds[row % len(kinds)] for row in range(phase.batch_size)]
    length = phase.context_tokens + 1
    if is_synthetic:
        rng = random.Random(f"{phase.name} {seed}")
        return [Prompt(_repetitive(rng, length), kind) for kind in names]
    share = -(-phase.batch_size // len(kinds))
    of_kind = {kind: iter(_held_out(kind, share, length, seed)) for kind in kinds}
    return [Prompt(next(of_kind[kind]), kind) for kind in names]


def _held_out(kind: str, count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Cut to `length` in the middle: the task stands at the beginning, its last words at the end."""
    tokenizer = load_bundled_tokenizer()
    texts = held_out_prompts(kind, count, seed=seed, min_tokens=length)
    rows = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    head = length // 2
    return [(*row[:head], *row[head - length :]) for row in rows]


def _repetitive(rng: random.Random, length: int) -> tuple[int, ...]:
    passage = [rng.randrange(16, 3000) for _ in range(_PASSAGE_TOKENS)]
    return tuple((passage * (length // _PASSAGE_TOKENS + 1))[:length])


def _random(hidden: int, layers: int, dtype: torch.dtype, *, is_tiny: bool) -> LlamaForCausalLM:
    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=_VOCABULARY // (10 if is_tiny else 1),
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 1),
        num_key_value_heads=max(hidden // 192, 1),
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.to(dtype=dtype)  # type: ignore[call-arg]  # transformers wraps it
    model.eval()
    return model
