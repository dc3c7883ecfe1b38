"""One engine, several consumers: whoever needs tokens steps it, and everybody gets their own.

Knows engines and their events; nothing of text, prompts or `generate`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from sdcontrol.core import Observation
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import TokenEvent
from sdcontrol.engine.stats import DrafterStats
from sdcontrol.errors import SdcontrolError

__all__ = ["Consumer", "Feed"]


class Feed:
    """Hands every event of an engine to the consumer of its request; safe across threads.

    Requests that nobody registered here go without: their events are dropped.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._owners: dict[str, Consumer] = {}

    def add(self, consumer: "Consumer", submit: Callable[[], str]) -> str:
        """Submit a request on behalf of a consumer; returns its id."""
        with self._lock:
            request_id = submit()
            self._owners[request_id] = consumer
        return request_id

    def step_for(self, consumer: "Consumer") -> None:
        """One step, unless another thread's brought this consumer events meanwhile.

        Raises `SdcontrolError` where its requests are gone and their events with them.
        """
        with self._lock:
            if consumer.events:
                return
            if not self._engine.has_work:
                raise SdcontrolError(
                    f"requests {sorted(consumer.live)} ended without their events arriving; while "
                    "a decoder runs, leave step, run and take_events of its engine to it"
                )
            self._count(self._engine.step())
            for event in self._engine.take_events():
                owner = self._owners.get(event.request_id)  # it may leave at any time
                if owner is not None:
                    owner.events.append(event)

    def leave(self, consumer: "Consumer") -> None:
        """Cancel what of a consumer still runs, and forget it."""
        for request_id in consumer.drafters:
            self._owners.pop(request_id, None)
        for request_id in consumer.live:
            self._engine.cancel(request_id)

    def _count(self, observation: Observation) -> None:
        for row, request in enumerate(observation.view.requests):
            choice, owner = observation.plan.choices[row], self._owners.get(request.id)
            if choice.drafter is None or owner is None:
                continue
            stats = owner.drafters[request.id].setdefault(choice.drafter, DrafterStats())
            stats.steps += 1
            stats.drafted += observation.drafted[row]
            stats.proposed += observation.proposed[row]
            stats.accepted += observation.accepted[row]


class Consumer:
    """The requests of one caller: iterate over their events until all have ended."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.events: deque[TokenEvent] = deque()
        self.live: set[str] = set()
        self.drafters: dict[str, dict[str, DrafterStats]] = {}  # by request, then by arm

    def add(self, submit: Callable[[], str]) -> str:
        """Submit a request whose events come here; returns its id."""

        def submit_and_register() -> str:
            request_id = submit()
            self.live.add(request_id)
            self.drafters[request_id] = {}
            return request_id

        return self._feed.add(self, submit_and_register)

    def drafts_of(self, request_id: str) -> Mapping[str, DrafterStats]:
        """What every drafter did for a request so far, by arm."""
        return self.drafters[request_id]

    def __iter__(self) -> Iterator[TokenEvent]:
        while self.live:
            if not self.events:
                self._feed.step_for(self)
            while self.events:
                event = self.events.popleft()
                if event.finish_reason is not None:
                    self.live.discard(event.request_id)
                yield event

    def close(self) -> None:
        """Cancel what still runs."""
        self._feed.leave(self)
