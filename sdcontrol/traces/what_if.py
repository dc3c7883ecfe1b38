"""Judge a policy: on a workload, or on what was recorded.

    result = simulate(workload, "goodput", times)
    result = what_if(Trace("runs/monday"), "static:ngram:4")

Knows how traces, workloads and simulations fit together; nothing of how each is done.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sdcontrol.controller import Controller
from sdcontrol.core import Cost, Planner
from sdcontrol.errors import CounterfactualError
from sdcontrol.outcomes import DEPTH
from sdcontrol.policies import Policy, PolicyConfig
from sdcontrol.policies.oracle import Oracle
from sdcontrol.traces.acceptance_table import TABLE_NAME, AcceptanceTable
from sdcontrol.traces.fitted_times import FittedTimes
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorded_drafts import RecordedDrafts
from sdcontrol.traces.replay import with_kept_files
from sdcontrol.traces.replay_result import ReplayResult
from sdcontrol.traces.schema import RequestRecord
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.simulated_drafts import Foreknowledge
from sdcontrol.traces.slo import SLO
from sdcontrol.traces.step_times import StepTimes
from sdcontrol.traces.workload import SimulatedRequest, Workload

__all__ = ["PolicyLike", "settings_of", "simulate", "what_if", "workload_of"]

PolicyLike = Policy | PolicyConfig | Planner | str | Mapping[str, object]
"""What `policies.build` takes, "oracle", or a planner."""

_EXACT = ("coupled", "greedy")  # verification, whatever the requests


def simulate(
    workload: Workload,
    policy: PolicyLike,
    times: StepTimes,
    settings: SimulationSettings | None = None,
    *,
    slo: SLO | None = None,
    seed: int = 0,
    max_draft_tokens: int = DEPTH,
    start_seconds: float = 0.0,
) -> ReplayResult:
    """Decode `workload` to its end under `policy`, in simulated time.

    "oracle" knows what will be accepted, and what steps take where `times` have a `cost`.
    Raises `CounterfactualError` where the workload cannot answer what is planned.
    """
    known = Foreknowledge()
    planner = _planner(policy, known, times, seed=seed, max_draft_tokens=max_draft_tokens)
    simulation = Simulation(
        workload, planner, times, settings, foreknowledge=known, start_seconds=start_seconds
    )
    while simulation.has_work:
        simulation.step()
    return simulation.measurements.result(
        policy=_name(policy),
        workload=workload.name,
        slo=slo,
        preemptions=simulation.num_preemptions,
    )


def what_if(
    trace: Trace,
    policy: PolicyLike,
    *,
    times: StepTimes | None = None,
    settings: SimulationSettings | None = None,
    slo: SLO | None = None,
) -> ReplayResult:
    """What `policy` would have made of a recording that has an acceptance table.

    `trace.header.policy` is the recorded one: a mapping may name files that were kept with the trace.
    Without `times` they are fitted to the recording. Raises `CounterfactualError` where the
    recording cannot answer, `TraceError` where it is damaged.
    """
    if isinstance(policy, Mapping):
        policy = with_kept_files(trace, policy)
    first = next(iter(trace.steps()), None)
    facts = trace.header.controller
    return simulate(
        workload_of(trace),
        policy,
        times or FittedTimes.of(trace),
        settings or settings_of(trace),
        slo=slo,
        seed=facts.seed if facts is not None else 0,
        max_draft_tokens=facts.max_draft_tokens if facts is not None else DEPTH,
        start_seconds=first.start_seconds if first is not None else 0.0,
    )


def workload_of(trace: Trace) -> Workload:
    """The recorded requests, with the trace's acceptance table. Raises `CounterfactualError`."""
    path = trace.path / TABLE_NAME
    if TABLE_NAME not in trace.header.files:
        lacks = (
            f"does not count {TABLE_NAME} as its own" if path.exists() else f"has no {TABLE_NAME}"
        )
        raise CounterfactualError(
            f"{trace.path} {lacks}, so it cannot answer plans that were never made; "
            "record it with an acceptance table: sdcontrol record --acceptance-table, a decoder's "
            "acceptance_table=True, or add_acceptance_table after a run of your own engine"
        )
    records = trace.requests()
    _check_text(trace, records)
    _check_ids(trace, records)
    table, drafts = AcceptanceTable(path), RecordedDrafts(trace)
    if lost := [r.id for r in records if r.output_tokens and not table.knows(r.id)]:
        raise CounterfactualError(
            f"{path} lacks {len(lost)} of {len(records)} recorded requests, {lost[0]!r} first, so it "
            "cannot be told what they would have accepted; record again, with a table of all requests"
        )

    def make() -> Iterator[SimulatedRequest]:
        for record in records:
            if record.output_tokens:
                yield _simulated(record, table, drafts)

    return Workload(trace.path.name, table.header.arms, make, {"trace": trace.header.trace_id})


def _check_text(trace: Trace, records: Sequence[RequestRecord]) -> None:
    """Another policy must have led to the same text: greedy requests keep theirs under rejection, too."""
    verification = trace.header.verification
    is_sampled = any(record.temperature > 0.0 for record in records)
    if verification in _EXACT or (verification == "rejection" and not is_sampled):
        return
    raise CounterfactualError(
        f"{trace.path} has requests that were decoded under {verification!r} verification, where text "
        "or acceptance depends on what was drafted; record it under coupled verification"
    )


def _check_ids(trace: Trace, records: Sequence[RequestRecord]) -> None:
    """Drafts and outcomes are kept by id: two requests of one id would be taken for each other."""
    counts = Counter(record.id for record in records)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise CounterfactualError(
            f"{trace.path}: {len(twice)} request ids are used more than once, {twice[0]!r} "
            f"{counts[twice[0]]} times, so it cannot be told whose drafts are whose; record with an "
            "id of its own for every request (exact replay does without)"
        )


def settings_of(trace: Trace) -> SimulationSettings:
    """The recorded engine's settings, as far as the trace has them."""
    names = SimulationSettings.model_fields.keys() - {"drafters"}
    engine = trace.header.engine
    known = {name: engine[name] for name in names if engine.get(name) is not None}
    return SimulationSettings.model_validate({**known, "drafters": trace.header.drafters or None})


def _simulated(
    record: RequestRecord, table: AcceptanceTable, drafts: RecordedDrafts
) -> SimulatedRequest:
    ids = None
    if record.prompt_ids is not None:
        ids = np.array([*record.prompt_ids, *(record.output_ids or ())], dtype=np.int64)
    return SimulatedRequest(
        id=record.id,
        arrival_seconds=record.arrival_seconds,
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        acceptance=table.of(record.id),
        temperature=record.temperature,
        max_output_tokens=record.max_new_tokens,
        contents=ids,
        drafted=drafts.of(record.id),
    )


def _planner(
    policy: PolicyLike,
    known: Foreknowledge,
    times: StepTimes,
    *,
    seed: int,
    max_draft_tokens: int,
) -> Planner:
    prices: Cost | None = None
    if isinstance(policy, str) and policy == "oracle":
        policy = Oracle(known)
        prices = copy.deepcopy(getattr(times, "cost", None))  # one that learns stays as it is
    if isinstance(policy, Policy | PolicyConfig | str | Mapping):
        return Controller(policy, prices, seed=seed, max_draft_tokens=max_draft_tokens, clock=None)
    return policy


def _name(policy: PolicyLike) -> str:
    if isinstance(policy, str):
        return policy
    if isinstance(policy, Mapping):
        return str(policy.get("kind", dict(policy)))
    return str(getattr(policy, "kind", type(policy).__name__))
