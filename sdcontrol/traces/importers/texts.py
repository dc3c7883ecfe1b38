"""Prompts and outputs as JSON lines: what an n-gram drafter would have had accepted in them.

    {"prompt": "Change the function ...", "output": "def close(...", "id": "edit/0"}

`id` is optional and need not be unique, other keys are ignored. Under greedy decoding a recorded prompt and output fix
exactly what a look-up has accepted at every position. Knows no drafter: the matcher is passed in,
and so is the tokenizer. All texts arrive at once; give them arrivals with `with_arrivals_of`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sdcontrol.errors import ConfigError
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.traces.importers.rows import Imported, RowError, Rows, json_object, text
from sdcontrol.traces.workload import SimulatedRequest, Workload

__all__ = ["NgramMatcher", "Tokenize", "read_texts", "tokenizer_from"]

Tokenize = Callable[[str], Sequence[int]]
"""From a text to token ids, without any that the text does not have."""


class NgramMatcher(Protocol):
    """An n-gram drafter, asked at every position of an output."""

    def __call__(self, tokens: NDArray[np.int64], prompt_tokens: int) -> ArmOutcomes:
        """Outcomes `[len(tokens) - prompt_tokens]`, match lengths and limits included."""
        ...


def read_texts(
    path: Path | str,
    tokenize: Tokenize,
    matcher: NgramMatcher,
    *,
    arm: str = "ngram",
    max_malformed: float = 0.01,
) -> Imported:
    """Texts with the acceptance of `arm`, matched anew at every reading of the workload.

    `Workload.of(name, workload)` keeps the result in memory: some 12 bytes a token. Raises
    `TraceError` for a file with more than `max_malformed` of its rows malformed.
    """
    path = Path(path)
    rows = Rows(path, lambda: _parser(tokenize), max_malformed=max_malformed)
    report = rows.check()

    def make() -> Iterator[SimulatedRequest]:
        for found in rows:
            yield SimulatedRequest(
                found.id,
                0.0,
                found.prompt_tokens,
                len(found.tokens) - found.prompt_tokens,
                {arm: matcher(found.tokens, found.prompt_tokens)},
                contents=found.tokens,
            )

    origin = {"format": "texts", "file": path.name, "rows": report.num_rows}
    return Imported(Workload(path.stem, (arm,), make, origin), report)


def tokenizer_from(path: Path | str) -> Tokenize:
    """A `tokenizer.json`, as the library `tokenizers` writes it.

    Raises `ConfigError` for a file that is none, and where a text is beyond its vocabulary.
    """
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"{path} is no tokenizer: {error}; give a tokenizer.json") from error

    def tokenize(words: str) -> Sequence[int]:
        try:
            ids: Sequence[int] = loaded.encode(words, add_special_tokens=False).ids
        except Exception as error:
            raise ConfigError(
                f"{path} cannot tokenize {words[:40]!r}: {error}; give the tokenizer of the model "
                "that is meant"
            ) from error
        return ids

    return tokenize


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """A row: prompt and output, tokenized apart as they would be in serving."""

    id: str
    tokens: NDArray[np.int64]
    prompt_tokens: int


def _parser(tokenize: Tokenize) -> Callable[[str, int], _Text]:
    seen: set[str] = set()

    def parse(row: str, line: int) -> _Text:
        fields = json_object(row)
        name = str(fields.get("id", f"row-{line}"))
        parts = [tokenize(text(fields, key)) for key in ("prompt", "output")]
        if not all(parts):
            raise RowError("prompt or output has no tokens")
        if name in seen:
            name = f"{name} (line {line})"
        seen.add(name)
        return _Text(name, np.array([*parts[0], *parts[1]], dtype=np.int64), len(parts[0]))

    return parse
