"""Plans of problems in which prices change while they are sought, and of some that have no best plan."""

import numpy as np
import pytest

from sdcontrol.core import FloatArray
from sdcontrol.errors import PlanError
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.problem import Problem
from tests.plan_instances import multi_start


def problem(
    gain: FloatArray, verify: FloatArray, rounds: FloatArray, reading: FloatArray
) -> Problem:
    """Of three families of one arm each; whoever gains nothing by one may not use it."""
    arms, requests, lengths = gain.shape
    usable = np.where(gain[:, :, 1] > 0.0, lengths - 1, 0)
    return Problem(
        ("sparse_kv:512", "draft_model", "ngram"),
        gain,
        usable,
        np.arange(arms),
        verify,
        np.vstack([rounds, np.zeros(requests + 2)]),
        reading,
        np.zeros((arms, requests)),
        np.zeros(arms + 1, dtype=np.int64),
    )


THREE = problem(
    np.array(
        [
            [[0, 0.964, 1.894, 2.791, 3.655], [0, 0, 0, 0, 0], [0, 0.483, 0.717, 0.83, 0.885]],
            [[0, 0.313, 0.41, 0.441, 0.45], [0, 0, 0, 0, 0], [0, 0.662, 1.1, 1.39, 1.582]],
            [[0, 0, 0, 0, 0], [0, 0.827, 1.512, 2.078, 2.547], [0, 0, 0, 0, 0]],
        ]
    ),
    np.array([0.315, *np.linspace(0.315, 1.606, 12)]),
    np.array([[0, 0.531, 0.531, 0.531, 0.531], [0, 0.018, 0.018, 0.018, 0.018], [0] * 5]),
    np.zeros((3, 3)),
)
TWO = problem(
    np.array(
        [
            [[0, 0.457, 0.457, 0.457, 0.457], [0, 0.67, 0.863, 1.023, 1.113]],
            [[0, 0.721, 0.721, 0.721, 0.721], [0, 0.744, 1.48, 1.708, 1.783]],
            [[0, 0.704, 0.704, 0.704, 0.704], [0, 0.807, 1.184, 1.327, 1.413]],
        ]
    ),
    np.linspace(0.493, 0.578, 6),
    np.array([[0, 2.127, 2.632, 2.127], [0, 0.267, 0.525, 0.267], [0, 0.221, 0.221, 0.221]]),
    np.array([[0.357, -0.357], [0.182, -0.182], [0.0, 0.0]]),
)


STAIRS = problem(
    np.array(
        [
            [
                [0, 0.97, 1.75, 1.96, 1.98],
                [0, 0.29, 0.52, 0.71, 0.87],
                [0, 0.99, 1.74, 2.1, 2.14],
                [0, 0.86, 1.56, 1.57, 1.58],
                [0, 0.91, 1.44, 1.65, 1.71],
            ],
            [
                [0, 0.81, 1.04, 1.11, 1.13],
                [0, 0.47, 0.65, 0.77, 0.8],
                [0, 0.44, 0.75, 0.97, 1.04],
                [0, 0.76, 1.51, 2.17, 2.76],
                [0, 0, 0, 0, 0],
            ],
            [[0] * 5] * 5,
        ]
    ),
    np.array([2.54, *[2.68] * 7, *[4.89] * 8, *[7.1] * 5]),
    np.array([[0, *[0.18] * 3, *[0.22] * 3], [0, *[0.01] * 6], [0] * 7]),
    np.zeros((3, 5)),
)


def test_a_round_is_left_by_all_who_share_it() -> None:
    """Three requests with two tokens each, where one each would do and leave a fourth as many as it likes.

    Whoever goes first pays for the round as before, and none of two may go alone.
    """
    assert maximise(STAIRS).length.tolist() == [1, 0, 1, 4, 1]


@pytest.mark.parametrize("hard", [THREE, TWO], ids=["three", "two"])
def test_a_plan_that_was_found_is_not_lost_when_its_rate_becomes_the_price(hard: Problem) -> None:
    """What rounds cost whoever joins or leaves them was kept at the price before."""
    found = multi_start(hard, np.random.default_rng(0))
    assert maximise(hard).rate > 0.999 * found


@pytest.mark.parametrize("seconds", [0.0, 1e-320])
@pytest.mark.parametrize("requests", [1, 2])
def test_steps_that_take_no_time_have_no_best_plan(seconds: float, requests: int) -> None:
    free = problem(
        np.array([[[0.0, 0.5, 0.75]] * requests] * 3),
        np.full(2 * requests + 1, seconds),
        np.zeros((3, requests + 2)),
        np.zeros((3, requests)),
    )
    with pytest.raises(PlanError, match="takes no time"):
        maximise(free)
