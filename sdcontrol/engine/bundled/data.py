"""The text that the bundled models are trained on and asked about.

Six kinds of document, all made from what every Python installation carries: `code` and `prose` are
the standard library's source and documentation, `edit` and `copy` are tasks built on them,
`records` and `logs` are generated. They differ in how predictable they are and in how much of their
own prompt they repeat, so that a drafter which is good at one kind is poor at another.

Knows nothing of tokens or tensors; sizes are in characters (about three to a token).
"""

from __future__ import annotations

import json
import random
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from sdcontrol.engine.bundled.corpus import Corpus, Document
from sdcontrol.engine.bundled.edits import EDITS, rename, replace_word
from sdcontrol.engine.bundled.words import (
    ENTITIES,
    FIELDS,
    MESSAGES,
    PARTS,
    WORDS,
    hexadecimal,
    identifier,
    proper_name,
    word,
)

__all__ = ["KINDS", "document"]

KINDS: tuple[str, ...] = ("code", "prose", "edit", "copy", "records", "logs")


def document(kind: str, corpus: Corpus, rng: random.Random, size: int) -> Document:
    """A document of `kind` whose prompt is about `size` characters long."""
    return _MAKERS[kind](corpus, rng, size)


# -- code and prose --------------------------------------------------------------------------------


def _code(corpus: Corpus, rng: random.Random, size: int) -> Document:
    if size < 1000 and rng.random() < 0.3:
        return _cut(rng.choice(corpus.functions), size)
    (text,) = rng.choices(corpus.code, weights=_lengths(corpus.code))
    starts = [m.end() for m in re.finditer(r"\n(?=\S)", text[: max(1, len(text) - 2 * size)])]
    return _cut(text[rng.choice(starts or [0]) :].strip(), size)


def _prose(corpus: Corpus, rng: random.Random, size: int) -> Document:
    text = rng.choice(corpus.prose)
    while len(text) < 1.5 * size:
        text += "\n\n" + rng.choice(corpus.prose)
    return _cut(text, size)


@lru_cache(maxsize=4)
def _lengths(texts: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(len(text) for text in texts)


def _cut(text: str, size: int) -> Document:
    """Split after `size` characters, or about two thirds of a shorter text, at the end of a line.

    A prompt never ends in white space.
    """
    end = text.find("\n", size)
    if end < 0:
        most = len(text) * 2 // 3
        ends = [match.start() for match in re.finditer("\n", text.rstrip())] or [most]
        end = min(ends, key=lambda at: abs(at - most))
    end = len(text[:end].rstrip())
    return Document(text[:end], text[end:])


# -- edits -----------------------------------------------------------------------------------------


def _edit(corpus: Corpus, rng: random.Random, size: int) -> Document:
    if rng.random() < 0.2:
        before = "\n".join(_record_rows(rng, size))
        changed = replace_word(before, rng)
    else:
        before = _function_of(corpus, rng, size)
        changed = rng.choice(EDITS)(before, rng) or rename(before, rng)
    what, after = changed or ("Copy this without a change", before)
    return Document(f"### Task\n{what}:\n\n{before}\n\n### Result:", f"\n{after}")


def _function_of(corpus: Corpus, rng: random.Random, size: int) -> str:
    """One function of at most `size` characters, or several that together have about `size`."""
    tries = [rng.choice(corpus.functions) for _ in range(8)]
    text = max((t for t in tries if len(t) <= size), key=len, default=min(tries, key=len))
    while len(text) < 0.6 * size:
        text += "\n\n" + rng.choice(corpus.functions)
    return text


# -- copies ----------------------------------------------------------------------------------------


def _copy(corpus: Corpus, rng: random.Random, size: int) -> Document:
    make = rng.choice((_prose_passage, _prose_passage, _code_passage, _row_passage, _noise_passage))
    passage = make(corpus, rng, size).strip()
    ask = rng.choice(("Repeat the passage", "Say this again", "Copy the text"))
    return Document(f"{ask}:\n\n{passage}\n\nThe same again:", f"\n{passage}")


def _prose_passage(corpus: Corpus, rng: random.Random, size: int) -> str:
    return _prose(corpus, rng, size).prompt


def _code_passage(corpus: Corpus, rng: random.Random, size: int) -> str:
    return _code(corpus, rng, size).prompt


def _row_passage(corpus: Corpus, rng: random.Random, size: int) -> str:
    return "\n".join(_record_rows(rng, size))


def _noise_passage(corpus: Corpus, rng: random.Random, size: int) -> str:
    """Words in no order: only copying can predict them."""
    makers = (proper_name, identifier, hexadecimal, word)
    some = rng.sample(makers, rng.randint(1, 3))
    words: list[str] = []
    while sum(map(len, words)) + len(words) < size:
        words.append(rng.choice(some)(rng))
    return textwrap.fill(" ".join(words), 80)


# -- records ---------------------------------------------------------------------------------------


def _records(corpus: Corpus, rng: random.Random, size: int) -> Document:
    rows = _record_rows(rng, int(size * rng.uniform(1.3, 3.0)))
    head = f"{rng.choice(ENTITIES)}: {len(rows)} records"
    return _cut("\n".join([head, *rows]), size)


def _record_rows(rng: random.Random, size: int) -> list[str]:
    """Rows of one schema in one notation, of about `size` characters together."""
    schema = dict(rng.sample(list(FIELDS.items()), rng.randint(3, 7)))
    write = rng.choice((_json_row, _json_row, _csv_row, _sql_row, _block_row))
    table, number, rows = rng.choice(ENTITIES), rng.randint(1, 9000), [""]
    while sum(map(len, rows)) + len(rows) < size or len(rows) < 3:
        number += rng.choice((1, 1, 1, 2))
        rows.append(write(table, number, {name: make(rng) for name, make in schema.items()}))
    return rows[1:]


def _json_row(table: str, number: int, values: Mapping[str, object]) -> str:
    return json.dumps({"id": number, **values})


def _csv_row(table: str, number: int, values: Mapping[str, object]) -> str:
    return ",".join([str(number), *(str(value) for value in values.values())])


def _sql_row(table: str, number: int, values: Mapping[str, object]) -> str:
    columns = ", ".join(["id", *values])
    cells = ", ".join([str(number), *(repr(value) for value in values.values())])
    return f"INSERT INTO {table} ({columns}) VALUES ({cells});"


def _block_row(table: str, number: int, values: Mapping[str, object]) -> str:
    return "\n".join([f"- id: {number}", *(f"  {key}: {value}" for key, value in values.items())])


# -- logs ------------------------------------------------------------------------------------------


def _logs(corpus: Corpus, rng: random.Random, size: int) -> Document:
    service = _Service.drawn(rng)
    total, lines = int(size * rng.uniform(1.3, 3.0)), [service.line(rng)]
    while sum(map(len, lines)) + len(lines) < total:
        lines.append(service.line(rng))
    lines.append(f"{service.stamp()} {service.name} closed after {len(lines)} lines")
    return _cut("\n".join(lines), size)


@dataclass(slots=True)
class _Service:
    """A program that writes a log: its clock runs on, its messages and their subjects come back."""

    name: str
    messages: list[str]
    subjects: list[str]
    separator: str
    milliseconds: int

    @classmethod
    def drawn(cls, rng: random.Random) -> _Service:
        """A service with a few kinds of message and a few things that it talks about."""
        return cls(
            name=f"{rng.choice(ENTITIES)}-{rng.choice(PARTS)}",
            messages=rng.sample(MESSAGES, rng.randint(4, 8)),
            subjects=[
                rng.choice((hexadecimal, proper_name, identifier))(rng)
                for _ in range(rng.randint(3, 8))
            ],
            separator=rng.choice((" ", " | ", " - ")),
            milliseconds=rng.randrange(86_400_000),
        )

    def stamp(self) -> str:
        """The time of day, as the log writes it."""
        seconds, milliseconds = divmod(self.milliseconds % 86_400_000, 1000)
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours:02}:{minutes:02}:{seconds % 60:02}.{milliseconds:03}"

    def line(self, rng: random.Random) -> str:
        """The next line."""
        self.milliseconds += int(rng.expovariate(1 / 300))
        level = rng.choice(("INFO", "INFO", "INFO", "DEBUG", "WARN", "ERROR"))
        text = rng.choice(self.messages).format(
            subject=rng.choice(self.subjects),
            hex=hexadecimal(rng),
            ms=rng.randint(1, 2500),
            n=rng.randint(1, 400),
            word=rng.choice(WORDS),
            name=proper_name(rng),
        )
        return self.separator.join((self.stamp(), level, self.name, text))


_MAKERS: Mapping[str, Callable[[Corpus, random.Random, int], Document]] = {
    "code": _code,
    "prose": _prose,
    "edit": _edit,
    "copy": _copy,
    "records": _records,
    "logs": _logs,
}
