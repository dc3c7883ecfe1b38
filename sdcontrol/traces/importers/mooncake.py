"""Mooncake's public traces: arrivals, lengths, and which prompt beginnings requests share.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}

`timestamp` is in milliseconds; each of `hash_ids` stands for 512 tokens of the prompt, the last for
what is left, and equal leading ids are equal text: the simulation shares their blocks. Knows nothing
of texts or acceptance. Source: kvcache-ai/Mooncake, FAST'25 release.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from sdcontrol.traces.importers.rows import (
    Imported,
    RowError,
    Rows,
    count,
    in_order,
    json_object,
    number,
)
from sdcontrol.traces.workload import SimulatedRequest, Workload

__all__ = ["read_mooncake"]

_BLOCK_TOKENS = 512
_MOST_ID = 1 << 53  # ids are multiplied by the block's tokens


def read_mooncake(path: Path | str, *, max_malformed: float = 0.01) -> Imported:
    """Arrivals, lengths and shared prompt blocks, time counted from 0 as in the file.

    Raises `TraceError` for a file with more than `max_malformed` of its rows malformed.
    """
    path = Path(path)
    rows = Rows(path, lambda: in_order(_parser()), max_malformed=max_malformed)
    report = rows.check()
    origin = {"format": "mooncake", "file": path.name, "rows": report.num_rows}
    return Imported(Workload(path.stem, (), lambda: rows, origin), report)


def _parser() -> Callable[[str, int], SimulatedRequest]:
    def parse(row: str, line: int) -> SimulatedRequest:
        fields = json_object(row)
        prompt_tokens = count(fields, "input_length", least=1)
        return SimulatedRequest(
            f"row-{line}",
            number(fields, "timestamp") / 1000.0,
            prompt_tokens,
            count(fields, "output_length", least=1),
            contents=_ids(fields.get("hash_ids"), prompt_tokens),
            tokens_per_content=_BLOCK_TOKENS,
        )

    return parse


def _ids(found: object, prompt_tokens: int) -> "np.typing.NDArray[np.int64]":
    expected = -(-prompt_tokens // _BLOCK_TOKENS)
    if not isinstance(found, list) or len(found) != expected:
        what = f"{len(found)} ids" if isinstance(found, list) else "no list"
        raise RowError(f"hash_ids has {what}; {expected} were expected for {prompt_tokens} tokens")
    if any(type(value) is not int or not 0 <= value < _MOST_ID for value in found):
        raise RowError("hash_ids has an entry that is no whole number from 0 to 2**53")
    return np.array(found, dtype=np.int64)
