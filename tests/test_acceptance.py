"""Facts about believed acceptance.

Worlds are drawn with fixed seeds. Over other seeds a belief about one request has a standard
deviation of at most 0.05 at the first position, one about a new request 0.02: the tolerances below
are at least twice that, so a test drawn anew fails in fewer than 5 % of draws.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from sdcontrol.core import (
    BatchView,
    Choice,
    Confidence,
    FloatArray,
    Hint,
    Observation,
    Plan,
    RequestView,
    Timing,
)
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.estimators.confidence import ConfidenceCalibration, calibrated, flattened
from tests.engine_support import interrupt_at

ARM = "draft_model"


def view_of(
    ids: Sequence[str], step: int = 0, arms: tuple[str, ...] = (ARM,), **hints: Hint
) -> BatchView:
    requests = tuple(RequestView(name, 100, step, 10_000, 0.0, arms, hints) for name in ids)
    return BatchView(step, requests, 1 << 20)


def outcome(
    view: BatchView,
    lengths: Sequence[int],
    accepted: Sequence[int],
    *,
    arm: str = ARM,
    drafted: Sequence[int] | None = None,
    confidence: Confidence | None = None,
    nodes: tuple[tuple[int, ...], ...] | None = None,
    shadow: Mapping[str, tuple[int | None, ...]] | None = None,
) -> Observation:
    planned = lengths if drafted is None else drafted
    return Observation(
        view,
        Plan(tuple(Choice.of(arm, length) for length in planned)),
        drafted=tuple(planned),
        proposed=tuple(lengths),
        accepted=tuple(accepted),
        emitted=tuple(count + 1 for count in accepted),
        timing=Timing(),
        accepted_nodes=nodes,
        confidence=confidence,
        shadow=shadow or {},
    )


def run_of(rng: np.random.Generator, hazards: Sequence[float], length: int) -> int:
    """How many of `length` drafts are accepted."""
    for position in range(length):
        if rng.random() >= hazards[position]:
            return position
    return length


def taught(
    estimator: AcceptanceEstimator,
    hazards: Mapping[str, Sequence[float]],
    steps: int,
    *,
    length: int = 8,
    first_step: int = 0,
    seed: int = 0,
) -> None:
    """Steps in which request `r` accepts with `hazards[r]`, each with a generator of its own."""
    generators = {name: np.random.default_rng([seed, *name.encode()]) for name in hazards}
    for step in range(first_step, first_step + steps):
        view = view_of(list(hazards), step)
        accepted = [run_of(generators[r], rates, length) for r, rates in hazards.items()]
        estimator.update(outcome(view, [length] * len(accepted), accepted))


def believed(estimator: AcceptanceEstimator, name: str, arm: str = ARM) -> FloatArray:
    return estimator.survival(view_of([name], arms=(arm,)))[arm][0]


def test_a_new_request_is_believed_to_be_like_the_others() -> None:
    estimator = AcceptanceEstimator()
    taught(estimator, {name: [0.9] * 8 for name in "abcdefgh"}, 30)
    assert believed(estimator, "new")[0] == pytest.approx(0.9, abs=0.04)


def test_a_first_rejection_does_not_condemn_a_lone_request() -> None:
    """The average and the request both move; together by no more than the odds of one outcome."""
    estimator = AcceptanceEstimator()
    before = believed(estimator, "a")[0]
    estimator.update(outcome(view_of(["a"]), [4], [0]))
    after = believed(estimator, "a")[0]
    assert 0.4 < after < before - 0.1


def test_full_acceptance_of_short_drafts_says_nothing_of_longer_ones() -> None:
    """Accepted over proposed would believe that the first of two drafts is the only one tried."""
    estimator = AcceptanceEstimator()
    taught(estimator, {name: [0.8] * 8 for name in "abcd"}, 100, length=2)
    survival = believed(estimator, "new")
    assert survival[0] == pytest.approx(0.8, abs=0.06)
    assert survival[1] == pytest.approx(0.64, abs=0.08)
    assert survival[5] == pytest.approx(0.8**6, abs=0.1)


@pytest.mark.parametrize(
    "hazards",
    [
        [
            0.71,
            0.54,
            0.55,
            0.4,
            0.6,
            0.6,
            0.6,
            0.6,
        ],  # saturates: 1.71, 2.09, 2.30, 2.38, 2.43 tokens
        [0.5, 0.7, 0.8, 0.85, 0.9, 0.9, 0.9, 0.9],  # rises with position
    ],
    ids=["saturates", "rises"],
)
def test_hazards_need_not_be_geometric(hazards: list[float]) -> None:
    estimator = AcceptanceEstimator(8)
    taught(estimator, dict.fromkeys("abcdefgh", hazards), 150)
    np.testing.assert_allclose(believed(estimator, "new"), np.cumprod(hazards), atol=0.06)
    np.testing.assert_allclose(believed(estimator, "a"), np.cumprod(hazards), atol=0.1)


def test_each_request_is_believed_by_what_it_did() -> None:
    estimator = AcceptanceEstimator()
    truth = {"good": 0.95, "fair": 0.7, "poor": 0.2}
    taught(estimator, {name: [rate] * 8 for name, rate in truth.items()}, 60)
    for name, rate in truth.items():
        assert believed(estimator, name)[0] == pytest.approx(rate, abs=0.1)


@pytest.mark.parametrize(
    ("rates", "least", "most"), [((0.6, 0.6), 0.0, 0.2), ((0.3, 0.9), 0.3, 1.0)]
)
def test_a_run_of_bad_luck_counts_for_more_where_requests_differ(
    rates: tuple[float, float], least: float, most: float
) -> None:
    estimator = AcceptanceEstimator()
    for turn in range(30):  # of requests that are alike, or of either kind
        taught(
            estimator, {f"{turn} {rate} {side}": [rate] * 8 for side, rate in enumerate(rates)}, 20
        )
    view, before = view_of(["new"]), float(believed(estimator, "new")[0])
    for _ in range(4):
        estimator.update(outcome(view, [1], [0]))
    assert least <= before - float(believed(estimator, "new")[0]) <= most


def test_long_drafts_that_nobody_expected_leave_numbers() -> None:
    """The likelihood of 64 tokens in a row, where hardly one was ever right, is no double."""
    estimator = AcceptanceEstimator(64, {ARM: 1e-4})
    estimator.update(outcome(view_of(["a", "b"]), [64, 64], [64, 0]))
    survival = estimator.survival(view_of(["a", "b", "new"]))[ARM]
    assert ((survival >= 0.0) & (survival <= 1.0)).all()
    assert survival[0, 0] > survival[1, 0]


def of_two_kinds() -> AcceptanceEstimator:
    """After turns of eight requests that accept nearly all, and of eight that accept hardly any."""
    estimator = AcceptanceEstimator()
    for turn in range(12):
        rates = [(0.92, 0.15)[turn % 2]] * 8
        taught(estimator, {f"{turn} {side}": rates for side in range(8)}, 12, length=4)
    return estimator


def test_requests_of_one_kind_tell_of_one_another() -> None:
    """One rejection says something of a lone request, eight at once what kind of batch it is."""
    lone, batch = of_two_kinds(), of_two_kinds()
    lone.update(outcome(view_of(["a"]), [4], [0]))
    names = list("abcdefgh")
    batch.update(outcome(view_of(names), [4] * 8, [0] * 8))
    of_batch = batch.survival(view_of(names))[ARM][0, 0]
    assert 0.3 < believed(lone, "a")[0] < 0.6
    assert of_batch < 0.25
    beside_them = batch.survival(view_of([*names, "new"]))[ARM][8, 0]
    assert beside_them < believed(batch, "new")[0] - 0.2


@pytest.mark.parametrize("accepted", [2, 8, 16, 24, 30])
def test_what_a_first_step_tells_of_a_drafter_is_not_learnt_twice(accepted: int) -> None:
    """Of 32 requests that draft a token with it, so many have it accepted: as many of others will.

    Learnt as the drafter's average and as how far its requests are from what that was, those came to 0.01, 0.08,
    0.49, 0.75 and 0.98.
    """
    estimator, names = AcceptanceEstimator(), [str(r) for r in range(32)]
    estimator.update(outcome(view_of(names), [1] * 32, [int(r < accepted) for r in range(32)]))
    beside_them = estimator.survival(view_of([*names, "new"], 1))[ARM][32, 0]
    assert abs(beside_them - accepted / 32) < 0.1


def test_one_odd_request_refutes_that_its_batch_is_of_one_kind() -> None:
    estimator = of_two_kinds()
    rates = {name: [0.92] * 8 for name in "abcdefg"} | {"odd": [0.15] * 8}
    taught(estimator, rates, 12, length=4, seed=3)
    survival = estimator.survival(view_of(list(rates)))[ARM][:, 0]
    assert survival[7] < 0.35
    assert (survival[:7] > 0.8).all()


@pytest.mark.parametrize("is_one_kind", [True, False])
def test_how_often_batches_are_of_one_kind_is_learnt(is_one_kind: bool) -> None:
    """Two of four accept all and two nothing, or all four do the same, which changes by turns.

    After one step of a new batch, of which one request was not told of: what it is believed to be.
    """
    estimator, rng = AcceptanceEstimator(), np.random.default_rng(4)
    for turn in range(60):
        names = [f"{turn} {r}" for r in range(4)]
        rates = [0.95 if (turn if is_one_kind else r) % 2 else 0.1 for r in range(4)]
        for step in range(6):
            accepted = [run_of(rng, [rate] * 4, 4) for rate in rates]
            estimator.update(outcome(view_of(names, 6 * turn + step), [4] * 4, accepted))
    estimator.update(outcome(view_of(["a", "b", "c"], 400), [4] * 3, [0] * 3))
    first = estimator.survival(view_of(["a", "b", "c", "new"], 401))[ARM][3, 0]
    alone = believed(estimator, "new")[0]
    assert alone - 0.15 < first if not is_one_kind else first < 0.5 * alone


def test_one_odd_request_does_not_poison_the_others() -> None:
    """Belief about its neighbours, and about new requests, moves by less than 0.05 and 0.15."""
    clean, poisoned = AcceptanceEstimator(), AcceptanceEstimator()
    crowd = {f"r{index}": [0.85] * 8 for index in range(8)}
    taught(clean, crowd, 200)
    taught(poisoned, {**crowd, "odd": [0.0] * 8}, 200)
    for name in crowd:
        assert abs(believed(clean, name)[0] - believed(poisoned, name)[0]) < 0.08
    assert believed(poisoned, "new")[0] > believed(clean, "new")[0] - 0.15


def test_a_request_that_changes_is_followed_within_twenty_steps() -> None:
    estimator = AcceptanceEstimator()
    taught(estimator, {"a": [0.95] * 8}, 200)
    taught(estimator, {"a": [0.1] * 8}, 20, first_step=200, seed=1)
    assert believed(estimator, "a")[0] < 0.3
    taught(estimator, {"a": [0.95] * 8}, 20, first_step=220, seed=2)
    assert believed(estimator, "a")[0] > 0.75


def test_a_steady_request_is_believed_more_sharply_than_a_changing_one() -> None:
    """The spread of beliefs over time around a constant truth; forgetting follows drift."""
    estimator = AcceptanceEstimator()
    beliefs = []
    for block in range(40):
        taught(estimator, {"a": [0.7] * 8}, 5, first_step=5 * block, seed=block)
        beliefs.append(believed(estimator, "a")[0])
    assert np.std(beliefs[10:]) < 0.08
    assert np.mean(beliefs[10:]) == pytest.approx(0.7, abs=0.05)


def test_arms_are_believed_apart() -> None:
    estimator = AcceptanceEstimator()
    rng = np.random.default_rng(0)
    truth = {"sparse_kv:512": 0.95, "ngram": 0.3}
    for step in range(80):
        for arm, rate in truth.items():
            view = view_of(["a", "b"], step, tuple(truth))
            accepted = [run_of(rng, [rate] * 4, 4) for _ in range(2)]
            estimator.update(outcome(view, [4, 4], accepted, arm=arm))
    for arm, rate in truth.items():
        assert believed(estimator, "new", arm)[0] == pytest.approx(rate, abs=0.08)


def test_survival_is_zero_where_a_drafter_may_not_be_used() -> None:
    estimator = AcceptanceEstimator()
    hints = {"ngram": Hint(max_draft_tokens=2)}
    requests = (
        RequestView("a", 10, 0, 100, drafters=("ngram", "draft_model"), hints=hints),
        RequestView("b", 10, 0, 100, drafters=("draft_model",)),
        RequestView("c", 10, 0, 100),
    )
    survival = estimator.survival(BatchView(0, requests, 100), 4)
    assert set(survival) == {"ngram", "draft_model"}
    assert survival["ngram"].shape == (3, 4)
    assert (survival["ngram"][0, :2] > 0).all()
    assert (survival["ngram"][0, 2:] == 0).all()
    assert (survival["ngram"][1:] == 0).all()
    assert (survival["draft_model"][:2] > 0).all()
    assert (survival["draft_model"][2] == 0).all()


def test_new_requests_of_a_batch_differ_in_how_much_they_may_draft_alone() -> None:
    """What is believed of one is said of all; one that was seen is another."""
    estimator = AcceptanceEstimator(8)
    taught(estimator, {"seen": [0.2] * 8, "other": [0.9] * 8}, 20)
    limits = {"few": 2, "seen": 8, "most": 8, "some": 5, "nothing": 0}
    requests = tuple(
        RequestView(name, 10, 0, 100, drafters=(ARM,), hints={ARM: Hint(max_draft_tokens=limit)})
        for name, limit in limits.items()
    )
    few, seen, most, some, nothing = estimator.survival(BatchView(20, requests, 100))[ARM]
    assert (few == [*most[:2], *[0.0] * 6]).all()
    assert (some == [*most[:5], *[0.0] * 3]).all()
    assert (np.diff(most) < 0.0).all()
    assert most[-1] > 0.0
    assert seen[0] < most[0] - 0.1
    assert not nothing.any()


def test_longer_matches_are_believed_as_far_as_they_proved_right() -> None:
    estimator = AcceptanceEstimator()
    rng = np.random.default_rng(0)
    for step in range(100):
        length = (1, 12)[step % 2]
        view = view_of(["a", "b"], step, ("ngram",), ngram=Hint(8, match_tokens=length))
        rates = [{1: 0.2, 12: 0.9}[length]] * 8
        accepted = [run_of(rng, rates, 4) for _ in range(2)]
        estimator.update(outcome(view, [4, 4], accepted, arm="ngram"))
    for length, rate in ((1, 0.2), (12, 0.9)):
        view = view_of(["new"], 0, ("ngram",), ngram=Hint(8, match_tokens=length))
        assert estimator.survival(view)["ngram"][0, 0] == pytest.approx(rate, abs=0.1)


def test_the_end_of_one_copy_does_not_end_the_trust_in_the_next() -> None:
    """A new request's first draft after a long match is all wrong, which happens to any copy."""
    estimator = AcceptanceEstimator()

    def hinted(length: int) -> float:
        view = view_of(["a"], 0, ("ngram",), ngram=Hint(8, match_tokens=length))
        return float(estimator.survival(view)["ngram"][0, 0])

    before = hinted(30), hinted(2)
    view = view_of(["a"], 0, ("ngram",), ngram=Hint(8, match_tokens=30))
    estimator.update(outcome(view, [8], [0], arm="ngram"))
    assert before[0] - 0.18 < hinted(30) < before[0]
    assert before[1] - 0.1 < hinted(2) < before[1]


def test_a_request_that_copies_is_trusted_sooner_after_short_matches_too() -> None:
    estimator = AcceptanceEstimator(8)
    short = view_of(["a"], 0, ("ngram",), ngram=Hint(8, match_tokens=1))
    before = estimator.survival(short)["ngram"][0]
    for step in range(10):
        view = view_of(["a"], step, ("ngram",), ngram=Hint(8, match_tokens=4))
        estimator.update(outcome(view, [8], [8], arm="ngram"))
    after = estimator.survival(short)["ngram"][0]
    assert (after > 1.2 * before).all()


def offered(most: int | None = None, had: int = 0, faults: tuple[str, ...] = ()) -> FloatArray:
    """What is believed of a drafter that was asked for four tokens, and had `had`, or two, all right, in one step of ten."""
    estimator = AcceptanceEstimator()
    for step in range(100):
        drafted = had if step % 10 else 2
        hint = Hint(max_draft_tokens=drafted if most is None else most)
        view = view_of([f"{step // 20}"], step, **{ARM: hint})
        seen = outcome(view, [drafted], [drafted])
        estimator.update(replace(seen, plan=Plan((Choice.of(ARM, 4),)), faults=faults))
    return believed(estimator, "new")


def test_a_drafter_that_was_asked_and_had_nothing_is_not_hoped_for_again() -> None:
    first, second = offered(most=16)[:2]
    assert first < 0.3
    assert second > 0.3 * first, "where it had one it had two"


def mostly_nothing(estimator: AcceptanceEstimator, share: Mapping[str, float], steps: int) -> None:
    """Drafts of four tokens, each accepted at 0.9, that come to each request as often as `share` says."""
    rng, plan = np.random.default_rng(5), Plan(tuple(Choice.of(ARM, 4) for _ in share))
    for step in range(steps):
        drafted = [4 if rng.random() < often else 0 for often in share.values()]
        accepted = [run_of(rng, [0.9] * 4, n) for n in drafted]
        seen = outcome(view_of(list(share), step), drafted, accepted)
        estimator.update(replace(seen, plan=plan))


def test_that_drafts_seldom_come_says_nothing_of_those_that_do() -> None:
    estimator = AcceptanceEstimator()
    mostly_nothing(estimator, dict.fromkeys("abcd", 0.3), 60)
    survival = believed(estimator, "new")
    assert survival[0] == pytest.approx(0.3 * 0.9, abs=0.06)
    assert survival[3] == pytest.approx(survival[0] * 0.9**3, abs=0.06)
    assert estimator.survival(view_of("a")).coming == pytest.approx(0.3, abs=0.12)


def test_requests_to_which_drafts_come_are_told_from_others() -> None:
    estimator = AcceptanceEstimator()
    mostly_nothing(estimator, {"a": 0.9, "b": 0.1, "c": 0.9, "d": 0.1}, 40)
    often, seldom = estimator.survival(view_of("ab"))[ARM]
    assert often[0] > 0.7
    assert seldom[0] < 0.25
    assert seldom[3] / seldom[0] == pytest.approx(often[3] / often[0], abs=0.1)


def test_a_draft_that_has_come_is_not_doubted_any_more() -> None:
    estimator = AcceptanceEstimator()
    mostly_nothing(estimator, dict.fromkeys("abcd", 0.3), 60)
    view = view_of("ab")
    plan, before = Plan.uniform(view, ARM, 4), estimator.survival(view)
    came, awaited = estimator.condition(view, plan, ((0.5,) * 4, ()), before)[ARM]
    assert came[0] == pytest.approx(0.9, abs=0.06), "nothing was learnt of confidences"
    assert awaited == pytest.approx(before[ARM][1])


def test_a_drafter_that_never_had_anything_may_still_have_something() -> None:
    estimator = AcceptanceEstimator()
    mostly_nothing(estimator, dict.fromkeys("ab", 0.0), 6000)
    view = view_of("a")
    plan, before = Plan.uniform(view, ARM, 4), estimator.survival(view)
    assert 0.0 < before[ARM][0, 0] < 0.01
    came = estimator.condition(view, plan, ((0.5,) * 4,), before)[ARM][0]
    assert 0.3 < came[0] <= 1.0


def test_of_a_drafter_that_always_drafts_all_comes_exactly() -> None:
    estimator = AcceptanceEstimator()
    taught(estimator, {name: [0.7] * 8 for name in "abc"}, 300)
    assert (estimator.survival(view_of(["a", "new"])).coming == 1.0).all()


def test_drafts_that_a_hint_left_out_that_fell_short_or_that_failed_prove_nothing() -> None:
    assert offered()[0] > 0.8, "hints said how many there were"
    assert offered(most=16, had=1)[0] > 0.8, "one of four"
    assert offered(most=16, faults=("drafter quarantined",))[0] > 0.8


def test_a_drafter_that_is_off_is_known_from_its_shadow() -> None:
    estimator = AcceptanceEstimator()
    for step in range(60):
        view = view_of(["a", "b"], step, ("ngram",))
        shadow = {"ngram": (1, 0)}
        estimator.update(outcome(view, [0, 0], [0, 0], shadow=shadow))
    assert believed(estimator, "a", "ngram")[0] > 0.9
    assert believed(estimator, "b", "ngram")[0] < 0.1


def test_an_unknown_shadow_teaches_nothing() -> None:
    estimator = AcceptanceEstimator()
    before = believed(estimator, "a", "ngram")
    for step in range(5):
        view = view_of(["a"], step, ("ngram",))
        estimator.update(outcome(view, [0], [0], shadow={"ngram": (None,)}))
    np.testing.assert_array_equal(before, believed(estimator, "a", "ngram"))


def confident_world(rng: np.random.Generator, length: int) -> tuple[list[float], list[bool]]:
    """Confidence of each draft token, over-confident by a square, and whether it would be right."""
    confidence = rng.uniform(0.05, 1.0, length)
    return confidence.tolist(), (rng.random(length) < confidence**2).tolist()


def test_trimming_by_confidence_does_not_make_a_drafter_look_better() -> None:
    """Only tokens of confidence above 0.6 are submitted; the belief is about drafted ones."""
    estimator = AcceptanceEstimator()
    rng = np.random.default_rng(0)
    for step in range(400):
        confidence, right = confident_world(rng, 4)
        proposed = next((j for j, value in enumerate(confidence) if value < 0.6), 4)
        accepted = next((j for j in range(proposed) if not right[j]), proposed)
        estimator.update(
            outcome(
                view_of(["a"], step),
                [proposed],
                [accepted],
                drafted=[4],
                confidence=(tuple(confidence),),
            )
        )
    truth = np.mean(np.random.default_rng(1).uniform(0.05, 1.0, 100_000) ** 2)  # 0.35
    confident_only = 0.65  # of the submitted ones
    assert abs(believed(estimator, "a")[0] - truth) < 0.5 * (confident_only - truth)


def test_confidence_is_calibrated_by_outcomes() -> None:
    calibration = ConfidenceCalibration(2)
    rng = np.random.default_rng(0)
    for _ in range(200):  # of 40 requests that draft one token each
        confidence, right = confident_world(rng, 40)
        ones, known = np.ones(40, np.int64), flattened(tuple((value,) for value in confidence))
        outcomes = ones, ones, np.array(right, np.int64)
        calibration.update(outcomes, known, np.zeros(2, np.bool_))
    levels = np.array([0.2, 0.5, 0.8, 0.95])
    calibrations = [calibrated(level, calibration.curve[1]) for level in levels]
    np.testing.assert_allclose(calibrations, levels**2, atol=0.07)
    everywhere = [calibrated(level, calibration.curve[1]) for level in np.linspace(0, 1, 101)]
    assert (np.diff(everywhere) >= 0).all()
    assert calibrated(0.3, calibration.curve[0]) == pytest.approx(0.3)  # the other arm's


def with_known_confidence() -> AcceptanceEstimator:
    """After 150 tokens that were accepted as often as the drafter was sure of them."""
    estimator, rng = AcceptanceEstimator(), np.random.default_rng(6)
    for step in range(150):
        sure = float(rng.random())
        right = int(rng.random() < sure)
        view = view_of([f"taught {step % 10}"], step)
        estimator.update(outcome(view, [1], [right], confidence=((sure,),)))
    return estimator


def test_confidence_says_nothing_before_tokens_were_verified() -> None:
    """A drafter that is never sure would never be submitted, and so never be found to be right."""
    estimator, view = AcceptanceEstimator(), view_of(["a"])
    before = estimator.survival(view)
    after = estimator.condition(view, Plan.uniform(view, ARM, 4), ((0.02,) * 4,), before)
    np.testing.assert_array_equal(after[ARM], before[ARM])
    for step in range(20):
        unsure = outcome(view_of(["a"], step), [0], [0], drafted=[3], confidence=((0.02,) * 3,))
        estimator.update(unsure)
    np.testing.assert_allclose(believed(estimator, "a"), before[ARM][0], atol=1e-9)


@pytest.mark.parametrize("is_spread", [False, True])
def test_confidence_that_tells_no_tokens_apart_says_nothing(is_spread: bool) -> None:
    """Right half of the time, however sure: the request's own acceptance says more."""
    estimator, rng = AcceptanceEstimator(), np.random.default_rng(7)
    plan = Plan.uniform(view_of(["a"]), ARM, 2)
    for step in range(600):
        sure = float(rng.random()) if is_spread else 2e-4
        right = int(rng.random() < 0.5)
        view = view_of([f"taught {step % 10}"], step)
        estimator.update(outcome(view, [1], [right], confidence=((sure,),)))
    view = view_of(["a"])
    before = estimator.survival(view)
    after = estimator.condition(view, plan, ((0.95, 0.95),), before)[ARM]
    np.testing.assert_allclose(after, before[ARM], atol=0.1 if is_spread else 1e-9)
    assert is_spread or not estimator.heeds(plan)
    assert with_known_confidence().heeds(plan)
    assert not with_known_confidence().heeds(Plan.off(view))


def test_confidence_in_drafted_tokens_replaces_their_hazards() -> None:
    estimator = with_known_confidence()
    view = view_of(["a", "b"])
    plan = Plan.uniform(view, ARM, 4)
    before = estimator.survival(view)
    after = estimator.condition(view, plan, ((0.9, 0.1), ()), before)[ARM]
    assert after[0, :2] == pytest.approx([0.9, 0.09], abs=0.08)
    assert after[0, 2] / after[0, 1] == pytest.approx(before[ARM][0, 2] / before[ARM][0, 1])
    np.testing.assert_array_equal(after[1], before[ARM][1])


def test_a_confidence_that_is_not_a_number_says_nothing() -> None:
    estimator = AcceptanceEstimator()
    view = view_of(["a"])
    before = estimator.survival(view)
    after = estimator.condition(view, Plan.uniform(view, ARM, 3), ((float("nan"),) * 3,), before)
    np.testing.assert_allclose(after[ARM], before[ARM])
    nonsense = outcome(view, [1], [1], drafted=[3], confidence=((0.5, float("nan"), float("inf")),))
    estimator.update(nonsense)
    assert np.isfinite(believed(estimator, "a")).all()


def test_nodes_of_a_tree_are_believed_one_by_one() -> None:
    """Node 1 is the second guess for the first token: accepted when node 0 is not."""
    estimator = AcceptanceEstimator()
    rng = np.random.default_rng(0)
    for step in range(300):
        first = rng.random()
        nodes = (0, 2) if first < 0.5 else (1,) if first < 0.8 else ()
        view = view_of(["a"], step, ("ngram",))
        estimator.update(outcome(view, [3], [len(nodes)], arm="ngram", nodes=(nodes,)))
    assert believed(estimator, "a", "ngram")[:3] == pytest.approx([0.5, 0.3, 0.5], abs=0.1)


def test_requests_that_left_are_forgotten_and_memory_stays_bounded() -> None:
    estimator = AcceptanceEstimator()
    for step in range(0, 40_000, 20):
        view = view_of([f"r{step}", f"s{step}"], step)
        estimator.update(outcome(view, [2, 2], [1, 1]))
    assert estimator._requests.num_slots <= 256


@pytest.mark.parametrize("steps_of_a_text", [4, 1])
def test_memory_stays_bounded_where_steps_are_counted_anew(steps_of_a_text: int) -> None:
    """As by a loop that counts the steps of each text; 8,000 requests, 512 steps of whom are kept."""
    estimator = AcceptanceEstimator()
    for step in range(4000):
        view = view_of([f"r{step}", f"s{step}"], step % steps_of_a_text)
        estimator.update(outcome(view, [2, 2], [1, 1]))
    assert estimator._requests.num_slots <= 2048


def test_absent_requests_are_not_looked_for_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where those who may not be forgotten yet just about fill the room: all of it is looked at each time."""
    estimator, looked = AcceptanceEstimator(), list[int]()
    requests = estimator._requests
    forget = requests._forget_absent
    monkeypatch.setattr(requests, "_forget_absent", lambda: (looked.append(1), forget()))
    for turn in range(500):
        view = view_of([f"{turn}-{row}" for row in range(15)], 8 * turn)
        estimator.update(outcome(view, [1] * 15, [1] * 15))
    assert requests.num_slots <= 2048
    assert len(looked) < 30


def rooms(estimator: AcceptanceEstimator) -> set[int]:
    """Arms that there is room for, wherever a compiled loop looks for them."""
    averages, requests, calibration = (
        estimator._averages,
        estimator._requests,
        estimator._calibration,
    )
    tables = (
        *averages.tables,
        *requests.population,
        calibration.tested,
        calibration.accepted,
        calibration.curve,
        calibration.trust,
        calibration._seen,
        estimator._is_tree,
    )
    by_slot = requests.likelihood, requests.logs, requests.state, requests.counts
    return {*map(len, tables), *[table.shape[1] for table in by_slot]}


def interrupted_at(place: int, estimator: AcceptanceEstimator, told: Observation) -> bool:
    """Learn, and be interrupted at that place; False where there are not so many."""
    with suppress(KeyboardInterrupt), interrupt_at(place) as counted:
        estimator.update(told)
    return counted[0] == place


def test_an_interrupt_leaves_room_for_every_arm_that_is_known() -> None:
    """Compiled loops look beyond an array's end without a word: at every place where Ctrl-C can be seen."""
    for place in count(1):
        told = outcome(view_of("ab", 1, ("new", ARM)), [2, 2], [1, 2], arm="new")
        estimator = AcceptanceEstimator()
        if not interrupted_at(place, estimator, told):
            break
        assert min(rooms(estimator)) > max(estimator._averages.index_of.values()), place
        estimator.update(told)
        estimator.update(outcome(view_of("ab", 2), [2, 2], [1, 2]))
        assert len(rooms(estimator)) == 1, place
        assert np.isfinite(believed(estimator, "a", "new")).all()
    assert place > 20


def test_an_interrupt_leaves_as_much_room_for_requests_everywhere() -> None:
    for place in count(1):
        told = outcome(view_of([f"r{row}" for row in range(70)], 1), [2] * 70, [1] * 70)
        estimator = AcceptanceEstimator()
        taught(estimator, {"a": [0.9] * 8}, 1)
        requests, is_interrupted = estimator._requests, interrupted_at(place, estimator, told)
        by_slot = requests.likelihood, requests.logs, requests.state, requests.counts
        assert {*map(len, by_slot)} == {requests.num_slots}, place
        assert not {*requests._free} & {*requests._slot_of.values()}, place
        if not is_interrupted:
            break
    assert requests.num_slots > 64


def test_a_preempted_request_is_still_known_when_it_returns() -> None:
    estimator = AcceptanceEstimator()
    taught(estimator, {"a": [0.05] * 8, "b": [0.9] * 8}, 40)
    taught(estimator, {"b": [0.9] * 8}, 100, first_step=40)
    assert believed(estimator, "a")[0] < 0.3


def test_belief_is_a_fold_of_observations() -> None:
    first, second = AcceptanceEstimator(), AcceptanceEstimator()
    for estimator in (first, second):
        taught(estimator, {"a": [0.8] * 8, "b": [0.4] * 8}, 30)
    first.survival(view_of(["a", "never seen"]))  # looking changes nothing
    for estimator in (first, second):
        taught(estimator, {"a": [0.8] * 8, "b": [0.4] * 8}, 5, first_step=30, seed=9)
    np.testing.assert_array_equal(believed(first, "a"), believed(second, "a"))


def test_uncertainty_shrinks_with_evidence() -> None:
    estimator = AcceptanceEstimator()
    before = estimator.uncertainty(view_of(["a"]), ARM)[0]
    taught(estimator, {"a": [0.8] * 8}, 30)
    assert estimator.uncertainty(view_of(["a"]), ARM)[0] < 0.5 * before


def test_a_prior_for_an_arm_is_believed_until_it_is_tried() -> None:
    estimator = AcceptanceEstimator(prior={ARM: 0.42})
    assert believed(estimator, "a")[:2] == pytest.approx([0.42, 0.42**2], abs=0.01)


def test_a_model_that_drafts_for_itself_is_trusted_more_before_it_is_tried() -> None:
    estimator = AcceptanceEstimator()
    sparse, small = believed(estimator, "a", "sparse_kv:512"), believed(estimator, "a", ARM)
    assert sparse[0] > small[0]
    taught(estimator, {"a": [0.3] * 8}, 5)
    assert believed(estimator, "new", "sparse_kv:512")[0] == sparse[0]


@pytest.mark.parametrize("number", [0, 2.5, None])
def test_there_must_be_a_draft_token_to_believe_in(number: int) -> None:
    with pytest.raises(ConfigError, match=f"max_draft_tokens is {number}; .* at least 1"):
        AcceptanceEstimator(max_draft_tokens=number)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_a_prior_is_a_rate(rate: float) -> None:
    with pytest.raises(ConfigError, match=f"prior acceptance of '{ARM}' is {rate}; .* above 0"):
        AcceptanceEstimator(prior={ARM: rate})


def test_nodes_that_fall_together_are_no_proof_of_each_other() -> None:
    """The first node of a tree was wrong: that says as much of a request with four nodes as with sixteen."""
    estimator, rng = AcceptanceEstimator(), np.random.default_rng(5)
    for step in range(60):
        paths = [(0, *range(2, 2 + run_of(rng, [0.7] * 8, 8))) for _ in "ab"]
        accepted = [len(path) for path in paths]
        view = view_of(["a", "b"], step)
        estimator.update(outcome(view, [16, 16], accepted, nodes=tuple(paths)))
    before = believed(estimator, "new")[0]
    view = view_of(["few", "many"], 60)
    estimator.update(outcome(view, [4, 16], [0, 0], nodes=((), ())))
    few, many = believed(estimator, "few")[0], believed(estimator, "many")[0]
    assert few < before - 0.02
    assert many == pytest.approx(few, abs=0.02)
