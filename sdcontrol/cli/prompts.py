"""Prompts from the command line, files and standard input.

Knows files and their lines; nothing of tokens or models.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from sdcontrol.cli.files import as_text
from sdcontrol.errors import ConfigError

__all__ = ["Prompt", "read_prompts"]

_JSON_LINES = {".jsonl", ".ndjson"}
STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, and what to call it."""

    id: str | int
    text: str


def read_prompts(given: Sequence[str], paths: Sequence[str], stdin: TextIO | None) -> list[Prompt]:
    """All prompts: those given, of which "-" is standard input, then those of the files, in order.

    A file of JSON lines has one prompt in each: `{"prompt": "...", "id": ...}`, where `id` (a
    string or whole number) may be left out. Any other file is one prompt, to the last character.
    A mark of the byte order at its beginning is no part of it. Standard input is read alike; None: it
    is closed. Raises `ConfigError` for a file that cannot be read, a bad line, an id that comes twice.
    """
    if given.count(STANDARD_INPUT) > 1:
        raise ConfigError("- stands there twice; standard input can be read once")
    prompts = [
        Prompt(f"prompt-{number}", _read_stdin(stdin) if text == STANDARD_INPUT else text)
        for number, text in enumerate(given, start=1)
    ]
    for path in paths:
        prompts.extend(_read_file(path))
    if not prompts:
        raise ConfigError("no prompt; give one, or --file PATH, or - for standard input")
    _check(prompts)
    return prompts


def _read_stdin(stdin: TextIO | None) -> str:
    if stdin is None:
        raise ConfigError("standard input is closed; give a prompt, or --file PATH")
    source = getattr(stdin, "buffer", None)  # as files are read: whatever encoding the stream has
    try:
        return stdin.read() if source is None else str(source.read().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is no UTF-8 text: {error.reason}") from error


def _read_file(path: str) -> Iterator[Prompt]:
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")  # line ends stay as they are
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    name = as_text(path)
    if Path(path).suffix.lower() not in _JSON_LINES:
        return iter([Prompt(name, text)])
    return _json_lines(name, text.split("\n"))


def _json_lines(path: str, lines: Iterable[str]) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _json_line(f"{path}:{number}", line)


def _json_line(where: str, line: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: no JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, too deep a nest
        raise ConfigError(f"{where}: no JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ConfigError(f'{where}: no prompt; a line is {{"prompt": "some text"}}')
    name = entry.get("id", where)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ConfigError(f"{where}: id={name!r}; give a string or a whole number")
    return Prompt(name, entry["prompt"])


def _check(prompts: Iterable[Prompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if str(prompt.id) in seen:
            raise ConfigError(f"two prompts have the id {prompt.id!r}; rename one")
        seen.add(str(prompt.id))
        for what, text in (("id", str(prompt.id)), ("prompt", prompt.text)):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"{what} of {prompt.id!r} is no text: {error.reason}") from error
