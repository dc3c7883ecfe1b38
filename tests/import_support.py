"""What the tests of importers share: well-formed rows of every format, and files of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sdcontrol.engine.drafters.ngram import matched_lengths
from sdcontrol.outcomes import DEPTH, ArmOutcomes
from sdcontrol.traces.importers import Imported, read_azure, read_mooncake, read_texts, read_vllm
from sdcontrol.traces.step_times import CostTimes, LinearCost

TIMES = CostTimes(LinearCost(5e-3, 1e-5))
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def characters(words: str) -> Sequence[int]:
    """A token a character."""
    return [ord(letter) for letter in words]


def matcher(tokens: NDArray[np.int64], prompt_tokens: int) -> ArmOutcomes:
    """The engine's own, in chains."""
    accepted = matched_lengths(tokens.tolist(), prompt_tokens, DEPTH)
    return ArmOutcomes(accepted.astype(np.uint8))


def texts(path: Path, *, max_malformed: float = 0.01) -> Imported:
    return read_texts(path, characters, matcher, max_malformed=max_malformed)


READERS: dict[str, Callable[..., Imported]] = {
    "azure": read_azure,
    "mooncake": read_mooncake,
    "texts": texts,
    "vllm": read_vllm,
}


def response(
    accepted: Sequence[int], drafted: Sequence[int], output: int, **more: object
) -> dict[str, object]:
    """What vLLM answers, as far as it is read."""
    return {
        "created": 100,
        "usage": {"prompt_tokens": 7, "completion_tokens": output},
        "metrics": {
            "speculative_decoding": {
                "per_step_accepted": list(accepted),
                "per_step_drafted": list(drafted),
                "num_spec_steps": len(accepted),
            }
        },
        **more,
    }


def good_rows(kind: str, number: int) -> list[str]:
    """Rows that are well-formed, in order of arrival."""
    rows: dict[str, Callable[[int], str]] = {
        "azure": lambda i: f"2023-11-16 18:{i // 60:02}:{i % 60:02}.5000000,{i + 1},3",
        "mooncake": lambda i: json.dumps(
            {"timestamp": 10 * i, "input_length": 600, "output_length": 3, "hash_ids": [0, i]}
        ),
        "texts": lambda i: json.dumps({"id": f"t{i}", "prompt": "abcabc", "output": "abca"}),
        "vllm": lambda i: json.dumps(response([1], [2], 3, id=f"v{i}", created=100 + i)),
    }
    return [rows[kind](i) for i in range(number)]


def written(path: Path, kind: str, rows: Sequence[str | bytes]) -> Path:
    lines = [row if isinstance(row, bytes) else row.encode() for row in rows]
    path.write_bytes((HEADER.encode() if kind == "azure" else b"") + b"\n".join(lines) + b"\n")
    return path
