"""What each part of the host's work takes in a step, by the host's clock: for the one turn that is watched.

Knows which calls a step of the engine consists of; nothing of what they do. Watching takes time itself, so
turns that are timed are not watched.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from sdcontrol.engine.batch import Batch
from sdcontrol.engine.drafting import Drafting
from sdcontrol.engine.graphs import GraphedForwards
from sdcontrol.engine.guard import PlannerGuard
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.static_inputs import StaticInputs
from sdcontrol.engine.walk import Asked

__all__ = ["HostParts", "watched"]

_ASKING, _WAITING = "ask for verdicts", "wait for verdicts"
_CALLS: tuple[tuple[type, str, str], ...] = (
    (Engine, "_commit", "commit"),
    (Drafting, "commit", "commit: drafters"),
    (Engine, "_next_batch", "schedule"),
    (Batch, "view", "view"),
    (Drafting, "offers", "view: offers"),
    (PlannerGuard, "plan", "plan"),
    (Engine, "_propose", "draft"),
    (Batch, "segments", "segments"),
    (ModelRunner, "forward", "forward"),
    (StaticInputs, "load", "forward: inputs"),
    (GraphedForwards, "replay", "forward: launch"),
    (Engine, "_ask", _ASKING),
    (Engine, "_shadows", "shadow drafts"),
    (PlannerGuard, "observe", "observe"),
)
"""Class, method, and what it is called here; what begins with another's name is part of that."""

_P, _T = ParamSpec("_P"), TypeVar("_T")

HostParts = dict[str, float]
"""Microseconds of a step, by part: the median over steps, all calls of a step together."""


class _Watch:
    """The calls of one turn, by step."""

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)

    def timing(self, call: Callable[_P, _T], part: str) -> Callable[_P, _T]:
        """`call`, whose seconds are counted."""

        @wraps(call)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._now[part] += time.perf_counter() - started

        return timed

    def asking(self, ask: Callable[_P, Asked]) -> Callable[_P, Asked]:
        """`ask`, which hands out a wait that is counted apart."""
        timed = self.timing(ask, _ASKING)

        @wraps(ask)
        def asked(*args: _P.args, **kwargs: _P.kwargs) -> Asked:
            found = timed(*args, **kwargs)
            return found._replace(read=self.timing(found.read, _WAITING))

        return asked

    def ending(self, step: Callable[_P, _T]) -> Callable[_P, _T]:
        """`step`, after which another begins."""

        @wraps(step)
        def ended(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            found = step(*args, **kwargs)
            self._steps.append(dict(self._now))
            self._now.clear()
            return found

        return ended

    def parts(self) -> HostParts:
        """Of the parts that were called at all."""
        names = [part for _, _, part in _CALLS]
        names.insert(names.index(_ASKING) + 1, _WAITING)
        return {
            part: round(1e6 * statistics.median(step.get(part, 0.0) for step in self._steps), 1)
            for part in names
            if any(part in step for step in self._steps)
        }


@contextmanager
def watched(parts: HostParts) -> Iterator[None]:
    """Watch the engines' steps inside the block; fills `parts` at its end."""
    watch = _Watch()
    with ExitStack() as undone:
        for kind, name, part in _CALLS:
            call = getattr(kind, name)
            timed = watch.asking(call) if part == _ASKING else watch.timing(call, part)
            undone.enter_context(patch.object(kind, name, timed))
        undone.enter_context(patch.object(Engine, "step", watch.ending(Engine.step)))
        yield
    parts.update(watch.parts())
