"""What the tests of traces share: random steps, a hand-written loop to record, and folders."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from sdcontrol.core import (
    BatchView,
    Choice,
    Confidence,
    Hint,
    Observation,
    Plan,
    RequestView,
    Timing,
    family_of,
)
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.schema import RecordedStep, Refinement, RequestRecord, TraceFacts
from sdcontrol.traces.writer import TraceWriter

ARMS = ("ngram", "sparse_kv:512", "draft_model")
_RATES = {"ngram": 0.4, "sparse_kv:512": 0.9, "draft_model": 0.7}
_ROUND_SECONDS = {"ngram": 0.0, "sparse_kv": 0.004, "draft_model": 0.001}

# ---- any step that can be said at all

_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_COUNTS = st.integers(0, 2**62 - 1)
_FEW = st.integers(0, 20)
_FLOATS = st.floats(allow_nan=False)
_HINTS = st.builds(
    Hint,
    max_draft_tokens=st.none() | _COUNTS,
    match_tokens=st.none() | _COUNTS,
    confidence=st.none() | _FLOATS,
    catch_up_tokens=_COUNTS,
)
_REQUESTS = st.builds(
    RequestView,
    id=_NAMES,
    context_tokens=_COUNTS,
    generated_tokens=_COUNTS,
    remaining_tokens=_COUNTS,
    temperature=_FLOATS,
    drafters=st.lists(_NAMES, max_size=3).map(tuple),
    hints=st.dictionaries(_NAMES, _HINTS, max_size=3),
)
_CHOICES = st.just(Choice.off()) | st.builds(
    Choice, drafter=_NAMES, num_draft_tokens=st.integers(1, 9)
)
_CONFIDENCES = st.lists(st.lists(_FLOATS, max_size=4).map(tuple), max_size=4).map(tuple)


def _row(draw: st.DrawFn, count: int, values: st.SearchStrategy) -> tuple:
    return tuple(draw(st.lists(values, min_size=count, max_size=count)))


@st.composite
def recorded_steps(draw: st.DrawFn) -> RecordedStep:
    """Any step; its numbers need not make sense together."""
    requests = tuple(draw(st.lists(_REQUESTS, max_size=4)))
    rows = len(requests)
    plan = Plan(_row(draw, rows, _CHOICES), draw(_NAMES))
    confidence = draw(
        st.none() | st.just(_row(draw, rows, st.lists(_FLOATS, max_size=4).map(tuple)))
    )
    observation = Observation(
        view=BatchView(draw(_COUNTS), requests, draw(_COUNTS), draw(_COUNTS), draw(st.booleans())),
        plan=plan,
        drafted=_row(draw, rows, _FEW),
        proposed=_row(draw, rows, _FEW),
        accepted=_row(draw, rows, _FEW),
        emitted=_row(draw, rows, _FEW),
        timing=Timing(draw(st.dictionaries(_NAMES, _FLOATS, max_size=2)), *_row(draw, 3, _FLOATS)),
        accepted_nodes=draw(
            st.none() | st.just(_row(draw, rows, st.lists(_FEW, max_size=3).map(tuple)))
        ),
        confidence=confidence,
        shadow=draw(
            st.dictionaries(_NAMES, st.just(_row(draw, rows, st.none() | _FEW)), max_size=2)
        ),
        faults=tuple(draw(st.lists(_NAMES, max_size=2))),
        launched_ahead=draw(st.booleans()),
    )
    beginnings = tuple(row[: draw(_FEW)] for row in confidence or ())
    seen = st.just(beginnings) | _CONFIDENCES
    calls = [
        Refinement(draw(seen), _row(draw, rows, _FEW), _row(draw, rows, _FEW))
        for _ in range(draw(st.integers(0, 3)))
    ]
    other = st.just(Plan(_row(draw, rows, _CHOICES), draw(_NAMES)))
    planned = draw(st.none() | st.just(plan) | other)
    faults, seen_steps = observation.faults[:1], draw(st.none() | _FEW)
    return RecordedStep(observation, draw(_FLOATS), planned, faults, tuple(calls), seen_steps)


# ---- steps that make sense


def view_of(step: int, batch: int = 4, free: int = 1000) -> BatchView:
    """Requests that come and go, and whose n-gram matches do."""
    hints = {"ngram": Hint(max_draft_tokens=8, match_tokens=step % 9, confidence=step % 10 / 10)}
    requests = tuple(
        RequestView(f"r{row + step // 20}", 2000 + step, step, 1000, 0.0, ARMS, hints)
        for row in range(batch)
    )
    return BatchView(step, requests, free)


def plain_step(number: int, batch: int = 3) -> RecordedStep:
    """A step without drafts, told from others by its number."""
    view = view_of(number, batch)
    zeros, ones = (0,) * batch, (1,) * batch
    plan = Plan.off(view)
    timing = Timing({}, 0.01 + number * 1e-5, 1e-4, 1e-3)
    observation = Observation(view, plan, zeros, zeros, zeros, ones, timing)
    return RecordedStep(observation, number * 0.1, plan)


def write_trace(path: Path, steps: Sequence[RecordedStep], *, steps_per_part: int = 4) -> None:
    """A finished trace, with a request for every fourth step."""
    with TraceWriter(path, TraceFacts(note="test"), steps_per_part=steps_per_part) as writer:
        for number, step in enumerate(steps):
            writer.append(step)
            if number % 4 == 0:
                writer.add_request(RequestRecord(f"r{number}", number * 0.1, 10, 20))


# ---- a decode loop

_Drafts = tuple[Confidence, tuple[int, ...]]


def decode(recorder: Recorder, steps: int, *, batch: int = 4, seed: int = 0) -> list[Observation]:
    """A loop by hand: drafts in rounds, refined after each, verified by dice."""
    rng, observations = np.random.default_rng(seed), []
    for number in range(steps):
        view = view_of(number, batch if rng.random() < 0.9 else int(rng.integers(1, batch + 1)))
        plan = recorder.plan(view)
        rolls = rng.random((len(view.requests), 16))
        drafts = _drafted(recorder, view, plan, rolls)
        observations.append(_verified(view, plan, drafts, rolls, recorder.take_faults()))
        recorder.observe(observations[-1])
    return observations


def _drafted(recorder: Recorder, view: BatchView, plan: Plan, rolls: np.ndarray) -> _Drafts:
    """Confidences of all drafted tokens, and how many of them are kept."""
    kept = [choice.num_draft_tokens for choice in plan.choices]
    rows: list[tuple[float, ...]] = [()] * len(kept)
    for depth in range(max(kept, default=0)):
        rows = [
            (*row, float(np.round(1.0 - roll[depth] ** 2, 3))) if depth < limit else row
            for row, roll, limit in zip(rows, rolls, kept, strict=True)
        ]
        refined = recorder.refine(view, plan, tuple(rows))
        kept = [min(n, c.num_draft_tokens) for n, c in zip(kept, refined.choices, strict=True)]
    return tuple(rows), tuple(kept)


def _verified(
    view: BatchView, plan: Plan, drafts: _Drafts, rolls: np.ndarray, faults: tuple[str, ...]
) -> Observation:
    confidence, kept = drafts
    accepted, seconds = [], dict[str, float]()
    for choice, limit, row in zip(plan.choices, kept, rolls, strict=True):
        rate = _RATES.get(choice.drafter or "", 0.0)
        accepted.append(next((n for n in range(limit) if row[n] > rate), limit))
        if choice.drafter is not None:
            family = family_of(choice.drafter)
            seconds[family] = seconds.get(family, 0.0) + _ROUND_SECONDS[family] * limit
    return Observation(
        view=view,
        plan=plan,
        drafted=tuple(len(row) for row in confidence),
        proposed=kept,
        accepted=tuple(accepted),
        emitted=tuple(n + 1 for n in accepted),
        timing=Timing(seconds, 0.01 + 2e-4 * (len(kept) + sum(kept)), 1e-4, 1e-3),
        confidence=confidence,
        shadow={"ngram": tuple(None if c.drafter == "ngram" else 1 for c in plan.choices)},
        faults=faults,
    )
