"""Training says what it learnt, how well, and where that must not be used."""

import math
from dataclasses import replace

import pytest

from sdcontrol.cli.train import _lines
from sdcontrol.core import Hint, Observation, Plan, Timing
from sdcontrol.errors import ConfigError
from sdcontrol.experiments.training import FEATURES, SITUATION, TrainingReport, learn
from sdcontrol.policies.learned_features import NUM_FEATURES
from sdcontrol.policies.learned_model import LearnedModel
from sdcontrol.policies.learned_trust import stretches
from tests.learned_support import ARM, seen_run

COUNTED = "drafted", "proposed", "accepted", "emitted"


@pytest.fixture(scope="module")
def learnt() -> tuple[LearnedModel, TrainingReport]:
    """Of two runs of which confidence and the tokens of a forward say everything."""
    return learn([seen_run(1, 80), seen_run(2, 80)])


def test_held_out_requests_and_steps_are_foreseen_better_than_online(
    learnt: tuple[LearnedModel, TrainingReport],
) -> None:
    _, report = learnt
    assert report.is_better
    assert report.prices_better
    assert report.scores.learned_step_error < report.scores.online_step_error
    assert report.scores.steps == 158  # all but the first of each run


def test_the_prices_that_are_reported_are_those_of_the_machine(
    learnt: tuple[LearnedModel, TrainingReport],
) -> None:
    """1 ms a forward, 0.4 ms a round."""
    _, report = learnt
    assert report.prices.forward == pytest.approx(1e-3, rel=0.05)
    assert report.prices.rounds[ARM] == pytest.approx(4e-4, rel=0.1)
    assert report.prices.is_used


def test_the_report_says_in_words_what_was_learnt_and_where_not_to_use_it(
    learnt: tuple[LearnedModel, TrainingReport],
) -> None:
    model, report = learnt
    text = "\n".join(_lines(report))
    assert "drafter's confidence (+" in text
    assert f"{ARM} is accepted more with" in text
    assert f"a forward takes {1e3 * report.prices.forward:.3g} ms" in text
    assert f"drafting round for one request: {ARM} {1e3 * report.prices.rounds[ARM]:.3g} ms" in text
    assert "those\n  count for more that were nearer of late" in text
    assert "must not be used" in text
    for name, high in zip(SITUATION, model.high, strict=True):
        assert f"{name} above {high:.0f}" in text
    assert "nor with other models" in text
    assert "beware" not in text


def test_it_warns_of_what_it_foresees_no_better(
    learnt: tuple[LearnedModel, TrainingReport],
) -> None:
    _, report = learnt
    scores = replace(
        report.scores,
        learned_log_loss=report.scores.online_log_loss,
        learned_step_log_error=report.scores.online_step_log_error,
    )
    prices = replace(report.prices, is_used=False)
    text = "\n".join(_lines(replace(report, scores=scores, weights={}, prices=prices)))
    assert "beware: it foresees acceptance no better" in text
    assert "beware: it prices steps no better" in text
    assert f"{ARM}: nothing beyond the online estimate, which stands" in text
    assert "stands alone" in text


def test_plain_numbers_say_the_same(learnt: tuple[LearnedModel, TrainingReport]) -> None:
    _, report = learnt
    record = report.to_json()
    assert record["is_better_than_online"] is True
    assert record["prices_better_than_online"] is True
    assert set(report.weights[ARM]) == set(FEATURES)
    assert len(FEATURES) == NUM_FEATURES
    assert all(math.isfinite(weight) for weight in report.weights[ARM].values())


def test_stretches_part_runs_without_loss() -> None:
    runs = [list(range(17)), list(range(5))]
    folds = stretches(runs, 3)  # type: ignore[arg-type]
    for number, run in enumerate(runs):
        held = [step for _, spans in folds for step in spans[number]]
        assert held == run
    for rest, spans in folds:
        assert sum(map(len, rest)) + sum(map(len, spans)) == 22


def without_drafts(observation: Observation) -> Observation:
    none = (0,) * len(observation.drafted)
    return replace(observation, drafted=none, proposed=none, accepted=none)


def of_one_request(run: list[Observation]) -> list[Observation]:
    """Of each step the first request, which has the same name in every run."""
    alone = []
    for one in run:
        request = replace(one.view.requests[0], id="request-0")
        alone.append(
            replace(
                one,
                view=replace(one.view, requests=(request,)),
                plan=Plan(one.plan.choices[:1]),
                **{name: getattr(one, name)[:1] for name in COUNTED},
            )
        )
    return alone


def test_requests_of_different_runs_are_different_ones_whatever_they_are_called() -> None:
    runs = [of_one_request(seen_run(seed, 60)) for seed in range(8)]
    model, report = learn(runs)
    assert report.num_requests == 8
    assert ARM in model.acceptance
    assert report.is_better


@pytest.mark.parametrize("timed", [range(60, 90), range(30), range(40, 54)])
def test_times_may_be_known_of_a_part_of_a_run_only(timed: range) -> None:
    run = [
        one if step in timed else replace(one, timing=Timing({}, math.nan))
        for step, one in enumerate(seen_run(4, 90))
    ]
    model, report = learn([run])
    assert report.scores.steps == len(timed) - 1
    assert model.cost.verify_seconds(1.0, 0.0, 1) == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("confidence", [math.inf, -math.inf])
def test_what_a_drafter_says_that_is_no_chance_is_left_out(
    learnt: tuple[LearnedModel, TrainingReport], confidence: float
) -> None:
    """The rest is learnt from."""
    runs = [seen_run(1, 80), seen_run(2, 80)]
    for run in runs:
        for place in range(0, 80, 9):
            view, hints = run[place].view, {ARM: Hint(confidence=confidence)}
            requests = tuple(replace(request, hints=hints) for request in view.requests)
            run[place] = replace(run[place], view=replace(view, requests=requests))
    model, report = learn(runs)
    assert ARM in model.acceptance
    assert 0 < report.scores.outcomes < learnt[1].scores.outcomes


def test_runs_of_a_step_each_are_too_short_to_be_judged() -> None:
    with pytest.raises(ConfigError, match="report on runs that drafted"):
        learn([[one] for one in seen_run(4, 40)])


def test_runs_that_teach_nothing_are_refused() -> None:
    run = seen_run(3, 40)
    with pytest.raises(ConfigError, match="train on traces that drafted"):
        learn([[without_drafts(observation) for observation in run]])
    with pytest.raises(ConfigError, match="at least 2"):
        learn([[]])
    with pytest.raises(ConfigError, match="at least 12"):
        learn([run[:6]])
