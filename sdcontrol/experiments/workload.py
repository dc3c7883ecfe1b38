"""The requests of a block: prompts, seeds, times of arrival. The same for every arm.

Knows files, bundled prompts and chance; nothing of engines or policies. Files are dealt out in
rounds: every prompt once, in random order, before any comes again; recorded arrivals keep their
order.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from sdcontrol.engine.bundled import held_out_prompts
from sdcontrol.errors import ConfigError
from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.schedule import block_seed
from sdcontrol.experiments.workload_settings import OpenLoop, Recorded
from sdcontrol.plain_numbers import PlainNumbers

if TYPE_CHECKING:
    from sdcontrol.traces.schema import RequestRecord

__all__ = ["WorkItem", "arrivals", "block_items", "check_files", "dealt"]

_Entry = TypeVar("_Entry")

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request."""

    name: str  # unique in the run
    prompt: tuple[int, ...]
    seed: int
    arrival_seconds: float | None  # since the block began; None: when there is room for it


class _Line(PlainNumbers):
    """One line of a file; other keys are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    prompt: str = Field(min_length=1)
    arrival_seconds: float | None = Field(None, ge=0)


def block_items(experiment: Experiment, block: int, encode: Encode) -> list[WorkItem]:
    """The block's requests in order of arrival. Raises `ConfigError` for files."""
    workload = experiment.workload
    if workload.trace is not None:
        records = dealt(experiment, block, _recorded(workload.trace))
        found = [(r.id, tuple(r.prompt_ids or ())[: r.prompt_tokens]) for r in records]
        times = arrivals(experiment, block, [record.arrival_seconds for record in records])
    else:
        named = _bundled(experiment, block) if workload.kinds else _filed(experiment, block)
        found = [(name, tuple(encode(line.prompt))) for name, line in named]
        times = arrivals(experiment, block, [line.arrival_seconds or 0.0 for _, line in named])
    seed = block_seed(experiment, block, "sampling")
    return [
        WorkItem(f"{block}.{place} {name}", prompt, seed + place, time)
        for place, ((name, prompt), time) in enumerate(zip(found, times, strict=True))
    ]


def check_files(experiment: Experiment) -> None:
    """Raise `ConfigError` for a file that cannot be used, before anything long begins."""
    if experiment.workload.trace is not None:
        _recorded(experiment.workload.trace)
    files = experiment.workload.files
    if files and _lines(files) and isinstance(experiment.workload.arrivals, Recorded):
        for name in files:
            _check_arrivals(name, [line.arrival_seconds for _, line in _read(name)])


def _check_arrivals(name: str, times: Sequence[float | None]) -> None:
    """Raise `ConfigError` unless every line says when it comes, none before the one above it."""
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        raise ConfigError(
            "workload.arrivals: recorded, but a line has no arrival_seconds; add it, or use closed"
        )
    for before, after in pairwise(known):
        if after < before:
            raise ConfigError(
                f"{name}: arrival_seconds {after} stands below {before}; sort its lines by time"
            )


def _bundled(experiment: Experiment, block: int) -> list[tuple[str, _Line]]:
    seed, workload = block_seed(experiment, block, "prompts"), experiment.workload
    named = [
        (kind, _Line(prompt=prompt))
        for kind, count in workload.kinds.items()
        for prompt in held_out_prompts(kind, count, seed=seed, min_tokens=workload.min_tokens)
    ]
    random.Random(seed).shuffle(named)
    return named


def _filed(experiment: Experiment, block: int) -> list[tuple[str, _Line]]:
    return dealt(experiment, block, _lines(experiment.workload.files))


def dealt(experiment: Experiment, block: int, entries: Sequence[_Entry]) -> list[_Entry]:
    """The block's share of `entries`; recorded arrivals keep their order."""
    count = experiment.workload.requests_per_block
    places = [divmod(place, len(entries)) for place in range(block * count, (block + 1) * count)]
    rounds = {number for number, _ in places}
    orders = {number: _order(experiment, number, len(entries)) for number in rounds}
    return [entries[orders[number][within]] for number, within in places]


def _order(experiment: Experiment, round_number: int, num_entries: int) -> list[int]:
    """In which a round deals out all entries."""
    order = list(range(num_entries))
    if not isinstance(experiment.workload.arrivals, Recorded):
        random.Random(f"{experiment.seed} round {round_number}").shuffle(order)
    return order


def arrivals(experiment: Experiment, block: int, recorded: Sequence[float]) -> list[float | None]:
    """When each request comes, in seconds since the block began, never falling; see `WorkItem`."""
    rule = experiment.workload.arrivals
    if isinstance(rule, OpenLoop):
        rng = random.Random(block_seed(experiment, block, "arrivals"))
        gaps = [rng.expovariate(rule.requests_per_second) for _ in recorded]
        return list(accumulate(gaps))
    if isinstance(rule, Recorded):
        gaps = [max(b - a, 0.0) for a, b in pairwise(recorded)]  # a new round begins at once
        return list(accumulate([0.0, *(gap / rule.speed for gap in gaps)]))
    return [None] * len(recorded)


@cache
def _recorded(path: str) -> "tuple[RequestRecord, ...]":
    from sdcontrol.traces.bundled import trace_folder
    from sdcontrol.traces.reader import Trace

    trace = Trace(trace_folder(path))
    records = tuple(record for record in trace.requests() if record.prompt_ids is not None)
    if not records:
        raise ConfigError(
            f"{path} holds no prompts, only their lengths; record them, or set backend: trace"
        )
    return records


@cache
def _lines(files: tuple[str, ...]) -> tuple[tuple[str, _Line], ...]:
    found = [entry for name in files for entry in _read(name)]
    if not found:
        raise ConfigError(f"workload.files: no prompt in {', '.join(files)}; add one per line")
    return tuple(found)


def _read(name: str) -> list[tuple[str, _Line]]:
    path = Path(name)
    try:
        text = path.read_bytes().decode("utf-8-sig")  # line ends stay as they are
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is no UTF-8 text: {error.reason}; save it as UTF-8") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        here = "" if path.is_absolute() else f", or run this where it lies: now it is {Path.cwd()}"
        raise ConfigError(
            f"{name} cannot be read: {reason}; correct workload.files{here}"
        ) from error
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        return [(path.name, _Line(prompt=text))] if text else []
    return [
        (f"{path.name}:{number}", _parsed(f"{name}:{number}", line))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def _parsed(place: str, line: str) -> _Line:
    try:
        return _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f'{place}: {key + ": " if key else ""}{first["msg"]}; a line is {{"prompt": "text"}}'
        ) from error
