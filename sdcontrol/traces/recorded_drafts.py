"""The confidences of the drafts that were made in a recording, for replays that make them again.

An acceptance table has the confidences along the text. A draft goes on beyond its first wrong token,
where only the drafter itself could say how sure it was:

    text            a    b    c    d
    draft           a    x    y         accepted 1
    table          .9   .4   .7         in a, b, c
    as recorded    .9   .4   .2         in a, x, y

A draft depends on the tokens before it alone, so what was recorded at a position holds for every
replay that drafts there with the same arm. Knows traces; nothing of simulations.
"""

from array import array
from collections.abc import Mapping

from sdcontrol.outcomes import DraftConfidence
from sdcontrol.traces.parts import reading
from sdcontrol.traces.reader import Trace

__all__ = ["RecordedDrafts"]

_COLUMNS = ("request_id", "generated_tokens", "choice_drafter", "confidence")


class RecordedDrafts:
    """All drafts of a trace: some 24 bytes each, and 8 a token. Raises `TraceError`."""

    def __init__(self, trace: Trace) -> None:
        self._arms: dict[str, int] = {}
        self._places: dict[str, array[int]] = {}  # by request: position, arm, tokens; repeated
        self._values: dict[str, array[float]] = {}
        for table in trace.step_tables(_COLUMNS):
            with reading(trace.path / "steps.parquet"):
                for step in table.to_pylist():
                    self._add(step)

    def of(self, request_id: str) -> DraftConfidence:
        """The drafts that were made for one request."""
        found: dict[str, dict[int, tuple[float, ...]]] = {}
        places, values = self._places.get(request_id), self._values.get(request_id)
        if places is None or values is None:
            return found
        names, start = [*self._arms], 0
        for position, arm, num_tokens in zip(*[iter(places)] * 3, strict=True):
            tokens = tuple(values[start : start + num_tokens])
            found.setdefault(names[arm], {})[position] = tokens
            start += num_tokens
        return found

    def _add(self, step: Mapping[str, object]) -> None:
        if step["confidence"] is None:
            return
        for name, position, arm, tokens in zip(*(step[column] for column in _COLUMNS), strict=True):
            if arm is not None and tokens:
                number = self._arms.setdefault(arm, len(self._arms))
                self._places.setdefault(name, array("q")).extend((position, number, len(tokens)))
                self._values.setdefault(name, array("d")).extend(tokens)
