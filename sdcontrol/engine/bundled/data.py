"""The text that the bundled models are trained on and asked about.

Six kinds of document, all made from what every Python installation carries: `code` and `prose` are
the standard library's source and documentation, `edit` and `copy` are tasks built on them,
`records` and `logs` are generated. They differ in how predictable they are and in how much of their
own prompt they repeat, so that a drafter which is good at one kind is poor at another.

Knows nothing of tokens or tensors; sizes are in characters (about three to a token).
A file belongs to the held-out split by a hash of its path, so the split is the same on every
machine.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

KINDS: tuple[str, ...] = ("code", "prose", "edit", "copy", "records", "logs")

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


def document(kind: str, corpus: Corpus, rng: random.Random, size: int) -> Document:
    """A document of `kind` whose prompt is about `size` characters long."""
    return _MAKERS[kind](corpus, rng, size)


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


def _split(words: str) -> list[str]:
    return words.split()


# -- the standard library --------------------------------------------------------------------------


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
    """Split after `size` characters, at the end of a line: a prompt never ends in white space."""
    end = text.find("\n", size)
    end = len(text) * 2 // 3 if end < 0 else end
    end = len(text[:end].rstrip())
    return Document(text[:end], text[end:])


# -- edits -----------------------------------------------------------------------------------------


def _edit(corpus: Corpus, rng: random.Random, size: int) -> Document:
    if rng.random() < 0.2:
        before = "\n".join(_record_rows(rng, size))
        changed = _replace_word(before, rng)
    else:
        before = _function_of(corpus, rng, size)
        changed = rng.choice(_EDITS)(before, rng) or _rename(before, rng)
    what, after = changed or ("Copy this without a change", before)
    return Document(f"### Task\n{what}:\n\n{before}\n\n### Result:", f"\n{after}")


def _function_of(corpus: Corpus, rng: random.Random, size: int) -> str:
    """One function of at most `size` characters, or several that together have about `size`."""
    tries = [rng.choice(corpus.functions) for _ in range(8)]
    text = max((t for t in tries if len(t) <= size), key=len, default=min(tries, key=len))
    while len(text) < 0.6 * size:
        text += "\n\n" + rng.choice(corpus.functions)
    return text


_Edited = tuple[str, str] | None  # the instruction and the edited text; None: not applicable


def _rename(text: str, rng: random.Random) -> _Edited:
    names = sorted(set(re.findall(r"\b[a-z_][a-z0-9_]{2,}\b(?!\s*['\"])", text)) - _KEYWORDS)
    if not names:
        return None
    old, new = rng.choice(names), _identifier(rng)
    return f"Rename `{old}` to `{new}`", re.sub(rf"\b{re.escape(old)}\b", new, text)


def _rename_function(text: str, rng: random.Random) -> _Edited:
    old, new = text[4 : text.index("(")].strip(), _identifier(rng)
    return f"Rename the function to `{new}`", re.sub(rf"\b{re.escape(old)}\b", new, text)


def _drop_docstring(text: str, rng: random.Random) -> _Edited:
    found = re.search(r'\n +r?"""[\s\S]*?"""[ ]*(?=\n)', text)
    if found is None:
        return None
    return "Remove the docstring", text[: found.start()] + text[found.end() :]


def _add_comment(text: str, rng: random.Random) -> _Edited:
    note = f"# {' '.join(rng.sample(_WORDS, rng.randint(2, 5)))}"
    return f"Put the comment `{note}` above it", f"{note}\n{text}"


def _log_the_call(text: str, rng: random.Random) -> _Edited:
    header = re.match(r"def [^\n]*:\n(?P<indent> +)", text)
    if header is None:
        return None
    line = f'logger.debug("{rng.choice(_WORDS)} {_identifier(rng)}")'
    at = header.start("indent")
    changed = f"{text[:at]}{header['indent']}{line}\n{text[at:]}"
    return f"Add `{line}` as its first line", changed


def _replace_word(text: str, rng: random.Random) -> _Edited:
    words = sorted(set(re.findall(r"\b[A-Za-z]{4,}\b", text)))
    if not words:
        return None
    old, new = rng.choice(words), rng.choice(_WORDS)
    return f"Replace `{old}` by `{new}`", re.sub(rf"\b{old}\b", new, text)


_EDITS: tuple[Callable[[str, random.Random], _Edited], ...] = (
    _rename,
    _rename,
    _rename_function,
    _drop_docstring,
    _add_comment,
    _log_the_call,
)
_KEYWORDS = frozenset(
    _split(
        "and assert break class continue def del elif else except finally for from global import "
        "is lambda not pass raise return try while with yield self None True False"
    )
)


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
    makers = (_name, _identifier, _hex, _word)
    some = rng.sample(makers, rng.randint(1, 3))
    words: list[str] = []
    while sum(map(len, words)) + len(words) < size:
        words.append(rng.choice(some)(rng))
    return textwrap.fill(" ".join(words), 80)


# -- records ---------------------------------------------------------------------------------------


def _records(corpus: Corpus, rng: random.Random, size: int) -> Document:
    rows = _record_rows(rng, int(size * rng.uniform(1.3, 3.0)))
    head = f"{rng.choice(_ENTITIES)}: {len(rows)} records"
    return _cut("\n".join([head, *rows]), size)


def _record_rows(rng: random.Random, size: int) -> list[str]:
    """Rows of one schema in one notation, of about `size` characters together."""
    schema = dict(rng.sample(list(_FIELDS.items()), rng.randint(3, 7)))
    write = rng.choice((_json_row, _json_row, _csv_row, _sql_row, _block_row))
    table, number, rows = rng.choice(_ENTITIES), rng.randint(1, 9000), [""]
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
            name=f"{rng.choice(_ENTITIES)}-{rng.choice(_PARTS)}",
            messages=rng.sample(_MESSAGES, rng.randint(4, 8)),
            subjects=[
                rng.choice((_hex, _name, _identifier))(rng) for _ in range(rng.randint(3, 8))
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
            hex=_hex(rng),
            ms=rng.randint(1, 2500),
            n=rng.randint(1, 400),
            word=rng.choice(_WORDS),
            name=_name(rng),
        )
        return self.separator.join((self.stamp(), level, self.name, text))


# -- words -----------------------------------------------------------------------------------------


def _name(rng: random.Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4))).capitalize()


def _word(rng: random.Random) -> str:
    return rng.choice(_WORDS)


def _hex(rng: random.Random) -> str:
    return f"{rng.getrandbits(32):08x}"


def _identifier(rng: random.Random) -> str:
    return "_".join(rng.sample(_WORDS, rng.choice((1, 2, 2))))


def _date(rng: random.Random) -> str:
    return f"{rng.randint(2018, 2026)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


_WORDS = _split(
    "account address amount archive article batch border bottle branch bridge bucket budget buffer "
    "cable cache camera candle canvas carbon castle center chain channel circle client cloud "
    "cluster color column copper corner cotton counter course cover credit current cycle daily "
    "delta depth desert device dinner doctor double driver engine entry error event export fabric "
    "factor family figure filter finger flower folder forest frame garden glass global group guest "
    "hammer handle harbor header height history hollow honey image import index inner island item "
    "jacket journey kernel kitchen ladder launch layer leader length letter level light limit "
    "linear local lower machine margin market master matrix memory metal middle minute mirror "
    "module moment monitor morning motor mountain movie native nature needle number object ocean "
    "office orange order outer output owner packet panel paper parent partner pattern pepper "
    "phase pilot planet player pocket point policy portal power present process product profile "
    "project public purple quarter queue quiet radio random rapid record region remote report "
    "result return river rocket route sample school screen season second section sensor server "
    "session shadow shelter signal silver simple single socket source spring square stable "
    "station status stone storage stream street string summer supply switch symbol system table "
    "target temple thread ticket timber token total tower traffic travel tunnel union update "
    "upper user valley value vector version vessel village vision volume wagon water weather "
    "window winter wonder worker yellow"
)
_SYLLABLES = _split(
    "an ba bel bor ca cor da del dor el en fa fer ga gen ha hol in ja jo ka kel la len lin lo ma "
    "mar mi mon na nel no or pa per ra ren ri ro sa sel so ta tor un va ver vi wa wen yo za zel"
)
_ENTITIES = _split(
    "orders users invoices shipments tickets devices sensors payments books flights rooms players "
    "patients products events samples vehicles accounts"
)
_PARTS = _split("api worker store gateway index sync cache router queue mailer")
_STATES = _split("open closed pending failed shipped active paused queued done draft")
_MESSAGES = (
    "request {hex} started for {subject}",
    "request {hex} finished in {ms} ms",
    "cache miss for {subject}, loading {word}",
    "cache hit for {subject} ({n} entries)",
    "user {name} logged in from 10.0.{n}.7",
    "user {name} changed {word} of {subject}",
    "retry {n} of {subject} after {ms} ms",
    "connection to {subject} lost: {word} timed out after {ms} ms",
    "wrote {n} rows to table {word}",
    "job {subject} took {ms} ms and {n} MB",
    "queue {word} holds {n} messages, oldest {ms} ms",
    "GET /{word}/{n} 200 {ms}",
    "POST /{word}/{n} 503 {ms}",
    "checkpoint {hex} of {subject} saved, {n} files",
    "worker {subject} picked up {word} {hex}",
    "disk {word} is {n} GB full",
)
_FIELDS: Mapping[str, Callable[[random.Random], object]] = {
    "name": lambda r: f"{_name(r)} {_name(r)}",
    "email": lambda r: f"{_name(r).lower()}@{r.choice(_WORDS)}.org",
    "city": _name,
    "price": lambda r: round(r.uniform(1, 900), 2),
    "quantity": lambda r: r.randint(1, 60),
    "date": _date,
    "status": lambda r: r.choice(_STATES),
    "owner": lambda r: _name(r).lower(),
    "code": lambda r: f"{_hex(r)[:4].upper()}-{r.randint(100, 999)}",
    "label": lambda r: " ".join(r.sample(_WORDS, 2)),
    "note": lambda r: " ".join(r.sample(_WORDS, r.randint(3, 7))),
    "score": lambda r: round(r.random(), 3),
    "active": lambda r: r.random() < 0.5,
    "category": lambda r: r.choice(_WORDS[:24]),
    "hash": _hex,
    "weight_kg": lambda r: round(r.uniform(0.1, 80), 1),
    "phone": lambda r: f"+{r.randint(30, 60)} {r.randint(100, 999)} {r.randint(10000, 99999)}",
}
_MAKERS: Mapping[str, Callable[[Corpus, random.Random, int], Document]] = {
    "code": _code,
    "prose": _prose,
    "edit": _edit,
    "copy": _copy,
    "records": _records,
    "logs": _logs,
}
