"""What a replay reads: recorded traces, foreign recordings, generated workloads.

A `Source` is a few plain values, so that a process or a machine of its own can open it again. Knows
files and formats; nothing of policies, costs or results.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from sdcontrol.errors import ConfigError
from sdcontrol.experiments.document import read_document
from sdcontrol.outcomes import DEPTH, ArmOutcomes
from sdcontrol.traces.importers import (
    Imported,
    ImportReport,
    read_azure,
    read_mooncake,
    read_texts,
    read_vllm,
    tokenizer_from,
)
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.simulate import SimulationSettings
from sdcontrol.traces.what_if import settings_of, workload_of
from sdcontrol.traces.workload import SimulatedRequest, Workload
from sdcontrol.traces.workloads import GeneratedWorkload

__all__ = [
    "FORMATS",
    "Format",
    "Opened",
    "Source",
    "arrivals_of",
    "begins_at",
    "format_of",
    "ngram_outcomes",
    "open_source",
]

Format = Literal["trace", "azure", "mooncake", "vllm", "text", "generated"]
FORMATS: tuple[Format, ...] = get_args(Format)
_KEYS: tuple[tuple[str, Format], ...] = (
    ("hash_ids", "mooncake"),
    ("metrics", "vllm"),
    ("output", "text"),
)
_MOST_FIRST_BYTES = 1 << 24
_MAX_MATCH = 16  # tokens of an n-gram drafter's longest match, as the engine's has by default


@dataclass(frozen=True, slots=True)
class Source:
    """Where requests come from. `tokenizer` is a `tokenizer.json`, for texts; "" for none."""

    path: Path
    format: Format
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """A source, open. Foreign recordings and generated workloads have no steps."""

    workload: Workload
    settings: SimulationSettings
    start_seconds: float = 0.0  # at which the simulated clock begins
    trace: Trace | None = None
    report: ImportReport | None = None


def format_of(path: Path) -> Format:
    """From a folder, a suffix, or the keys of the first line. Raises `ConfigError`."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a trace's folder, a recording or a YAML")
    if path.is_dir():
        return "trace"
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return "azure"
    if suffix in (".yaml", ".yml", ".json"):
        return "generated"
    first = _first_object(path) if suffix in (".jsonl", ".ndjson") else {}
    for key, kind in _KEYS:
        if key in first:
            return kind
    raise ConfigError(f"{path}: its format is not plain to see; give --format {'|'.join(FORMATS)}")


def open_source(source: Source, *, seed: int = 0) -> Opened:
    """The requests, and the engine they ran on. `seed` moves what is drawn.

    Raises `TraceError`, `CounterfactualError` or `ConfigError` for what cannot be used.
    """
    if source.format == "trace":
        trace = Trace(source.path)
        first = next(iter(trace.steps()), None)
        start = 0.0 if first is None else first.start_seconds
        return Opened(workload_of(trace), settings_of(trace), start, trace)
    if source.format == "generated":
        generated = _generated(source.path)
        drawn = generated.model_copy(update={"seed": generated.seed + seed})
        return Opened(drawn.workload(), SimulationSettings())
    found = _imported(source)
    start = begins_at(found.workload)
    return Opened(found.workload, SimulationSettings(), start, report=found.report)


def begins_at(workload: Workload) -> float:
    """When its first request comes: a file may begin at any time."""
    first = next(iter(workload), None)
    return 0.0 if first is None else first.arrival_seconds


def arrivals_of(source: Source) -> Workload:
    """Only when requests come: a trace needs no acceptance table for that, texts no tokenizer."""
    if source.format != "trace":
        return open_source(source).workload
    trace = Trace(source.path)

    def make() -> Iterator[SimulatedRequest]:
        for record in trace.requests():
            yield SimulatedRequest(record.id, record.arrival_seconds, 1, 1)

    return Workload(source.path.name, (), make, {"trace": trace.header.trace_id})


def _imported(source: Source) -> Imported:
    if source.format == "text":
        return _texts(source)
    readers = {"azure": read_azure, "mooncake": read_mooncake, "vllm": read_vllm}
    return readers[source.format](source.path)


def _texts(source: Source) -> Imported:
    if not source.tokenizer:
        raise ConfigError(
            f"{source.path} holds texts; give --tokenizer tokenizer.json, of the model that is meant"
        )
    found = read_texts(source.path, tokenizer_from(source.tokenizer), ngram_outcomes)
    kept = Workload.of(found.workload.name, found.workload, **found.workload.origin)
    return replace(found, workload=kept)  # matching a text takes longer than simulating it


def ngram_outcomes(tokens: NDArray[np.int64], prompt_tokens: int) -> ArmOutcomes:
    """What the engine's n-gram drafter, in chains, would have had accepted at every position.

    `tokens` `[n]` are a text, its first `prompt_tokens` the prompt; outcomes are those of the rest.
    """
    from sdcontrol.engine.drafters.ngram import MAX_DRAFT_TOKENS, matched_lengths
    from sdcontrol.engine.drafters.ngram_index import NgramIndex

    text: list[int] = tokens.tolist()
    accepted = matched_lengths(text, prompt_tokens, DEPTH, max_match=_MAX_MATCH)
    index, matches = NgramIndex(_MAX_MATCH, text[:prompt_tokens]), []
    for token in text[prompt_tokens:]:
        matches.append(index.match_tokens)
        index.extend((token,))
    matched = np.array(matches, dtype=np.uint8)
    limits = np.where(matched > 0, MAX_DRAFT_TOKENS, 0).astype(np.uint8)
    return ArmOutcomes(accepted.astype(np.uint8), match_tokens=matched, max_draft_tokens=limits)


def _generated(path: Path) -> GeneratedWorkload:
    document = read_document(path)
    if not isinstance(document.data, dict):
        raise ConfigError(f"{path} holds no mapping; give num_requests, arrivals and requests")
    try:
        return GeneratedWorkload.model_validate(document.data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{document.place(first['loc'])}: {where}: {first['msg']}") from error


def _first_object(path: Path) -> dict[str, object]:
    """The first line that is not blank, if it is a JSON object; else nothing."""
    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(_MOST_FIRST_BYTES), b"")
            found = json.loads(next((line for line in lines if line.strip()), b""))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
