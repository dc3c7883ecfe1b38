"""What is learnt offline predicts better than the online estimate, in small files without code."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from sdcontrol import policies
from sdcontrol.core import BatchView, Belief, Hint, Observation, Plan, RequestView, Timing
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.policies.checks import ToyCost, check_policy
from sdcontrol.policies.learned import Learned
from sdcontrol.policies.learned_model import LearnedModel, fit, load, save, train
from sdcontrol.policies.learned_scores import report
from sdcontrol.skops_files import read_skops, write_skops


def recorded(seed: int, steps: int) -> list[Observation]:
    """A run in which temperature halves acceptance, which no online estimate can know beforehand.

    Every request lives for 6 steps; verification costs 1 ms, 0.1 ms per token beyond 12 and 1 us
    per 10 KV tokens, with 2 % of noise.
    """
    generator = np.random.default_rng(seed)
    observations = []
    for step in range(steps):
        batch = int(generator.integers(1, 9))
        requests = tuple(
            RequestView(
                id=f"{step // 6}.{r}",
                context_tokens=int(generator.integers(100, 3000)),
                generated_tokens=step % 6 * 3,
                remaining_tokens=100,
                temperature=float((step // 6 + r) % 2),
                drafters=("draft_model",),
                hints={"draft_model": Hint(confidence=0.5)},
            )
            for r in range(batch)
        )
        view = BatchView(step, requests, 1000)
        plan = Plan.uniform(view, "draft_model", int(generator.integers(1, 6)))
        proposed = tuple(choice.num_draft_tokens for choice in plan.choices)
        accepted = tuple(
            min(n, int(generator.geometric(1.0 - (0.85 - 0.5 * request.temperature))) - 1)
            for n, request in zip(proposed, requests, strict=True)
        )
        observations.append(
            Observation(
                view=view,
                plan=plan,
                drafted=proposed,
                proposed=proposed,
                accepted=accepted,
                emitted=tuple(n + 1 for n in accepted),
                timing=Timing(
                    draft_seconds={"draft_model": max(proposed) * (4e-4 + 1e-5 * batch)},
                    verify_seconds=verify_seconds(view, sum(proposed))
                    * float(generator.normal(1.0, 0.02)),
                    overhead_seconds=1e-4,
                ),
            )
        )
    return observations


def verify_seconds(view: BatchView, draft_tokens: int) -> float:
    tokens = len(view.requests) + draft_tokens
    kv_tokens = sum(request.context_tokens for request in view.requests)
    return 1e-3 + 1e-4 * max(tokens - 12, 0) + 1e-7 * kv_tokens


@pytest.fixture(scope="module")
def model() -> LearnedModel:
    return train(recorded(seed=1, steps=300))


def test_a_model_fitted_to_runs_beats_what_is_learnt_online_on_held_out_ones() -> None:
    """Acceptance by more than 5 % of log-loss, of which about 0.54 is the least possible here, and
    step time; seeds are fixed."""
    model = fit([recorded(seed=1, steps=150), recorded(seed=8, steps=150)])
    held_out = report(model, [recorded(seed=2, steps=75), recorded(seed=9, steps=75)])
    assert held_out.steps == 148  # the first of a run is not scored
    assert held_out.outcomes > 500
    assert held_out.learned_log_loss < 0.95 * held_out.online_log_loss
    assert held_out.learned_step_error < held_out.online_step_error
    assert held_out.learned_step_log_error < held_out.online_step_log_error


def test_a_report_needs_runs_that_drafted(model: LearnedModel) -> None:
    with pytest.raises(ConfigError, match="drafted"):
        report(model, [[]])
    with pytest.raises(ConfigError, match="drafted"):
        report(model, [])


def test_learned_step_time_is_within_3_percent_on_a_held_out_run(model: LearnedModel) -> None:
    errors = []
    for observation in recorded(seed=3, steps=150):
        view, drafts = observation.view, sum(observation.proposed)
        kv_tokens = float(sum(request.context_tokens for request in view.requests))
        tokens = float(len(view.requests) + drafts)
        predicted = float(model.cost.verify_seconds(tokens, kv_tokens, len(view.requests)))
        errors.append(abs(predicted / verify_seconds(view, drafts) - 1.0))
    assert np.median(errors) < 0.03


def test_learned_costs_never_fall_with_more_work(model: LearnedModel) -> None:
    verify = model.cost.verify_seconds(np.arange(1.0, 500.0), 1000.0, 4)
    draft = model.cost.draft_seconds("draft_model", np.arange(1.0, 50.0), 100.0)
    assert (np.diff(verify) >= 0.0).all()
    assert (np.diff(draft) >= 0.0).all()
    assert float(draft[0]) == pytest.approx(4.1e-4, rel=0.1)


def test_a_saved_model_predicts_the_same(model: LearnedModel, tmp_path: Path) -> None:
    save(model, tmp_path / "model.skops")
    loaded = load(tmp_path / "model.skops")
    view = recorded(seed=4, steps=1)[0].view
    belief = Belief(AcceptanceEstimator(8).survival(view, 8), ToyCost())
    assert loaded.knows(view)
    for arm, rows in Learned(model).survival(view, belief.survival).items():
        assert (rows != belief.survival[arm]).any()
        np.testing.assert_array_equal(Learned(loaded).survival(view, belief.survival)[arm], rows)
    assert loaded.cost.overhead == model.cost.overhead
    built = policies.build(f"learned:{tmp_path / 'model.skops'}")
    assert built.plan(view, belief) == Learned(model).plan(view, belief)


def test_files_that_hold_code_or_nothing_known_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.skops").write_bytes(pickle.dumps({"version": 1}))
    write_skops({"version": 1, "knots": train}, tmp_path / "b.skops")
    write_skops({"version": 0}, tmp_path / "c.skops")
    write_skops({"version": 3, "knots": np.zeros(2)}, tmp_path / "d.skops")
    write_skops({"version": np.full(2, 4)}, tmp_path / "e.skops")
    for name in ("a", "b", "c", "d", "e", "missing"):
        with pytest.raises(ConfigError, match=f"{name}.skops"):
            load(tmp_path / f"{name}.skops")


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("prices", "zz", "prices is 'zz', not true or false"),
        ("overhead", float("nan"), "a number that is not finite"),
        ("overhead", 10**400, "int too large to convert to float"),
        ("low", np.full(4, np.inf), "a number that is not finite"),
        ("low", np.zeros(3), "numbers of shape (3,), not (4,)"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(
    model: LearnedModel, tmp_path: Path, part: str, value: object, said: str
) -> None:
    path = tmp_path / "model.skops"
    save(model, path)
    write_skops({**read_skops(path), part: value}, path)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(path)


def test_out_of_distribution_it_plans_as_goodput_does(model: LearnedModel) -> None:
    known = recorded(seed=5, steps=1)[0].view
    long = RequestView("long", 90_000, 1, 100, 0.0, ("draft_model",))
    crowd = tuple(RequestView(str(r), 500, 1, 100, 0.0, ("draft_model",)) for r in range(80))
    assert model.knows(known)
    for requests in ((long,), crowd):
        view = BatchView(0, requests, 1000)
        assert not model.knows(view)
        arm = requests[0].drafters[0]
        survival = {arm: np.cumprod(np.full((len(requests), 6), 0.7), axis=1)}
        belief = Belief(survival, ToyCost())
        expected = policies.build("goodput").plan(view, belief)
        assert Learned(model).plan(view, belief).choices == expected.choices


def test_of_an_arm_that_was_not_learnt_the_online_belief_stands_alone(model: LearnedModel) -> None:
    """Beside it, what was learnt of others leads: a drafter never tried does not silence the rest."""
    drafters = ("draft_model", "sparse_kv:512")
    view = BatchView(0, tuple(RequestView(str(r), 500, 1, 100, 0.0, drafters) for r in range(4)), 0)
    assert model.knows(view)
    survival = {arm: np.cumprod(np.full((4, 6), 0.7), axis=1) for arm in drafters}
    policy, online = Learned(model), ToyCost()
    corrected, cost = policy.survival(view, survival), policy.cost(view, online)
    np.testing.assert_array_equal(corrected["sparse_kv:512"], survival["sparse_kv:512"])
    assert (corrected["draft_model"] != survival["draft_model"]).all()
    assert cost.draft_seconds("sparse_kv", 4, 2000) == online.draft_seconds("sparse_kv", 4, 2000)
    assert cost.draft_seconds("draft_model", 4, 2000) != online.draft_seconds(
        "draft_model", 4, 2000
    )
    assert policy.plan(view, Belief(survival, online)).reason.startswith("learned: ")


def test_too_few_observations_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least"):
        train(recorded(seed=6, steps=5))


def test_the_learned_policy_keeps_the_contract(model: LearnedModel) -> None:
    check_policy(Learned(model), seed=7)
