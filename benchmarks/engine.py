"""The engine against transformers: same models, same prompts, same process, taking turns.

    python -m benchmarks.engine [--blocks 7] [--tokens 96] [--case NAME ...]

Every case is a ratio of speeds with the target that it is held to. Where transformers or a fixed
setting of ours has something to tune, each setting is tried on calibration blocks first, and the
best is what counts.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.measuring import take_turns, write_results
from sdcontrol.engine.bundled import held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.experiments.compare import Ratio, paired_ratio
from sdcontrol.integrations.transformers import SpeculativeDecoder

MIXED = ("code", "edit", "records", "logs")
Generate = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Models:
    """The pair that is measured."""

    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Bench:
    """Models and how long to measure."""

    models: Models
    blocks: int
    tokens: int

    def inputs(self, kinds: Sequence[str], batch_size: int, seed: int = 0) -> dict[str, Tensor]:
        """A left-padded batch of held-out prompts."""
        share = -(-batch_size // len(kinds))
        prompts = [p for kind in kinds for p in held_out_prompts(kind, share, seed=seed)]
        encoded = self.models.tokenizer(
            prompts[:batch_size], return_tensors="pt", padding=True, padding_side="left"
        )
        return {key: encoded[key] for key in ("input_ids", "attention_mask")}

    def generate(self, inputs: dict[str, Tensor], **options: object) -> Generate:
        """A call of transformers' generate, greedy, of fixed length."""

        def call() -> object:
            return self.models.target.generate(
                **inputs,
                max_new_tokens=self.tokens,
                do_sample=False,
                **options,
            )

        return call

    def each(self, inputs: Sequence[dict[str, Tensor]], **options: object) -> Generate:
        """One call of generate after the other."""
        calls = [self.generate(batch, **options) for batch in inputs]
        return lambda: [call() for call in calls]

    def decoder(self, policy: str, drafters: Sequence[object] = ()) -> SpeculativeDecoder:
        """A decoder of ours. Prompts repeat from block to block: nothing may be left of them."""
        return SpeculativeDecoder(
            self.models.target, drafters=list(drafters), policy=policy, prefix_sharing=False
        )

    def compare(self, ours: dict[str, Generate], theirs: dict[str, Generate]) -> dict[str, object]:
        """Our best setting against theirs, both chosen on blocks of their own."""
        best = self._best(ours), self._best(theirs)
        arms = {"ours": ours[best[0]], "theirs": theirs[best[1]]}
        seconds = take_turns(arms, blocks=self.blocks, seed=1)
        ratio = paired_ratio(seconds["theirs"], seconds["ours"])
        return {"ours": best[0], "theirs": best[1], **_figures(ratio)}

    def _best(self, arms: dict[str, Generate]) -> str:
        if len(arms) == 1:
            return next(iter(arms))
        seconds = take_turns(arms, blocks=max(self.blocks // 2, 2))
        return min(arms, key=lambda name: sorted(seconds[name])[len(seconds[name]) // 2])


def _figures(ratio: Ratio) -> dict[str, object]:
    return {"speed": ratio.median, "low": ratio.low, "high": ratio.high, "blocks": ratio.num_blocks}


def plain(bench: Bench, batch_size: int) -> dict[str, object]:
    """Plain decoding against generate."""
    inputs = bench.inputs(MIXED, batch_size)
    with bench.decoder("off") as decoder:
        ours = {"off": bench.generate(inputs, custom_generate=decoder)}
        return bench.compare(ours, {"generate": bench.generate(inputs)})


def against_prompt_lookup(bench: Bench) -> dict[str, object]:
    """The n-gram drafter at batch 1, one prompt of each kind, against prompt lookup."""
    inputs = [bench.inputs((kind,), 1) for kind in MIXED]
    theirs = {
        f"prompt_lookup_num_tokens={n}": bench.each(inputs, prompt_lookup_num_tokens=n)
        for n in (2, 5, 10)
    }
    return _fixed_against(bench, inputs, "ngram", (2, 5, 10), theirs)


def against_assisted(bench: Bench) -> dict[str, object]:
    """The draft model at batch 1, one prompt of each kind, against assisted generation."""
    inputs = [bench.inputs((kind,), 1) for kind in MIXED]
    theirs = {f"num_assistant_tokens={n}": _assisted(bench, inputs, n) for n in (1, 2, 4)}
    return _fixed_against(bench, inputs, "draft_model", (1, 2, 4), theirs)


def copy_heavy(bench: Bench) -> dict[str, object]:
    """Batch 16 of copy-heavy prompts against plain generate."""
    inputs = [bench.inputs(("edit", "copy"), 16)]
    theirs = {"generate": bench.each(inputs)}
    return _fixed_against(bench, inputs, "ngram", (4, 8), theirs)


def off_is_free(bench: Bench) -> dict[str, object]:
    """Drafters configured and switched off against an engine without drafters."""
    inputs = bench.inputs(MIXED, 8)
    drafters = ["ngram", "sparse_kv:128", bench.models.draft]
    with bench.decoder("off", drafters) as with_drafters, bench.decoder("off") as without:
        return bench.compare(
            {"drafters, off": bench.generate(inputs, custom_generate=with_drafters)},
            {"no drafters": bench.generate(inputs, custom_generate=without)},
        )


def _fixed_against(
    bench: Bench,
    inputs: Sequence[dict[str, Tensor]],
    drafter: str,
    lengths: Sequence[int],
    theirs: dict[str, Generate],
) -> dict[str, object]:
    spec = bench.models.draft if drafter == "draft_model" else drafter
    policies = [f"static:{drafter}:{length}" for length in lengths] + ["goodput"]
    decoders = {policy: bench.decoder(policy, [spec]) for policy in policies}
    ours = {
        policy: bench.each(inputs, custom_generate=decoder) for policy, decoder in decoders.items()
    }
    try:
        return bench.compare(ours, theirs)
    finally:
        for decoder in decoders.values():
            decoder.close()


def _assisted(bench: Bench, inputs: Sequence[dict[str, Tensor]], num_tokens: int) -> Generate:
    draft = bench.models.draft
    call = bench.each(inputs, assistant_model=draft)

    def configured() -> object:
        draft.generation_config.num_assistant_tokens = num_tokens
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        return call()

    return configured


CASES: dict[str, tuple[float, Callable[[Bench], dict[str, object]]]] = {
    "plain_batch_1": (1.0, lambda bench: plain(bench, 1)),
    "plain_batch_16": (1.2, lambda bench: plain(bench, 16)),
    "ngram_against_prompt_lookup": (1.1, against_prompt_lookup),
    "draft_model_against_assisted": (1.1, against_assisted),
    "copy_heavy_batch_16": (1.5, copy_heavy),
    "off_is_free": (0.99, off_is_free),
}


def run(bench: Bench, names: Sequence[str]) -> list[dict[str, object]]:
    """Measure the named cases and print a line for each."""
    results: list[dict[str, object]] = []
    for name in names:
        target, measure = CASES[name]
        figures = {"case": name, "target": target, **measure(bench)}
        results.append(figures)
        met = "met" if float(str(figures["speed"])) >= target else "MISSED"
        print(
            f"{name:32s} {figures['speed']:.2f}x [{figures['low']:.2f}, {figures['high']:.2f}] "
            f"target {target}x {met}; {figures['ours']} against {figures['theirs']}",
            flush=True,
        )
    return results


def load(folder: str | None, dtype: torch.dtype) -> Models:
    """The bundled pair, or one in `folder`/target, /draft and /tokenizer.json."""
    if folder is None:
        pair = [load_bundled(name, dtype=dtype) for name in ("target", "draft")]
        return _endless(Models(*pair, load_bundled_tokenizer()))
    path = Path(folder)
    pair = (
        AutoModelForCausalLM.from_pretrained(path / n, dtype=dtype) for n in ("target", "draft")
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"), pad_token="<|eos|>", eos_token="<|eos|>"
    )
    return _endless(Models(*(model.eval() for model in pair), tokenizer))


def _endless(models: Models) -> Models:
    """Every output as long as asked for, so that all arms write the same number of tokens."""
    for model in (models.target, models.draft):
        model.generation_config.eos_token_id = None
    return models


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--models", help="folder with target/, draft/ and tokenizer.json")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    models = load(options.models, getattr(torch, options.dtype))
    results = run(Bench(models, options.blocks, options.tokens), options.case)
    if not options.no_write:
        command = f"python -m benchmarks.engine --dtype {options.dtype}"
        print(write_results(f"engine-{options.dtype}", command, results))


if __name__ == "__main__":
    main()
