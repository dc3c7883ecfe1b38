"""Results of prompts, written in the order of the prompts as soon as that is possible.

Knows text and JSON lines; nothing of models, requests or steps.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from sdcontrol.cli.prompts import Prompt

__all__ = ["InOrder", "JsonLinesWriter", "Result", "TextWriter", "Writer"]


@dataclass(slots=True)
class Result:
    """What came of one prompt so far."""

    prompt: Prompt
    output: str = ""
    tokens: int = 0
    finish_reason: str | None = None  # of generate, or refused, or cancelled
    drafters: Mapping[str, Mapping[str, int]] | None = None  # None: not known, it was cut short
    error: str | None = None

    def record(self) -> dict[str, object]:
        """As JSON has it."""
        record: dict[str, object] = {
            "id": self.prompt.id,
            "prompt": self.prompt.text,
            "output": self.output,
            "finish_reason": self.finish_reason,
            "tokens": self.tokens,
            "drafters": self.drafters,
        }
        return record if self.error is None else record | {"error": self.error}


class Writer(Protocol):
    """Writes one result after the other."""

    def more(self, result: Result, text: str) -> None:
        """`text` was appended to the output of the result whose turn it is."""
        ...

    def end(self, result: Result) -> None:
        """This result is complete."""
        ...


class TextWriter:
    """Outputs as text; of several, each stands under a line with its id."""

    def __init__(self, file: TextIO, *, has_headers: bool) -> None:
        self._file = file
        self._has_headers = has_headers
        self._current: Result | None = None

    def more(self, result: Result, text: str) -> None:
        """Print it at once."""
        self._begin(result)
        self._file.write(text)
        self._file.flush()

    def end(self, result: Result) -> None:
        """The last line is ended; a prompt that never began leaves nothing."""
        has_begun = result.output or result.finish_reason not in ("refused", "cancelled")
        if not has_begun:
            return
        self._begin(result)
        self._file.write("\n")
        self._file.flush()

    def _begin(self, result: Result) -> None:
        if self._has_headers and self._current is not result:
            self._file.write(f"==> {result.prompt.id} <==\n")
        self._current = result


class JsonLinesWriter:
    """One JSON object per line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def more(self, result: Result, text: str) -> None:
        """Nothing yet: a line is written when all of it is known."""

    def end(self, result: Result) -> None:
        """Print the line."""
        self._file.write(json.dumps(result.record(), ensure_ascii=False) + "\n")
        self._file.flush()


class InOrder:
    """Holds back what comes before its turn."""

    def __init__(self, prompts: Sequence[Prompt], writer: Writer) -> None:
        self.results = [Result(prompt) for prompt in prompts]
        self._writer = writer
        self._turn = 0

    def add(self, index: int, text: str, num_tokens: int) -> None:
        """More output of the prompt at `index`."""
        result = self.results[index]
        result.output += text
        result.tokens += num_tokens
        if index == self._turn and text:
            self._writer.more(result, text)

    def end(
        self,
        index: int,
        finish_reason: str,
        *,
        drafters: Mapping[str, Mapping[str, int]] | None = None,
        error: str | None = None,
    ) -> None:
        """The prompt at `index` has its whole output."""
        result = self.results[index]
        result.finish_reason, result.error, result.drafters = finish_reason, error, drafters
        while self._turn < len(self.results) and self.results[self._turn].finish_reason:
            self._writer.end(self.results[self._turn])
            self._next_turn()

    def interrupt(self) -> None:
        """Write what there is of the prompts that have not ended; nothing where there is nothing."""
        if not any(result.tokens or result.finish_reason for result in self.results):
            return
        for index, result in enumerate(self.results):
            if result.finish_reason is None:
                self.end(index, "cancelled")

    def _next_turn(self) -> None:
        self._turn += 1
        if self._turn < len(self.results) and self.results[self._turn].output:
            self._writer.more(self.results[self._turn], self.results[self._turn].output)
