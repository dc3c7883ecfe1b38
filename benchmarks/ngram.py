"""What the n-gram drafter costs, and what its drafts are worth on recorded texts.

    python -m benchmarks.ngram [--data FOLDER] [--tokenizer FILE] [--json FILE]

Cost: one request, hint + propose of 4 to 8 tokens, then a commit of 1 to 5 tokens, at 1k, 8k and
32k tokens of context, the contexts taking turns; medians. Worth: mean acceptance length (tokens
per verification, bonus included) when recorded outputs are decoded greedily. Recorded texts are
`FOLDER/text/*.jsonl` with `prompt` and `output`; FOLDER may stand in SDCONTROL_DATA. Without a
`tokenizers` file words and punctuation marks are the tokens.
"""

import argparse
import json
import os
import platform
import random
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from sdcontrol.engine.drafters.base import ROOT, Draft, DraftTask
from sdcontrol.engine.drafters.ngram import NgramDrafter

CONTEXTS = (1_000, 8_000, 32_000)
SETTINGS: dict[str, dict[str, int]] = {
    "default": {},
    "chains": {"max_branches": 1},
    "chains, max_match 4": {"max_branches": 1, "max_match": 4},
    "chains, max_match 8": {"max_branches": 1, "max_match": 8},
    "chains, max_match 32": {"max_branches": 1, "max_match": 32},
    "chains, min_match 2": {"max_branches": 1, "min_match": 2},
    "chains, min_match 3": {"max_branches": 1, "min_match": 3},
    "2 branches": {"max_branches": 2},
    "6 branches": {"max_branches": 6},
}
DRAFT_LENGTHS = (4, 8, 16)

Encode = Callable[[str], list[int]]


@dataclass
class Text:
    """A recorded prompt and output, as tokens."""

    prompt: list[int]
    output: list[int]


@dataclass
class Request:
    """As much of a request as a drafter sees."""

    id: str
    tokens: list[int]


@dataclass
class Samples:
    """Nanoseconds of each step at one context length."""

    hint: list[int] = field(default_factory=list)
    propose: list[int] = field(default_factory=list)
    commit: list[int] = field(default_factory=list)

    def microseconds(self) -> dict[str, float]:
        """Medians."""
        both = [hint + propose for hint, propose in zip(self.hint, self.propose, strict=True)]
        named = {"hint": self.hint, "hint + propose": both, "commit": self.commit}
        return {name: median(times) / 1e3 for name, times in named.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    options = _options(arguments)
    encode = _encoder(options.tokenizer)
    recorded = _recorded(options.data, encode)
    texts = [text for group in recorded.values() for text in group]
    tokens = [token for text in texts for token in text.prompt + text.output]
    if len(tokens) < CONTEXTS[-1] + 20_000:
        tokens = _invented(CONTEXTS[-1] + 20_000)
    cost = {name: _cost(tokens, SETTINGS[name], options.steps) for name in ("default", "chains")}
    _print_cost(cost)
    worth = {name: _worth(group) for name, group in recorded.items()}
    _print_worth(worth)
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "python": sys.version}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        results = {"date": date, **machine, "cost": cost, "acceptance_length": worth}
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost and worth of the n-gram drafter.")
    folder = os.environ.get("SDCONTROL_DATA")
    parser.add_argument("--data", type=Path, default=Path(folder) if folder else None)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizers file (tokenizer.json)")
    parser.add_argument("--steps", type=int, default=3_000, help="timed steps for each context")
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser.parse_args(arguments)


def _encoder(tokenizer: Path | None) -> Encode:
    if tokenizer is None:
        ids: dict[str, int] = {}
        pieces = re.compile(r"\s?\w+|\s?[^\w\s]+|\s+")
        return lambda text: [ids.setdefault(piece, len(ids)) for piece in pieces.findall(text)]
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    return lambda text: list(loaded.encode(text).ids)


def _recorded(folder: Path | None, encode: Encode) -> dict[str, list[Text]]:
    """By file; empty, with a word why, where there are none."""
    files = sorted((folder / "text").glob("*.jsonl")) if folder else []
    if not files:
        where = f"{folder}/text" if folder else "no folder given"
        print(f"no recorded texts ({where}): acceptance lengths skipped, costs on an invented")
        print("text; give --data FOLDER or set SDCONTROL_DATA")
    texts: dict[str, list[Text]] = {}
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        pairs = [(row["prompt"], row["output"]) for row in rows if row.get("output")]
        if pairs:
            texts[file.stem] = [Text(encode(prompt + "\n"), encode(out)) for prompt, out in pairs]
    return texts


def _invented(num_tokens: int) -> list[int]:
    """Fresh tokens and copies of earlier stretches, some of them altered, half and half."""
    rng = random.Random(0)
    text = [rng.randrange(4_000) for _ in range(100)]
    while len(text) < num_tokens:
        length, start = rng.randrange(2, 40), rng.randrange(len(text) - 50)
        text += [int(4_000 * rng.random() ** 3) for _ in range(length)]
        text += text[start : start + length]
    return text[:num_tokens]


def _cost(tokens: list[int], settings: dict[str, int], steps: int) -> dict[int, dict[str, float]]:
    """By context length: median microseconds, and what the index takes."""
    drafter = NgramDrafter(**settings)  # type: ignore[arg-type]  # values of several types
    requests = {context: Request(str(context), tokens[:context]) for context in CONTEXTS}
    table = {context: _start(drafter, requests[context]) for context in CONTEXTS}
    samples = {context: Samples() for context in CONTEXTS}
    for step in range(steps):
        for context in CONTEXTS:
            # Long contexts read on, short ones stay near their length.
            at = context + (3 * step) % (len(tokens) - context - 8)
            _time_step(drafter, requests[context], tokens[at : at + 1 + step % 5], samples[context])
    for context in CONTEXTS:
        table[context] |= samples[context].microseconds()
    return table


def _start(drafter: NgramDrafter, request: Request) -> dict[str, float]:
    tracemalloc.start()
    drafter.start(request)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    began = time.perf_counter()
    drafter.start(request)
    took = time.perf_counter() - began
    return {"start_ms": took * 1e3, "bytes_per_token": size / len(request.tokens)}


def _time_step(drafter: NgramDrafter, request: Request, new: list[int], samples: Samples) -> None:
    tasks = [DraftTask(request, drafter.name, 4 + len(samples.hint) % 5)]
    began = time.perf_counter_ns()
    drafter.hint(request, drafter.name)
    hinted = time.perf_counter_ns()
    drafter.propose(tasks, _keep_all)
    proposed = time.perf_counter_ns()
    request.tokens.extend(new)
    committing = time.perf_counter_ns()
    drafter.commit(request, len(new))
    committed = time.perf_counter_ns()
    samples.hint.append(hinted - began)
    samples.propose.append(proposed - hinted)
    samples.commit.append(committed - committing)


def _worth(texts: list[Text]) -> dict[str, dict[int, float]]:
    """By settings and draft length: tokens per verification."""
    return {
        name: {length: _acceptance_length(texts, settings, length) for length in DRAFT_LENGTHS}
        for name, settings in SETTINGS.items()
    }


def _acceptance_length(texts: list[Text], settings: dict[str, int], num_draft_tokens: int) -> float:
    num_steps = sum(1 for text in texts for _ in _decode(text, settings, num_draft_tokens))
    return sum(len(text.output) for text in texts) / num_steps


def _decode(text: Text, settings: dict[str, int], num_draft_tokens: int) -> Iterator[int]:
    """The number of tokens that each step emits."""
    drafter = NgramDrafter(**settings)  # type: ignore[arg-type]  # values of several types
    request, at = Request("r", list(text.prompt)), 0
    drafter.start(request)
    while at < len(text.output):
        (draft,) = drafter.propose([DraftTask(request, "ngram", num_draft_tokens)], _keep_all)
        num_new = min(_num_accepted(draft, text.output[at:]) + 1, len(text.output) - at)
        request.tokens.extend(text.output[at : at + num_new])
        drafter.commit(request, num_new)
        at += num_new
        yield num_new


def _num_accepted(draft: Draft, following: list[int]) -> int:
    nodes = {
        (parent, token): node
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))
    }
    at = ROOT
    for depth, token in enumerate(following):
        if (at, token) not in nodes:
            return depth
        at = nodes[at, token]
    return len(following)


def _keep_all(drafts: Sequence[Draft]) -> Sequence[int]:
    return [len(draft.tokens) for draft in drafts]


def _print_cost(cost: dict[str, dict[int, dict[str, float]]]) -> None:
    print(f"\n{'microseconds, median':24}{'context':>8}{'hint':>7}{'hint + propose':>16}", end="")
    print(f"{'commit of 3':>13}{'start, ms':>11}{'bytes/token':>13}")
    for name, table in cost.items():
        for context, row in table.items():
            print(f"{name:24}{context:8}{row['hint']:7.2f}{row['hint + propose']:16.2f}", end="")
            print(f"{row['commit']:13.2f}{row['start_ms']:11.1f}{row['bytes_per_token']:13.0f}")


def _print_worth(worth: dict[str, dict[str, dict[int, float]]]) -> None:
    for file, table in worth.items():
        lengths = "".join(f"{length:>9}" for length in DRAFT_LENGTHS)
        print(f"\n{file}: acceptance length\n{'  draft tokens':24}{lengths}")
        for name, row in table.items():
            print(f"  {name:22}" + "".join(f"{value:9.3f}" for value in row.values()))


if __name__ == "__main__":
    sys.exit(main())
