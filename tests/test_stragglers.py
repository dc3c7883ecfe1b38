"""What batches that nothing follows teach of their last requests."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from sdcontrol.core import BatchView, Observation, Plan, RequestView, Timing
from sdcontrol.policies.worth import Worth

ROOM = 1 << 20
NAMES = tuple("abcdefgh")
Speed = Callable[[int, int], int]  # tokens of a request in a step of its batch


def observed(step: int, remaining: Mapping[str, int], emitted: Sequence[int]) -> Observation:
    requests = tuple(RequestView(name, 900, 9, left) for name, left in remaining.items())
    view = BatchView(step, requests, ROOM)
    none = (0,) * len(requests)
    return Observation(view, Plan.off(view), none, none, none, tuple(emitted), Timing({}, 0.01))


def decode(worth: Worth, speed: Speed, batches: int, *, names: Sequence[str] = NAMES) -> None:
    """Whole batches, one after the other, of requests with 240 tokens each."""
    step = 0
    for batch in range(batches):
        remaining = {f"{batch}{name}": 240 for name in names}
        began = step
        while remaining:
            emitted = [speed(NAMES.index(name[-1]), step - began) for name in remaining]
            worth.update(observed(step, remaining, emitted))
            step += 1
            left = zip(remaining, emitted, strict=True)
            remaining = {name: remaining[name] - n for name, n in left if remaining[name] > n}
    worth.update(observed(step, {}, ()))


def known(*speeds: Speed) -> tuple[float, float]:
    """Sharpness, and the share that is kept of eight requests' gain, after three batches at each speed."""
    worth = Worth()
    for speed in speeds:
        decode(worth, speed, 3)
    return worth.stragglers.sharpness, worth.stragglers.kept(len(NAMES))


def of_its_own(r: int, _: int) -> int:
    return 1 + r // 2


def in_turns(r: int, step: int) -> int:
    """Quick at first and slow later, or the other way about: at every look whoever is behind ends first."""
    return 1 + 4 * ((r % 2 == 0) == (step < 40)) + (step % 9 < r)


def test_who_keeps_its_pace_is_known_to_be_the_last() -> None:
    sharpness, _ = known(of_its_own)
    assert sharpness == 5.0


def test_who_was_slow_so_far_is_not_said_to_be_the_last_where_paces_turn() -> None:
    sharpness, _ = known(of_its_own, in_turns)
    assert sharpness == 1.0


def test_the_last_one_keeps_less_of_a_gain_where_it_gained_less() -> None:
    """By half of what it was behind, and by more among more; all of it before anything is known."""
    assert Worth().stragglers.kept(8) == 1.0
    worth = Worth()
    decode(worth, of_its_own, 3)
    kept = worth.stragglers.kept
    assert kept(1) == 1.0 > kept(2) > kept(8) > kept(256) >= 0.5
    _, of_alike = known(lambda r, step: 1 + step % 2)
    assert of_alike == 1.0


def test_a_name_that_is_used_again_begins_another_batch() -> None:
    worth = Worth()
    for _ in range(3):
        step, remaining = 0, dict.fromkeys(NAMES, 240)
        while remaining:
            emitted = [of_its_own(NAMES.index(name), 0) for name in remaining]
            worth.update(observed(step, remaining, emitted))
            step += 1
            left = {name: remaining[name] - n for name, n in zip(remaining, emitted, strict=True)}
            remaining = {name: n for name, n in left.items() if n > 0}
    assert worth.stragglers.sharpness == 5.0


@pytest.mark.parametrize("batches", [1, 40])
def test_batches_whose_places_are_taken_teach_nothing_and_leave_nothing(batches: int) -> None:
    worth = Worth()
    before = worth.stragglers.sharpness, worth.stragglers.kept(8)
    remaining = {f"first{r}": 40 + 9 * r for r in range(8)}
    for step in range(100 * batches):
        emitted = [1 + r % 3 for r in range(len(remaining))]
        worth.update(observed(step, remaining, emitted))
        left = {name: remaining[name] - n for name, n in zip(remaining, emitted, strict=True)}
        remaining = {name: n for name, n in left.items() if n > 0}
        while len(remaining) < 8:
            remaining[f"{step}-{len(remaining)}"] = 60
    assert (worth.stragglers.sharpness, worth.stragglers.kept(8)) == before
    assert len(worth.stragglers._ended) <= 8
