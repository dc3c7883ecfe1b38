"""What-if replay: every request gets its tokens, whatever is planned; time is the sum of the steps."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Confidence, Observation, Plan
from sdcontrol.errors import ConfigError, CounterfactualError, TraceError
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.slo import SLO
from sdcontrol.traces.step_times import CostTimes, LinearCost, LinearDrafter, NoisyTimes
from sdcontrol.traces.what_if import simulate
from sdcontrol.traces.workload import SimulatedRequest, Workload
from tests.simulate_support import (
    COST,
    SMALL,
    TIMES,
    DicePlanner,
    drawn_workload,
    finished,
    outcomes,
)


@given(st.integers(0, 10_000), st.integers(1, 12), st.booleans())
@settings(max_examples=40)
def test_every_request_gets_its_tokens_whatever_is_planned(
    seed: int, num_requests: int, sure: bool
) -> None:
    """A pool that is too small, chunked prompts and dice for a policy change no token."""
    workload = drawn_workload(seed, num_requests, sure=sure)
    planner = DicePlanner(seed)
    simulation = finished(workload, planner)
    result = simulation.measurements.result(policy="dice", workload=workload.name)
    assert result.num_requests == num_requests
    assert result.output_tokens == sum(request.output_tokens for request in workload)
    assert sorted(result.times.ids) == sorted(request.id for request in workload)
    for observation in planner.observations:
        assert_possible(observation)


def assert_possible(observation: Observation) -> None:
    """What the engine's own observations always are."""
    rows = zip(
        observation.view.requests,
        observation.plan.choices,
        observation.drafted,
        observation.proposed,
        observation.accepted,
        observation.emitted,
        strict=True,
    )
    for request, choice, drafted, proposed, accepted, emitted in rows:
        assert accepted <= proposed <= drafted <= choice.num_draft_tokens
        assert 1 <= emitted <= min(accepted + 1, request.remaining_tokens)
        assert request.context_tokens > 64 or "sparse_kv:64" not in request.drafters
    for counts in observation.shadow.values():
        assert len(counts) == len(observation.view.requests)


@pytest.mark.parametrize("policy", ["off", "static:ngram:4", "static:draft_model:3", "goodput"])
def test_two_simulations_of_the_same_are_the_same(policy: str) -> None:
    """Noise included: it is drawn by its seed."""
    workload = drawn_workload(3, 20, sure=True)
    twice = [
        simulate(workload, policy, NoisyTimes(TIMES, relative_noise=0.1, seed=5)).to_json()
        for _ in range(2)
    ]
    assert twice[0] == twice[1]
    assert json.loads(json.dumps(twice[0], allow_nan=False))["output_tokens"] > 0


def test_a_lone_request_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    """Two chunks of prefill, the second of which gives the first token."""
    request = SimulatedRequest("a", 1.5, 40, 11)
    result = simulate(Workload.of("one", [request]), "off", TIMES, SMALL)
    steps = [(24, 0, 0), (16, 0, 0), *((1, 40 + n, 1) for n in range(1, 11))]
    seconds = [float(COST.verify_seconds(*step)) + 1e-4 for step in steps]
    assert result.num_steps == 12
    assert result.times["ttft_seconds"][0] == pytest.approx(sum(seconds[:2]))
    assert result.times["tpot_seconds"][0] == pytest.approx(sum(seconds[2:]) / 10)
    assert result.seconds == pytest.approx(1.5 + sum(seconds))
    assert result.busy_seconds == pytest.approx(sum(seconds))


def test_a_static_policy_goes_from_rejection_to_rejection() -> None:
    """Positions visited follow from the table alone."""
    hits = [True] * 6 + [False] + [True] * 3 + [False] * 4 + [True] * 6
    request = SimulatedRequest("a", 0.0, 4, len(hits), {"draft_model": outcomes(hits, "d")})
    planner = Controller("static:draft_model:4", clock=None)
    simulation = Simulation(Workload.of("one", [request]), planner, TIMES, SMALL)
    visited = []
    while simulation.has_work:
        observation = simulation.step()
        if observation.view.requests:
            visited.append((observation.view.requests[0].generated_tokens, observation.accepted[0]))
    assert visited == [(1, 4), (6, 0), (7, 3), (11, 0), (12, 0), (13, 0), (14, 4), (19, 0)]


def test_what_a_draft_model_lags_by_is_what_it_was_not_fed() -> None:
    """At first the whole context; then the tokens since it was used, less what it had right."""
    request = SimulatedRequest("a", 0.0, 9, 30, {"draft_model": outcomes([True] * 30, "d")})

    class Sometimes(DicePlanner):
        def plan(self, view: BatchView) -> Plan:
            return Plan.uniform(view, "draft_model", 3 if view.step in (3, 4, 8) else 0)

    planner = Sometimes(0)
    finished(Workload.of("one", [request]), planner)
    hints = [o.view.requests[0].hints for o in planner.observations if o.view.requests]
    lags = [hint["draft_model"].catch_up_tokens for hint in hints if hint]
    # prompt 9, one token by prefill; used at lag 11; 3 of 4 fed, one of them the last committed
    assert lags[:8] == [9, 10, 11, 1, 1, 2, 3, 4]


def test_plans_that_nobody_recorded_are_refused_by_name() -> None:
    """Too deep, of an arm that the workload lacks, or that this request lacks."""
    known = {"draft_model": outcomes([True] * 40, "d")}
    workload = Workload.of("one", [SimulatedRequest("a", 0.0, 4, 40, known)])
    with pytest.raises(CounterfactualError, match=r"'a', output position 1: 17 .* goes to 16"):
        simulate(workload, "static:draft_model:17", TIMES)
    with pytest.raises(CounterfactualError, match=r"no acceptance for \['ngram'\]"):
        simulate(workload, "static:ngram:4", TIMES)
    with pytest.raises(CounterfactualError, match="record the acceptance table with those"):
        simulate(workload, "off", TIMES, SimulationSettings(drafters=("ngram",)))


def test_a_tree_is_answered_for_as_far_as_its_nodes_are_recorded() -> None:
    """Nodes 0, 2 and 3 are on the path: of the first two nodes one is accepted."""
    tree = ArmOutcomes(
        np.full(9, 3, dtype=np.uint8),
        path=np.full(9, 0b1101, dtype=np.uint32),
        chain_nodes=np.full(9, 1, dtype=np.uint8),
        depth=6,
    )
    workload = Workload.of("one", [SimulatedRequest("a", 0.0, 4, 9, {"ngram": tree})])
    for length, nodes in ((2, (0,)), (3, (0, 2)), (6, (0, 2, 3))):
        simulation = Simulation(
            workload, Controller(f"static:ngram:{length}", clock=None), TIMES, SMALL
        )
        simulation.step()
        observation = simulation.step()
        assert observation.accepted_nodes == (nodes,)
        assert observation.accepted == (len(nodes),)
    with pytest.raises(CounterfactualError, match="7 draft tokens"):
        simulate(workload, "static:ngram:7", TIMES)


def test_an_oracle_wastes_no_draft_token() -> None:
    """It sees the table."""
    workload = drawn_workload(11, 12)
    result = simulate(workload, "oracle", TIMES)
    assert result.arms
    assert result.wasted_draft_tokens == 0
    tree = ArmOutcomes(
        np.full(30, 3, dtype=np.uint8),
        path=np.full(30, 0b1011, dtype=np.uint32),
        chain_nodes=np.full(30, 2, dtype=np.uint8),
    )
    trees = Workload.of("trees", [SimulatedRequest("a", 0.0, 4, 30, {"ngram": tree})])
    assert simulate(trees, "oracle", TIMES).arms["ngram"].lengths.keys() <= {1, 2}


def test_an_oracle_knows_what_steps_take_from_its_first_step_on() -> None:
    """It never tries anything: what it learnt to be dear at first it would leave for good."""
    arms = {"ngram": 0.7, "draft_model": 0.4, "sparse_kv:64": 0.96}
    generator = np.random.default_rng(3)
    requests = []
    for number in range(24):
        hits = {arm: (generator.random(150) < rate).tolist() for arm, rate in arms.items()}
        known = {arm: outcomes(found, arm) for arm, found in hits.items()}
        requests.append(SimulatedRequest(f"r{number}", 0.0, 80, 150, known))
    rounds = {
        "draft_model": LinearDrafter(1.5e-3, 1e-5),
        "sparse_kv": LinearDrafter(5e-4, 1e-5),
    }
    times = CostTimes(LinearCost(7e-3, 2e-5, 4e-8, drafters=rounds))
    workload, few = Workload.of("w", requests), SimulationSettings(max_batch_size=12)
    oracle, *others = (
        simulate(workload, policy, noisy, few).tokens_per_busy_second
        for policy in ("oracle", "goodput", "static:sparse_kv:64:8", "static:sparse_kv:64:14")
        for noisy in (times, NoisyTimes(times, relative_noise=0.0))
    )
    assert oracle == others.pop(0)
    assert oracle > 1.1 * max(others)


def test_refinement_drops_what_the_drafter_doubts_and_what_was_not_drafted_costs_nothing() -> None:
    """Confidence 0.2 goes with every wrong token: all that is submitted is accepted."""
    hits = ([True, True, False] * 14)[:40]
    known = {"draft_model": outcomes(hits, "d", with_confidence=True)}
    workload = Workload.of("one", [SimulatedRequest("a", 0.0, 4, 40, known)])

    class Deep(DicePlanner):
        def plan(self, view: BatchView) -> Plan:
            return Plan.uniform(view, "draft_model", 8)

    planner = Deep(0)
    finished(workload, planner)
    drafting = [o for o in planner.observations if sum(o.drafted)]
    assert drafting
    for observation in drafting:
        assert observation.proposed == observation.accepted
        assert observation.drafted[0] - observation.proposed[0] in (0, 1)
        assert observation.confidence is not None
        assert len(observation.confidence[0]) == observation.drafted[0]


@pytest.mark.parametrize("between", [True, False])
def test_a_planner_is_asked_after_every_round_or_once_all_is_drafted(between: bool) -> None:
    known = {"draft_model": outcomes([True] * 40, "d", with_confidence=True)}
    workload = Workload.of("one", [SimulatedRequest("a", 0.0, 4, 40, known)])
    seen: list[int] = []

    class Curious(DicePlanner):
        refines_between_rounds = between

        def plan(self, view: BatchView) -> Plan:
            return Plan.uniform(view, "draft_model", 4)

        def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
            seen.append(len(confidence[0]))
            return plan

    finished(workload, Curious(0))
    assert seen[:4] == ([1, 2, 3, 4] if between else [4] * 4)


@pytest.mark.parametrize("confident", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_n_gram_drafts_are_refined_as_in_an_engine(asked: bool, confident: bool) -> None:
    hits = ([True, True, False] * 14)[:40]
    known = {"ngram": outcomes(hits, "n", with_confidence=confident)}
    workload = Workload.of("one", [SimulatedRequest("a", 0.0, 4, 40, known)])

    class Deep(DicePlanner):
        refines_hinted = asked

        def plan(self, view: BatchView) -> Plan:
            return Plan.uniform(view, "ngram", 8)

        def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
            assert len(confidence) == len(view.requests)
            return Plan.uniform(view, "ngram", 1)

    planner = Deep(0)
    finished(workload, planner)
    assert max(sum(o.drafted) for o in planner.observations) == 8
    assert max(sum(o.proposed) for o in planner.observations) == (1 if asked else 8)


def test_a_planner_that_never_refines_is_not_asked_to() -> None:
    """It says so, as to an engine."""
    known = {"draft_model": outcomes([True] * 40, "d", with_confidence=True)}
    workload = Workload.of("one", [SimulatedRequest("a", 0.0, 4, 40, known)])

    class Resolute(DicePlanner):
        refines = False

        def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
            raise AssertionError("asked")

    planner = Resolute(0)
    finished(workload, planner)
    assert any(sum(o.proposed) for o in planner.observations)


def test_shared_beginnings_are_computed_once() -> None:
    """Mooncake's kind of ids: one stands for many tokens."""
    contents = np.array([7, 8, 9], dtype=np.int64)
    requests = [
        SimulatedRequest(f"r{n}", 10.0 * n, 96, 2, contents=contents, tokens_per_content=32)
        for n in range(2)
    ]
    alone = [SimulatedRequest(f"r{n}", 10.0 * n, 96, 2) for n in range(2)]
    shared = simulate(Workload.of("shared", requests), "off", TIMES, SMALL)
    apart = simulate(Workload.of("apart", alone), "off", TIMES, SMALL)
    assert shared.times["ttft_seconds"][1] < 0.5 * shared.times["ttft_seconds"][0]
    assert apart.times["ttft_seconds"][1] == pytest.approx(apart.times["ttft_seconds"][0])


@pytest.mark.parametrize(
    ("policy", "opts_out"),
    [
        ("off", False),
        ("static:sparse_kv:64:scored:2", True),
        ("static:sparse_kv:64:scored:2", False),
    ],
)
def test_the_end_of_a_shared_beginning_is_computed_anew_for_who_may_draft_by_its_scores(
    policy: str, opts_out: bool
) -> None:
    """As an engine tells drafters of nobody else."""
    arm, contents = "sparse_kv:64:scored", np.arange(96)
    known = {arm: outcomes([True] * 4, "s")}
    requests = [
        SimulatedRequest(f"r{n}", 10.0 * n, 96, 4, own, contents=contents)
        for n, own in enumerate([known, {} if opts_out else known])
    ]
    workload = Workload(policy, (arm,), lambda: requests)
    scored, plain = (
        simulate(workload, name, TIMES, SMALL.model_copy(update={"drafters": arms}))
        for name, arms in ((policy, (arm,)), ("off", ()))
    )
    found, least = (run.times["ttft_seconds"][1] for run in (scored, plain))
    assert (found == pytest.approx(least)) == (policy == "off" or opts_out)


def test_any_text_will_do_as_an_id() -> None:
    """JSON may escape half of a pair."""
    requests = [SimulatedRequest(f"\ud800{n}", 0.0, 40, 9) for n in range(2)]
    assert simulate(Workload.of("odd", requests), "off", TIMES, SMALL).num_requests == 2


def test_requests_that_can_never_run_are_counted_and_said() -> None:
    """The others are decoded."""
    requests = [SimulatedRequest("big", 0.0, 500, 9), SimulatedRequest("small", 0.0, 5, 9)]
    result = simulate(Workload.of("two", requests), "off", TIMES, SMALL)
    alone = simulate(Workload.of("one", requests[1:]), "off", TIMES, SMALL)
    assert (result.num_refused, result.num_requests) == (1, 1)
    assert result.seconds == alone.seconds
    assert simulate(Workload.of("none", requests[:1]), "off", TIMES, SMALL).seconds == 0.0
    assert "'big' may grow to 509 tokens" in result.refusals[0]


def test_limits_count_requests_and_load_factors_move_arrivals() -> None:
    """At twice the load waiting grows, and no request comes earlier than it arrives."""
    workload = drawn_workload(5, 40)
    slo = SLO(ttft_seconds=0.05)
    calm, busy = (
        simulate(workload.faster(factor), "off", TIMES, SMALL, slo=slo) for factor in (0.2, 5.0)
    )
    assert calm.requests_within_slo > busy.requests_within_slo
    assert calm.latency("ttft_seconds", 0.5).value < busy.latency("ttft_seconds", 0.5).value
    assert float(busy.times["ttft_seconds"].min()) > 0.0


def test_requests_of_one_token_have_no_time_per_further_token() -> None:
    """As in live comparisons, which leave them out of it; they keep any limit."""
    short = [SimulatedRequest(f"s{n}", 10.0 * n, 4, 1) for n in range(30)]
    long = [SimulatedRequest(f"l{n}", 10.0 * n + 5.0, 4, 11) for n in range(10)]
    both = simulate(Workload.of("both", [*short, *long]), "off", TIMES, slo=SLO(tpot_seconds=1e-9))
    alone = simulate(Workload.of("long", long), "off", TIMES)
    assert alone.latency("tpot_seconds", 0.5).value > 0.0
    for quantile in (0.5, 0.9):
        found, expected = (run.latency("tpot_seconds", quantile).value for run in (both, alone))
        assert found == pytest.approx(expected)
    assert both.requests_within_slo == 30
    few = simulate(Workload.of("short", short), "off", TIMES)
    assert few.latency("tpot_seconds", 0.5).value == 0.0
    assert few.latency("ttft_seconds", 0.5).value > 0.0


@pytest.mark.parametrize("num_requests", [4, 5, 9])
def test_planners_are_shown_that_others_wait_from_the_first_step_on(num_requests: int) -> None:
    """As long as more have come than are decoded together, as in an engine."""
    requests = [SimulatedRequest(f"r{n}", 0.0, 3, 9 + n) for n in range(num_requests)]
    planner = DicePlanner(0)
    finished(Workload.of("queue", requests), planner)
    ended, found, told = 0, [], []
    for seen in planner.observations:
        found.append(seen.view.others_wait)
        told.append(num_requests - ended > SMALL.max_batch_size)
        rows = zip(seen.view.requests, seen.emitted, strict=True)
        ended += sum(request.remaining_tokens == emitted for request, emitted in rows)
    assert found == told


@given(st.integers(0, 1000), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_in_a_closed_loop_a_request_arrives_when_another_has_ended(seed: int, most: int) -> None:
    """The k-th that ends lets the next one come."""
    workload = drawn_workload(seed, 12, sure=True).in_closed_loop(most)
    planner = DicePlanner(seed)
    simulation = finished(workload, planner)
    times = simulation.measurements.result(policy="dice", workload="w").times
    came = np.sort(times["arrival_seconds"])
    ended = np.sort(times["arrival_seconds"] + times["end_to_end_seconds"])
    assert came[:most] == pytest.approx(0.0)
    assert came[most:] == pytest.approx(ended[: len(came) - most])
    assert max(len(seen.view.requests) for seen in planner.observations) <= most


def test_texts_of_one_and_arrivals_of_another_make_a_workload() -> None:
    """Texts are repeated where there are fewer; ids stay distinct."""
    texts, arrivals = drawn_workload(1, 3), drawn_workload(2, 8)
    both = list(texts.with_arrivals_of(arrivals))
    assert [r.arrival_seconds for r in both] == [r.arrival_seconds for r in arrivals]
    assert len({r.id for r in both}) == 8
    assert both[4].output_tokens == list(texts)[1].output_tokens


def test_what_cannot_be_is_refused() -> None:
    """In one line, before anything is simulated."""
    with pytest.raises(TraceError, match="sort the requests"):
        list(Workload("w", (), lambda: [SimulatedRequest("a", t, 1, 1) for t in (2.0, 1.0)]))
    with pytest.raises(TraceError, match="one value per output token"):
        SimulatedRequest("a", 0.0, 1, 3, {"ngram": outcomes([True], "d")})
    with pytest.raises(TraceError, match="at most the depth"):
        ArmOutcomes(np.array([17], dtype=np.uint8))
    with pytest.raises(ConfigError, match="load factor"):
        drawn_workload(0, 1).faster(0.0)


def test_a_long_series_has_at_most_so_many_points_and_loses_nothing() -> None:
    """Points are merged in pairs."""
    workload = Workload.of("long", [SimulatedRequest("a", 0.0, 4, 3000)])
    settings = SimulationSettings(kv_tokens=4096)
    result = simulate(workload, "off", TIMES, settings)
    assert len(result.series) <= 512
    assert sum(point.output_tokens for point in result.series) == 3000
    assert sum(point.steps for point in result.series) == result.num_steps
