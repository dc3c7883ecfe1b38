"""Judge a trained pair on held-out text: `python -m sdcontrol.engine.bundled.evaluate [FOLDER]`.

Prints the tables of the model card. Agreement is what a draft model's acceptance rests on: the
share of the tokens of the target's greedy continuations that are also the draft model's first
choice.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from sdcontrol.engine.bundled import held_out_documents
from sdcontrol.engine.bundled.batches import EOS_ID, SHARES, held_out_batch
from sdcontrol.engine.bundled.corpus import load_corpus
from sdcontrol.engine.bundled.data import KINDS
from sdcontrol.engine.bundled.models import continue_greedily, load, logits

_LOSS_LENGTH, _LOSS_ROWS = 1024, 12
_TOKENS, _PROMPTS = 128, 24
_LOOP_TOKENS, _LONGEST_PERIOD = 64, 16


@dataclass(frozen=True, slots=True)
class Greedy:
    """The target's greedy continuations of the prompts of one kind, compared."""

    agreement: float  # share of tokens that the draft model would have drafted
    loops: float  # share of continuations whose end repeats itself with a short period
    ended: float  # share of continuations that the target ended
    distinct: float  # distinct tokens per token


@dataclass(frozen=True, slots=True)
class Copying:
    """How well the target repeats passages."""

    perfect: float  # share of answers without an error in the tokens looked at
    before_error: float  # share of those tokens before the first error


@torch.no_grad()
def loss(model: LlamaForCausalLM, ids: Tensor) -> float:
    """The mean next-token cross-entropy of rows of ids, in nats."""
    scores = torch.cat([logits(model, row[None, :-1])[0] for row in ids])
    return functional.cross_entropy(scores, ids[:, 1:].flatten()).item()


def losses(model: LlamaForCausalLM, tokenizer: Tokenizer) -> dict[str, float]:
    """The held-out loss on every kind, and on the mixture of the training."""
    corpus = load_corpus(held_out=True)
    found: dict[str, float] = {}
    for kind in KINDS:
        ids = held_out_batch(
            corpus, tokenizer, kind=kind, rows=_LOSS_ROWS, length=_LOSS_LENGTH, seed=1
        )
        found[kind] = loss(model, ids)
    return {**found, "mixture": sum(SHARES[kind] * found[kind] for kind in KINDS)}


def positions(model: LlamaForCausalLM, tokenizer: Tokenizer) -> dict[str, float]:
    """The held-out loss on code by the position in the context."""
    corpus, edges = load_corpus(held_out=True), (0, 256, 512, 1024, 1536, 2048, 2304)
    ids = held_out_batch(corpus, tokenizer, kind="code", rows=24, length=2305, seed=2)
    each = torch.stack([_token_losses(model, row) for row in ids]).mean(0)
    return {f"{begin}-{end}": each[begin:end].mean().item() for begin, end in pairwise(edges)}


@torch.no_grad()
def _token_losses(model: LlamaForCausalLM, row: Tensor) -> Tensor:
    return functional.cross_entropy(logits(model, row[None, :-1])[0], row[1:], reduction="none")


def greedy(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: Tokenizer, kind: str
) -> Greedy:
    """Continue held-out prompts of a kind, and compare the draft model's choices."""
    agreed, total, loops, ended, distinct = 0, 0, 0, 0, 0
    documents = held_out_documents(kind, _PROMPTS, seed=1)
    prompts = [tokenizer.encode(document.prompt).ids for document in documents]
    for prompt, answer in zip(prompts, answered(target, prompts), strict=True):
        choices = _choices(draft, prompt + answer)[len(prompt) - 1 : -1]
        agreed += sum(a == b for a, b in zip(answer, choices, strict=True))
        total += len(answer)
        loops += is_loop(answer)
        ended += answer[-1] == EOS_ID
        distinct += len(set(answer))
    return Greedy(agreed / total, loops / _PROMPTS, ended / _PROMPTS, distinct / total)


def answered(model: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy continuations, each up to and with `<|eos|>` or 128 tokens long."""
    rows: list[list[int]] = continue_greedily(model, prompts, _TOKENS).tolist()
    return [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in rows]


@torch.no_grad()
def _choices(model: LlamaForCausalLM, ids: list[int]) -> list[int]:
    chosen: list[int] = logits(model, torch.tensor([ids]))[0].argmax(-1).tolist()
    return chosen


def is_loop(ids: list[int]) -> bool:
    """Whether the last 64 tokens repeat themselves with a period of at most 16."""
    tail = ids[-_LOOP_TOKENS:]
    return len(tail) == _LOOP_TOKENS and any(
        tail[period:] == tail[:-period] for period in range(1, _LONGEST_PERIOD + 1)
    )


def copying(target: LlamaForCausalLM, tokenizer: Tokenizer, *, min_tokens: int) -> Copying:
    """Let the target repeat passages; `min_tokens` 0 means passages of all lengths."""
    documents = held_out_documents("copy", _PROMPTS, seed=2, min_tokens=min_tokens)
    prompts = [tokenizer.encode(document.prompt).ids for document in documents]
    wholes = [[*tokenizer.encode(document.text).ids, EOS_ID] for document in documents]
    wanted = [whole[len(prompt) :] for prompt, whole in zip(prompts, wholes, strict=True)]
    shares = [_right(*pair) for pair in zip(wanted, answered(target, prompts), strict=True)]
    perfect = sum(share == 1 for share in shares)
    return Copying(perfect / len(shares), sum(shares) / len(shares))


def _right(wanted: list[int], answer: list[int]) -> float:
    """The share of the first 128 wanted tokens that come before the first error."""
    wanted = wanted[:_TOKENS]
    same = [a == b for a, b in zip(wanted, answer, strict=False)]
    return (same.index(False) if False in same else len(same)) / len(wanted)


def report(folder: Path) -> str:
    """The tables of the model card, in Markdown."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    target, draft = load(folder / "target"), load(folder / "draft")
    lines = [_loss_table(target, draft, tokenizer), _greedy_table(target, draft, tokenizer)]
    for name, min_tokens in (("passages of all lengths", 0), ("passages of 900 tokens", 900)):
        copied = copying(target, tokenizer, min_tokens=min_tokens)
        lines.append(f"{name}: {copied.perfect:.2f} perfect, {copied.before_error:.2f} of tokens")
    for span, value in positions(target, tokenizer).items():
        lines.append(f"target's loss on code, positions {span}: {value:.2f}")
    return "\n".join(lines)


def _loss_table(target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: Tokenizer) -> str:
    left, right = losses(target, tokenizer), losses(draft, tokenizer)
    rows = [f"| {kind} | {left[kind]:.2f} | {right[kind]:.2f} |" for kind in left]
    return "\n".join(["| kind | target | draft |", "|---|---|---|", *rows, ""])


def _greedy_table(target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: Tokenizer) -> str:
    rows = ["| kind | agreement | loops | ended | distinct |", "|---|---|---|---|---|"]
    for kind in KINDS:
        it = greedy(target, draft, tokenizer, kind)
        rows.append(
            f"| {kind} | {it.agreement:.2f} | {it.loops:.2f} | {it.ended:.2f} | {it.distinct:.2f} |"
        )
    return "\n".join([*rows, ""])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent)
    print(report(parser.parse_args().folder))


if __name__ == "__main__":
    main()
