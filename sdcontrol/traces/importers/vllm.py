"""vLLM's detailed speculation metrics of single requests, as written by its server.

JSON lines, each a response of `/v1/completions` or `/v1/chat/completions` (of a stream: its last
chunk, with usage) from a server run with `--per-request-spec-decode-metrics detailed`:

    {"id": ..., "created": 1787366173, "usage": {"prompt_tokens": 11, "completion_tokens": 35},
     "metrics": {"speculative_decoding": {"per_step_accepted": [0, 3], "per_step_drafted": [3, 3],
                                          "num_spec_steps": 2, ...}}}

The format is vLLM's pull request 48915 of 2026 and the documentation of v0.32.0, where it is called
experimental. A key `arrival_seconds` that a client has added goes before `created`, the server's
clock in whole seconds; all rows have it, or none.

    step        first     a=2 of 3            a=3 of 3
    output      t0     |  t1  t2  t3        | t4  t5  t6  t7
    hit         ?         1   1   0           1   1   1   ?      ?: nothing was drafted

So a chain's outcome is known as far as it was drafted, and no draft may be longer than that: at a
`?` it offers nothing. Steps without drafts are not in the record; a request whose steps do not add
up to its output is malformed, since nobody knows where they were. Knows nothing of texts.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from sdcontrol.outcomes import DEPTH, ArmOutcomes
from sdcontrol.traces.importers.rows import Imported, RowError, Rows, count, json_object, number
from sdcontrol.traces.workload import SimulatedRequest, Workload

__all__ = ["read_vllm"]

_UNKNOWN, _WRONG, _RIGHT = 0, 1, 2


def read_vllm(
    path: Path | str, *, arm: str = "draft_model", max_malformed: float = 0.01
) -> Imported:
    """Requests with what the server's drafter, here `arm`, had accepted; kept in memory.

    Raises `TraceError` for a file with more than `max_malformed` of its rows malformed.
    """
    path = Path(path)
    rows = Rows(path, lambda: _parser(arm), max_malformed=max_malformed)
    report = rows.check(
        "acceptance is known only as far as was drafted: longer drafts are cut to that"
    )
    found = list(rows)
    start = min(request.arrival_seconds for request in found)
    workload = Workload.of(
        path.stem,
        [_since(request, start) for request in found],
        format="vllm",
        file=path.name,
        rows=report.num_rows,
    )
    return Imported(workload, report)


def _since(request: SimulatedRequest, start_seconds: float) -> SimulatedRequest:
    return SimulatedRequest(
        request.id,
        request.arrival_seconds - start_seconds,
        request.prompt_tokens,
        request.output_tokens,
        request.acceptance,
    )


def _parser(arm: str) -> Callable[[str, int], SimulatedRequest]:
    seen: set[str] = set()
    clocks: set[str] = set()  # the first row's

    def parse(row: str, line: int) -> SimulatedRequest:
        fields = json_object(row)
        usage = _object(fields, "usage")
        metrics = _object(_object(fields, "metrics"), "speculative_decoding")
        output_tokens = count(usage, "completion_tokens", least=1)
        outcomes = _outcomes(metrics, output_tokens)
        name = fields.get("id")
        name = name if isinstance(name, str) and name else f"row-{line}"
        if name in seen:
            raise RowError(f"id {name!r} stands in a row above")
        clock = "arrival_seconds" if "arrival_seconds" in fields else "created"
        if clocks and clock not in clocks:
            raise RowError(f"its time is {clock}, by another clock than in the rows above")
        prompt_tokens = count(usage, "prompt_tokens", least=1)
        arrival = number(fields, clock)
        seen.add(name)
        clocks.add(clock)
        return SimulatedRequest(name, arrival, prompt_tokens, output_tokens, {arm: outcomes})

    return parse


def _object(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = fields.get(name)
    if not isinstance(found, dict):
        raise RowError(f"{name} is missing or no object")
    return found


def _counts(metrics: Mapping[str, object], name: str) -> list[int]:
    found = metrics.get(name)
    if not isinstance(found, list):
        raise RowError(f"{name} is missing; run the server with detailed metrics")
    if any(type(value) is not int or not 0 <= value < 1 << 16 for value in found):
        raise RowError(f"{name} has an entry that is no count")
    return found


def _outcomes(metrics: Mapping[str, object], output_tokens: int) -> ArmOutcomes:
    accepted = _counts(metrics, "per_step_accepted")
    drafted = _counts(metrics, "per_step_drafted")
    if len(accepted) != len(drafted) or len(accepted) != count(metrics, "num_spec_steps"):
        raise RowError(
            f"{len(accepted)} steps with accepted, {len(drafted)} with drafted tokens and "
            f"num_spec_steps {metrics['num_spec_steps']}; they should be alike"
        )
    if any(got > of for got, of in zip(accepted, drafted, strict=True)):
        raise RowError("a step has more tokens accepted than drafted")
    emitted = 1 + sum(got + 1 for got in accepted)
    last = accepted[-1] + 1 if accepted else 0
    if not emitted - last < output_tokens <= emitted:
        raise RowError(
            f"{len(accepted)} steps make {emitted} tokens of {output_tokens}; steps without "
            "drafts are not in the record, so where these were is not known"
        )
    return _of_hits(_hits(accepted, drafted), output_tokens)


def _hits(accepted: list[int], drafted: list[int]) -> list[int]:
    """By output position, whether the drafter was right there; see the module's picture."""
    hits = [_UNKNOWN]
    for got, of in zip(accepted, drafted, strict=True):
        hits += [_RIGHT] * got
        hits.append(_WRONG if got < of else _UNKNOWN)
    return hits


def _of_hits(hits: list[int], output_tokens: int) -> ArmOutcomes:
    """Runs of right tokens, and how far drafts are known: to the first wrong token and beyond it."""
    accepted = np.zeros(output_tokens, dtype=np.uint8)
    limits = np.zeros(output_tokens, dtype=np.uint8)
    run = known = 0
    for place in range(len(hits) - 1, -1, -1):
        if hits[place] == _UNKNOWN:
            run = known = 0
        elif hits[place] == _WRONG:
            run, known = 0, DEPTH
        else:
            run, known = min(run + 1, DEPTH), min(known + 1, DEPTH)
        if place < output_tokens:
            accepted[place], limits[place] = run, known
    return ArmOutcomes(accepted, max_draft_tokens=limits)
