"""Train the bundled pair: `python -m sdcontrol.engine.bundled.train --output FOLDER`.

Both models learn at once and from the same batches: the target what comes next in the mixture, the
draft model what the target would say, from the target's probabilities, which are there anyway.

The schedule runs on the clock (`--minutes`), so a slower machine sees fewer tokens and ends on
time. An interrupted run goes on from its last checkpoint if it is started again into the same
folder. Where cores are shared with others, one single-threaded worker per core is faster than
threads: `OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m sdcontrol.engine.bundled.train ...`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from sdcontrol.engine.bundled import workers
from sdcontrol.engine.bundled.batches import EOS, Mixture, train_tokenizer
from sdcontrol.engine.bundled.corpus import Corpus, load_corpus
from sdcontrol.engine.bundled.fit import Run, Task, fit
from sdcontrol.engine.bundled.models import DRAFT, TARGET, TINY, Shape, build, logits, moved

# The target's probabilities are sharpened, because a greedy draft is accepted for its first choice.
_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the schedule: until which share of the time, and the batches of it."""

    until: float
    rows: int
    length: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained, in which stages, on how much of the corpus."""

    target: Shape
    draft: Shape
    stages: tuple[Stage, ...]
    most_files: int | None = None

    def stage(self, share: float) -> Stage:
        """The stage at a share of the time."""
        return next(stage for stage in self.stages if share < stage.until)


FULL = Recipe(TARGET, DRAFT, (Stage(0.75, 16, 512), Stage(1.0, 4, 2304)))
SMOKE = Recipe(TINY, TINY, (Stage(0.5, 2, 64), Stage(1.0, 1, 128)), most_files=20)


def task(recipe: Recipe, corpus: Corpus, tokenizer: Tokenizer, *, seed: int, device: str) -> Task:
    """The two models, untrained, and what they are to learn."""
    target = moved(build(recipe.target, seed), device)
    draft = moved(build(recipe.draft, seed + 1), device)
    mixture = Mixture(corpus, tokenizer, f"{seed} {workers.number()}")

    def batch(share: float) -> Tensor:
        stage = recipe.stage(share)
        return mixture.batch(workers.part(stage.rows), stage.length)

    def loss(ids: Tensor) -> Tensor:
        said = logits(target, ids[:, :-1]).flatten(0, 1)
        wanted = (said.detach() / _TEMPERATURE).softmax(-1)
        drafted = logits(draft, ids[:, :-1]).flatten(0, 1)
        return cross_entropy(said, ids[:, 1:].flatten()) + cross_entropy(drafted, wanted)

    return Task({"target": target, "draft": draft}, batch, loss)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer so that `AutoTokenizer` of this and of older transformers finds it."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    ).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _tokenizer(corpus: Corpus, output: Path, seed: int) -> Tokenizer:
    """The tokenizer of an interrupted run, or a new one; every worker makes the same."""
    path = output / "tokenizer" / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(corpus, seed)
    if workers.is_first():
        save_tokenizer(tokenizer, path.parent)
    return tokenizer


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for weights, tokenizer")
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny models, a few seconds: a test")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes}; it must be above 0")
    workers.join()
    recipe = SMOKE if options.smoke else FULL
    corpus = load_corpus(held_out=False, most_files=recipe.most_files)
    tokenizer = _tokenizer(corpus, options.output, options.seed)
    fit(
        task(recipe, corpus, tokenizer, seed=options.seed, device=options.device),
        Run(
            output=options.output,
            minutes=0.1 if options.smoke else options.minutes,
            device=options.device,
            is_compiled=not options.smoke,
        ),
    )


if __name__ == "__main__":
    main()
