"""What a scrape shows after steps were observed."""

import copy
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from sdcontrol.controller import Controller
from sdcontrol.core import (
    BatchView,
    Belief,
    Choice,
    Observation,
    Plan,
    RequestView,
    Timing,
)
from sdcontrol.errors import ConfigError
from sdcontrol.estimators import hardware, shapes
from sdcontrol.estimators.cost import Prediction
from sdcontrol.estimators.known_machine import KnownMachine
from sdcontrol.estimators.roofline import Forward
from sdcontrol.integrations.prometheus import PrometheusExporter
from sdcontrol.policies.base import Policy
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.replay import replay_exactly
from tests.trace_support import decode

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("ngram", "sparse_kv:512")


def view_of(num_requests: int, step: int = 0) -> BatchView:
    requests = tuple(
        RequestView(f"r{row}", 1000, 10, 100, drafters=ARMS) for row in range(num_requests)
    )
    return BatchView(step, requests, 10_000)


def observed(
    *rows: tuple[str | None, int, int, int],
    timing: Timing | None = None,
    faults: tuple[str, ...] = (),
    step: int = 0,
) -> Observation:
    """Rows are (drafter, drafted, proposed, accepted)."""
    choices = tuple(Choice(arm, drafted) if drafted else Choice.off() for arm, drafted, *_ in rows)
    return Observation(
        view=view_of(len(rows), step),
        plan=Plan(choices),
        drafted=tuple(row[1] for row in rows),
        proposed=tuple(row[2] for row in rows),
        accepted=tuple(row[3] for row in rows),
        emitted=tuple(row[3] + 1 for row in rows),
        timing=timing or Timing({"sparse_kv": 0.002}, 0.01, 0.0001, 0.0005),
        faults=faults,
    )


class Scrape:
    """A private registry and what it says."""

    def __init__(self, target: Forward | None = None) -> None:
        self.registry = CollectorRegistry()
        self.exporter = PrometheusExporter(self.registry, target=target)

    def __call__(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"sdcontrol_{name}", labels)
        assert value is not None, f"no sample {name} {labels}"
        return value

    def has(self, name: str, **labels: str) -> bool:
        return self.registry.get_sample_value(f"sdcontrol_{name}", labels) is not None


def test_drafts_and_tokens_are_counted_by_drafter_and_position() -> None:
    scrape = Scrape()
    scrape.exporter.observe(
        observed(
            ("ngram", 4, 4, 2), ("ngram", 3, 2, 2), ("sparse_kv:512", 2, 2, 0), (None, 0, 0, 0)
        )
    )
    assert scrape("spec_decode_num_drafts_total", drafter="ngram") == 2
    assert scrape("spec_decode_num_draft_tokens_total", drafter="ngram") == 6
    assert scrape("spec_decode_num_accepted_tokens_total", drafter="ngram") == 4
    assert scrape("spec_decode_num_accepted_tokens_total", drafter="sparse_kv:512") == 0
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert scrape(per_position, drafter="ngram", position="0") == 2
    assert scrape(per_position, drafter="ngram", position="1") == 2
    assert not scrape.has(per_position, drafter="ngram", position="2")
    assert scrape("generation_tokens_total") == 8
    assert scrape("num_requests_running") == 4


def test_the_shadow_of_a_free_drafter_is_exported() -> None:
    """Two of three requests were scored: 2 of 5 and 0 of 1 emitted tokens would have been accepted."""
    scrape = Scrape()
    seen = observed((None, 0, 0, 0), (None, 0, 0, 0), ("ngram", 4, 4, 3))
    seen = replace(seen, emitted=(5, 1, 4), shadow={"ngram": (2, 0, None)})
    scrape.exporter.observe(seen)
    assert scrape("shadow_tokens_total", drafter="ngram") == 6
    assert scrape("shadow_accepted_tokens_total", drafter="ngram") == 2


def test_waste_is_what_was_rejected_and_what_was_trimmed() -> None:
    scrape = Scrape()
    scrape.exporter.observe(observed(("ngram", 5, 3, 1), ("ngram", 4, 4, 4)))
    assert scrape("wasted_draft_tokens_total", drafter="ngram", reason="rejected") == 2
    assert scrape("wasted_draft_tokens_total", drafter="ngram", reason="trimmed") == 2


def test_chosen_lengths_are_counted_and_off_has_length_0() -> None:
    scrape = Scrape()
    for _ in range(3):
        scrape.exporter.observe(observed(("ngram", 4, 4, 2), (None, 0, 0, 0), (None, 0, 0, 0)))
    assert scrape("choices_total", drafter="ngram", num_draft_tokens="4") == 3
    assert scrape("choices_total", drafter="off", num_draft_tokens="0") == 6


rows = st.sampled_from([*ARMS, None]).flatmap(
    lambda arm: st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8)).map(
        lambda counts: (
            (None, 0, 0, 0) if arm is None else (arm, counts[0], min(counts[:2]), min(counts))
        )
    )
)


@given(st.lists(st.lists(rows, min_size=1, max_size=6), min_size=1, max_size=6))
def test_every_computed_draft_token_is_accepted_or_wasted(
    steps: list[list[tuple[str | None, int, int, int]]],
) -> None:
    scrape = Scrape()
    for step in steps:
        scrape.exporter.observe(observed(*step))
    for arm in {row[0] for step in steps for row in step} - {None}:
        told = scrape("spec_decode_num_accepted_tokens_total", drafter=str(arm))
        told += sum(
            scrape("wasted_draft_tokens_total", drafter=str(arm), reason=reason)
            for reason in ("rejected", "trimmed")
        )
        assert told == sum(row[1] for step in steps for row in step if row[0] == arm)


def test_step_time_is_told_by_phase_and_beside_its_prediction() -> None:
    scrape = Scrape()
    scrape.exporter.observe(observed((None, 0, 0, 0)), Prediction(0.02, 0.0126))
    scrape.exporter.observe(observed((None, 0, 0, 0)))
    assert scrape("step_time_seconds_count") == 2
    assert scrape("step_time_seconds_sum") == pytest.approx(2 * 0.0126)
    assert scrape("predicted_step_time_seconds_count") == 1
    assert scrape("predicted_step_time_seconds_sum") == pytest.approx(0.02)
    assert scrape("controller_time_seconds_sum") == pytest.approx(0.0002)
    phase = "phase_time_seconds_total"
    assert scrape(phase, phase="draft", drafter="sparse_kv") == pytest.approx(0.004)
    assert scrape(phase, phase="verify", drafter="") == pytest.approx(0.02)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_times_that_no_clock_can_have_said_are_left_out(seconds: float) -> None:
    scrape = Scrape()
    timing = Timing({}, seconds, 0.001, 0.001)
    scrape.exporter.observe(observed((None, 0, 0, 0), timing=timing), Prediction(seconds, seconds))
    assert scrape("step_time_seconds_count") == 0
    assert scrape("predicted_step_time_seconds_count") == 0
    assert b"NaN" not in generate_latest(scrape.registry)


def test_a_step_without_requests_counts_for_nothing() -> None:
    scrape = Scrape()
    scrape.exporter.observe(observed())
    assert scrape("steps_total") == 0
    assert scrape("step_time_seconds_count") == 0


def test_intensity_stands_beside_the_ridge_where_model_and_machine_are_known() -> None:
    target = Forward(shapes.by_name("llama-3.1-8b"), hardware.by_name("H100"))
    scrape = Scrape(target)
    scrape.exporter.observe(observed(("ngram", 4, 4, 2), (None, 0, 0, 0)))
    expected = target.profile(6, 2000, 2).intensity_flops_per_byte
    assert scrape("arithmetic_intensity_flops_per_byte") == pytest.approx(expected)
    assert scrape("ridge_flops_per_byte") == pytest.approx(989e12 / 3.35e12)
    assert not Scrape().has("ridge_flops_per_byte")


def test_intensity_is_told_of_a_wrapped_controller_that_knows_its_machine() -> None:
    scrape = Scrape()
    machine = KnownMachine(hardware.by_name("H100"), shapes.by_name("llama-3.1-8b"))
    controller = Controller("goodput", clock=None)
    controller.price_by(machine)
    planner = scrape.exporter.wrap(controller)
    planner.observe(observed(("ngram", 4, 4, 2), (None, 0, 0, 0)))
    expected = Forward(machine.target, machine.hardware).profile(6, 2000, 2)
    intensity = scrape("arithmetic_intensity_flops_per_byte")
    assert intensity == pytest.approx(expected.intensity_flops_per_byte)
    assert scrape("ridge_flops_per_byte") == pytest.approx(989e12 / 3.35e12)


def test_a_wrapped_controller_decides_as_before_and_its_predictions_are_told() -> None:
    scrape = Scrape()
    controller, alone = Controller("goodput", clock=None), Controller("goodput", clock=None)
    planner = scrape.exporter.wrap(controller)
    for step in range(30):
        view = view_of(3, step)
        plan = planner.plan(view)
        assert plan == alone.plan(view)
        rows = [
            (c.drafter, c.num_draft_tokens, c.num_draft_tokens, c.num_draft_tokens // 2)
            for c in plan.choices
        ]
        observation = observed(*rows, step=step)
        planner.observe(observation)
        alone.observe(observation)
    assert scrape("steps_total") == 30
    assert 25 <= scrape("predicted_step_time_seconds_count") <= 30
    assert scrape("step_time_drift") == pytest.approx(alone.cost.drift)  # type: ignore[attr-defined]


class Raising(Policy):
    def plan(self, view: BatchView, belief: Belief) -> Plan:
        raise RuntimeError("out of order")


def test_faults_and_the_quarantine_of_a_policy_are_counted() -> None:
    scrape = Scrape()
    planner = scrape.exporter.wrap(Controller(Raising()))
    for step in range(5):
        planner.plan(view_of(1, step))
        faults = planner.take_faults()  # type: ignore[attr-defined]
        planner.observe(observed((None, 0, 0, 0), faults=faults, step=step))
    assert scrape("faults_total", kind="plan_raised") == 3
    assert scrape("quarantines_total", subject="policy") == 1
    assert scrape("policy_quarantined") == 1


def test_planners_that_share_an_exporter_are_quarantined_one_by_one() -> None:
    """In turns: one without its policy beside one that keeps it."""
    scrape = Scrape()
    planners = [scrape.exporter.wrap(c) for c in (Controller(Raising()), Controller("off"))]
    for step in range(20):
        for planner in planners:
            planner.plan(view_of(1, step))
            faults = planner.take_faults()  # type: ignore[attr-defined]
            planner.observe(observed((None, 0, 0, 0), faults=faults, step=step))
    assert scrape("quarantines_total", subject="policy") == 1
    assert scrape("policy_quarantined") == 1
    assert scrape("steps_total") == 40


def test_the_quarantine_of_a_drafter_is_counted_under_its_name() -> None:
    scrape = Scrape()
    faults = ("drafter ngram quarantined: it raised", "planner failed to plan: ValueError('x')")
    scrape.exporter.observe(observed((None, 0, 0, 0), faults=faults))
    assert scrape("quarantines_total", subject="ngram") == 1
    assert scrape("faults_total", kind="planner_failed_to_plan") == 1


def test_the_name_of_a_drafter_may_have_spaces() -> None:
    scrape = Scrape()
    faults = ("drafter my small model quarantined: ValueError: it raised",)
    scrape.exporter.observe(observed((None, 0, 0, 0), faults=faults))
    assert scrape("quarantines_total", subject="my small model") == 1
    assert scrape("faults_total", kind="drafter_quarantined") == 1


def test_names_that_a_registry_has_are_refused() -> None:
    scrape = Scrape()
    with pytest.raises(ConfigError, match=r"'sdcontrol' cannot be registered: .*another namespace"):
        PrometheusExporter(scrape.registry)
    PrometheusExporter(scrape.registry, namespace="second")


def test_a_target_that_cannot_be_priced_takes_no_names() -> None:
    registry = CollectorRegistry()
    alone = replace(hardware.by_name("H100"), link_bytes_per_second=0.0)
    with pytest.raises(ConfigError, match="link"):
        PrometheusExporter(registry, target=Forward(shapes.by_name("llama-3.1-8b"), alone, 2))
    assert PrometheusExporter(registry)


def test_a_counted_planner_can_be_copied() -> None:
    planner = Scrape().exporter.wrap(Controller("off"))
    assert copy.copy(planner).wrapped is planner.wrapped  # type: ignore[attr-defined]


def test_the_exporter_needs_no_torch() -> None:
    program = (
        "import sys, sdcontrol.integrations.prometheus\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_counted_controller_is_recorded_as_what_it_is(tmp_path: Path) -> None:
    """Metrics and a recording together: its policy and its start are in the trace, which replays."""
    planner = Scrape().exporter.wrap(Scrape().exporter.wrap(Controller("goodput", seed=7)))
    with Recorder(planner, tmp_path / "t") as recorder:
        recorder.pad_to((8, 16))
        decode(recorder, 40)
    trace = Trace(tmp_path / "t")
    assert trace.header.policy is not None
    assert trace.header.controller is not None
    assert trace.header.policy["kind"] == "goodput"
    assert (trace.header.controller.seed, trace.token_edges) == (7, (8, 16))
    assert replay_exactly(trace).is_exact
