"""The promise, simulated: no fixed setting would have been much faster, from the first step on.

Seeds are fixed, so a failure is a change of decisions. The whole grid is `benchmarks.simulated_regret`.
"""

import pytest

from benchmarks.simulated_regret import measure


@pytest.mark.parametrize(
    ("machine", "batch", "kind"),
    [
        ("large", 1, "copy"),  # memory-bound: long drafts pay
        ("large", 4, "free"),
        ("large", 16, "free"),  # compute-bound: nothing pays
        ("large", 16, "mixed"),  # compute-bound, and yet some requests' drafts pay
        ("small", 4, "code"),
        ("gpu", 4, "free"),
        ("gpu", 16, "mixed"),
    ],
)
def test_no_fixed_setting_is_much_faster_learning_included(
    machine: str, batch: int, kind: str
) -> None:
    found = measure(machine, batch, kind, seed=0)
    assert float(str(found["goodput_over_best_fixed"])) > 0.96
    assert float(str(found["goodput_over_off"])) > 0.97
