"""A recording's requests, decoded again with drafters and lengths drawn at random."""

from collections import Counter

import pytest

from sdcontrol.core import Observation
from sdcontrol.experiments.training import learn
from sdcontrol.traces.acceptance_table import TABLE_NAME, AcceptanceTable
from sdcontrol.traces.bundled import bundled_trace
from sdcontrol.traces.drawn import drawn_runs
from sdcontrol.traces.reader import Trace
from tests.learned_support import ARM, seen_run


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace(bundled_trace("mixed"))


@pytest.fixture(scope="module")
def runs(trace: Trace) -> list[list[Observation]]:
    return drawn_runs(trace)


def test_every_drafter_is_drawn_at_every_length(
    trace: Trace, runs: list[list[Observation]]
) -> None:
    drawn = Counter(
        (choice.drafter, choice.num_draft_tokens)
        for run in runs
        for observation in run
        for choice in observation.plan.choices
        if choice.drafter is not None
    )
    assert set(drawn) == {(arm, n) for arm in trace.header.drafters for n in range(1, 9)}
    assert 1000 <= sum(map(len, runs)) < 1200
    assert not any(observation.faults for run in runs for observation in run)


def test_every_request_is_decoded_and_accepts_what_was_recorded(
    trace: Trace, runs: list[list[Observation]]
) -> None:
    table = dict(AcceptanceTable(trace.path / TABLE_NAME))
    compared = 0
    for observation in runs[0]:
        for r, view in enumerate(observation.view.requests):
            arm, drafted = observation.plan.choices[r].drafter, observation.proposed[r]
            if arm is not None and drafted and observation.accepted_nodes is None:
                told = int(table[view.id][arm].accepted[view.generated_tokens])
                assert observation.accepted[r] == min(told, drafted)
                compared += 1
    assert compared > 200
    decoded = {view.id for run in runs for o in run for view in o.view.requests}
    assert decoded == {request.id for request in trace.requests()}


def test_runs_differ_and_are_the_same_every_time(
    trace: Trace, runs: list[list[Observation]]
) -> None:
    plans = [[observation.plan for observation in run] for run in runs]
    assert plans == [[o.plan for o in run] for run in drawn_runs(trace)]
    assert all(plans[0] != other for other in plans[1:])


def test_a_trace_without_a_table_has_none() -> None:
    assert drawn_runs(Trace(bundled_trace("static"))) == []


def test_training_learns_of_an_arm_that_the_recording_hardly_used() -> None:
    """And says so; prices are learnt from the recording alone, and only that is judged."""
    recorded, drawn = seen_run(1, 25), seen_run(1, 200)
    alone, before = learn([recorded])
    both, report = learn([recorded], drawn=[[drawn]])
    assert ARM not in alone.acceptance
    assert ARM in both.acceptance
    assert report.prices == before.prices
    assert report.num_drawn_steps == 200
    assert (before.num_drawn_steps, report.num_steps) == (0, 25)
    assert report.scores.outcomes == before.scores.outcomes  # those recorded


def test_the_bundled_trace_teaches_more_than_was_observed(
    trace: Trace, runs: list[list[Observation]]
) -> None:
    _, report = learn([list(trace.observations())], drawn=[runs])
    assert report.is_better
    assert report.weights
