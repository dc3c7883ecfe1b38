"""Edits of a text: an instruction, and the text with the edit made."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from sdcontrol.engine.bundled.words import WORDS, identifier, split_words

__all__ = ["EDITS", "Edited", "rename", "replace_word"]

Edited = tuple[str, str] | None  # the instruction and the edited text; None: not applicable


def rename(text: str, rng: random.Random) -> Edited:
    """Another name for one identifier."""
    names = sorted(set(re.findall(r"\b[a-z_][a-z0-9_]{2,}\b(?!\s*['\"])", text)) - _KEYWORDS)
    if not names:
        return None
    old, new = rng.choice(names), identifier(rng)
    return f"Rename `{old}` to `{new}`", re.sub(rf"\b{re.escape(old)}\b", new, text)


def _rename_function(text: str, rng: random.Random) -> Edited:
    old, new = text[4 : text.index("(")].strip(), identifier(rng)
    return f"Rename the function to `{new}`", re.sub(rf"\b{re.escape(old)}\b", new, text)


def _drop_docstring(text: str, rng: random.Random) -> Edited:
    found = re.search(r'\n +r?"""[\s\S]*?"""[ ]*(?=\n)', text)
    if found is None:
        return None
    return "Remove the docstring", text[: found.start()] + text[found.end() :]


def _add_comment(text: str, rng: random.Random) -> Edited:
    note = f"# {' '.join(rng.sample(WORDS, rng.randint(2, 5)))}"
    return f"Put the comment `{note}` above it", f"{note}\n{text}"


def _log_the_call(text: str, rng: random.Random) -> Edited:
    header = re.match(r"def [^\n]*:\n(?P<indent> +)", text)
    if header is None:
        return None
    line = f'logger.debug("{rng.choice(WORDS)} {identifier(rng)}")'
    at = header.start("indent")
    changed = f"{text[:at]}{header['indent']}{line}\n{text[at:]}"
    return f"Add `{line}` as its first line", changed


def replace_word(text: str, rng: random.Random) -> Edited:
    """Another word for one word, wherever it stands."""
    words = sorted(set(re.findall(r"\b[A-Za-z]{4,}\b", text)))
    if not words:
        return None
    old, new = rng.choice(words), rng.choice(WORDS)
    return f"Replace `{old}` by `{new}`", re.sub(rf"\b{old}\b", new, text)


EDITS: tuple[Callable[[str, random.Random], Edited], ...] = (
    rename,
    rename,
    _rename_function,
    _drop_docstring,
    _add_comment,
    _log_the_call,
)
_KEYWORDS = frozenset(
    split_words(
        "and assert break class continue def del elif else except finally for from global import "
        "is lambda not pass raise return try while with yield self None True False"
    )
)
