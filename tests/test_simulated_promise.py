"""Part 6 of the GPU benchmark, simulated: what goes wrong there is seen before a GPU is at hand.

Seeds are fixed, so a failure is a change of decisions. The whole grid is `benchmarks.simulated_promise`.
"""

import pytest

from benchmarks.simulated_promise import measure


@pytest.mark.parametrize(
    ("batch", "context", "mix", "to_best", "to_none"),
    [
        (256, 512, "0.9", 0.98, 0.98),  # drafts would pay, if nobody had to wait for the host
        (64, 512, "0.7", 0.98, 0.98),
        (64, 512, "0.9", 0.97, 1.15),  # a first, lone try of the draft model says too little of it
        (16, 4096, "0.5", 0.97, 0.98),  # every arm is near the price of no speculation
        (64, 4096, "0.9", 0.95, 1.3),
        (16, 4096, "0.9", 0.97, 1.6),
        (16, 32768, "mixed", 0.98, 1.7),  # reading KV is what takes the time: sparse_kv
    ],
)
def test_a_gpu_that_hides_its_host_is_used_as_well_as_by_any_fixed_setting(
    batch: int, context: int, mix: str, to_best: float, to_none: float
) -> None:
    found = measure(batch, context, mix)
    assert float(str(found["whole_of_best_fixed"])) > to_best
    assert float(str(found["whole_of_none"])) > to_none
    assert float(str(found["of_none"])) > 0.98
    assert float(str(found["whole_of_rival"])) > 0.95
