"""When the controller's own time weighs: not by how a run begins, nor by a step that waited."""

import pytest

from sdcontrol.controller_share import ControllerShare
from tests.test_waiting import seen_of


def after(*parts: tuple[int, float]) -> ControllerShare:
    """Of so many steps with such a share each, one part after the other."""
    share = ControllerShare()
    for steps, taken in parts:
        for step in range(steps):
            share.update(seen_of(step, share=taken).observation)
    return share


@pytest.mark.parametrize(
    ("parts", "weighs"),
    [
        pytest.param([(60, 0.03)], True, id="a lot"),
        pytest.param([(60, 0.015)], False, id="not much"),
        pytest.param([(10, 0.3), (60, 0.014)], False, id="a lot at first"),
        pytest.param([(60, 0.014), (1, 1.0), (1, 0.014)], False, id="a step that waited"),
        pytest.param([(60, 0.03), (60, 0.015)], True, id="less, since work is put off"),
        pytest.param([(60, 0.03), (60, 0.009)], False, id="little, though work is put off"),
        pytest.param([(60, 0.03), (60, float("nan"))], True, id="no number"),
    ],
)
def test_whether_it_weighs(parts: list[tuple[int, float]], weighs: bool) -> None:
    assert after(*parts).weighs is weighs
