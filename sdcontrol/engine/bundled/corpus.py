"""What every Python installation carries: the standard library's source and documentation.

A file belongs to the held-out split by a hash of its path, so the split is the same on every machine.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

__all__ = ["Corpus", "Document", "load_corpus"]

_HELD_OUT_SHARE = 25  # one file in 25
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "encodings",  # tables of characters
        "pydoc_data",  # its text is prose
        "lib-dynload",
        "ensurepip",
    }
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text in two parts: what a user would send, and what a perfect model would answer."""

    prompt: str
    output: str

    @property
    def text(self) -> str:
        """The whole document, as trained on."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Corpus:
    """The raw material of one split."""

    code: tuple[str, ...]  # whole files
    functions: tuple[str, ...]  # dedented, short enough to be edited
    prose: tuple[str, ...]  # docstrings and reference pages


@lru_cache(maxsize=2)
def load_corpus(*, held_out: bool, most_files: int | None = None) -> Corpus:
    """The training or the held-out split of the running interpreter's standard library."""
    code = tuple(islice(_files(held_out=held_out), most_files))
    functions: list[str] = []
    prose: list[str] = list(_reference_pages(held_out=held_out))
    for source in code:
        tree = _parse(source)
        functions += _functions(source, tree)
        prose += _docstrings(tree)
    return Corpus(code, tuple(functions), tuple(prose))


def _files(*, held_out: bool) -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            key = path.relative_to(root).as_posix()
            if path.suffix == ".py" and _is_held_out(key) == held_out:
                text = _read(path)
                if len(text) > 1000 and _parse(text).body:
                    yield text


def _is_held_out(key: str) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % _HELD_OUT_SHARE == 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").expandtabs(4)
    except (OSError, UnicodeDecodeError):
        return ""


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError):
            return ast.Module(body=[], type_ignores=[])


def _functions(source: str, tree: ast.Module) -> Iterator[str]:
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if 150 <= len(text) <= 2500 and text.startswith("def "):
                yield text


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) >= 200:
                yield text.expandtabs(4).strip()


def _reference_pages(*, held_out: bool) -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for key, page in sorted(topics.items()):
        if _is_held_out(f"topic:{key}") == held_out:
            for part in re.split(r"\n\n(?=\S)", str(page).strip()):
                if len(part) >= 200:
                    yield part
