"""Words, names and field values that generated documents are made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping


def split_words(words: str) -> list[str]:
    """The words of a line."""
    return words.split()


def proper_name(rng: random.Random) -> str:
    """An invented name."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4))).capitalize()


def word(rng: random.Random) -> str:
    """A common word."""
    return rng.choice(WORDS)


def hexadecimal(rng: random.Random) -> str:
    """Eight hexadecimal digits."""
    return f"{rng.getrandbits(32):08x}"


def identifier(rng: random.Random) -> str:
    """One or two words as an identifier."""
    return "_".join(rng.sample(WORDS, rng.choice((1, 2, 2))))


def date(rng: random.Random) -> str:
    """A day, as YYYY-MM-DD."""
    return f"{rng.randint(2018, 2026)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


WORDS = split_words(
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
SYLLABLES = split_words(
    "an ba bel bor ca cor da del dor el en fa fer ga gen ha hol in ja jo ka kel la len lin lo ma "
    "mar mi mon na nel no or pa per ra ren ri ro sa sel so ta tor un va ver vi wa wen yo za zel"
)
ENTITIES = split_words(
    "orders users invoices shipments tickets devices sensors payments books flights rooms players "
    "patients products events samples vehicles accounts"
)
PARTS = split_words("api worker store gateway index sync cache router queue mailer")
STATES = split_words("open closed pending failed shipped active paused queued done draft")
MESSAGES = (
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
FIELDS: Mapping[str, Callable[[random.Random], object]] = {
    "name": lambda r: f"{proper_name(r)} {proper_name(r)}",
    "email": lambda r: f"{proper_name(r).lower()}@{r.choice(WORDS)}.org",
    "city": proper_name,
    "price": lambda r: round(r.uniform(1, 900), 2),
    "quantity": lambda r: r.randint(1, 60),
    "date": date,
    "status": lambda r: r.choice(STATES),
    "owner": lambda r: proper_name(r).lower(),
    "code": lambda r: f"{hexadecimal(r)[:4].upper()}-{r.randint(100, 999)}",
    "label": lambda r: " ".join(r.sample(WORDS, 2)),
    "note": lambda r: " ".join(r.sample(WORDS, r.randint(3, 7))),
    "score": lambda r: round(r.random(), 3),
    "active": lambda r: r.random() < 0.5,
    "category": lambda r: r.choice(WORDS[:24]),
    "hash": hexadecimal,
    "weight_kg": lambda r: round(r.uniform(0.1, 80), 1),
    "phone": lambda r: f"+{r.randint(30, 60)} {r.randint(100, 999)} {r.randint(10000, 99999)}",
}
