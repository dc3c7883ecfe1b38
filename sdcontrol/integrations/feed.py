"""One engine, several consumers: whoever needs tokens steps it, and everybody gets their own.

Knows engines and their events; nothing of text, prompts or `generate`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from sdcontrol.core import Observation
from sdcontrol.engine.blame import blamed
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import TokenEvent
from sdcontrol.engine.stats import DrafterStats
from sdcontrol.errors import SdcontrolError

if TYPE_CHECKING:
    from sdcontrol.traces.warm_start import WarmStart

__all__ = ["Consumer", "Feed"]


class Feed:
    """Hands every event of an engine to the consumer of its request; safe across threads.

    Requests that nobody registered here go without: their events are dropped. `warm_start` notes every step.
    """

    def __init__(self, engine: Engine, warm_start: "WarmStart | None" = None) -> None:
        self._engine = engine
        self._warm_start = warm_start
        self._lock = threading.Lock()
        self._owners: dict[str, Consumer] = {}  # of requests whose end was not told
        self._events: deque[TokenEvent] = deque()  # on their way

    def add(self, consumer: "Consumer", submit: Callable[[], str]) -> str:
        """Submit a request on behalf of a consumer; returns its id."""
        requests = self._engine.requests
        with self._lock:
            before = len(requests)
            try:
                request_id = submit()
            except (KeyboardInterrupt, SystemExit):
                if len(requests) > before:  # it came in, and nobody knows of it
                    self._engine.cancel([*requests][-1])
                raise
            self._owners[request_id] = consumer
        return request_id

    def step_for(self, consumer: "Consumer") -> None:
        """One step, unless another thread's brought this consumer events meanwhile.

        Raises `EngineClosed`, `SdcontrolError` where its requests are gone and their events with them, and what
        a step raised, unless that was another consumer's fault: then that one is told, and its requests end.
        """
        with self._lock:
            self._deliver()  # what a step that failed has left
            if consumer.events:
                return
            if consumer.error is not None:
                raise consumer.error
            if not (self._engine.has_work or self._engine.is_closed):
                raise SdcontrolError(
                    f"requests {sorted(consumer.live)} ended without their events arriving; while "
                    "a decoder runs, leave step, run and take_events of its engine to it"
                )
            try:
                observation = self._engine.step()
            except Exception as error:
                if not self._hand_over(error, consumer):
                    raise
                return
            if self._warm_start is not None:
                self._warm_start.note(observation)
            self._count(observation)
            self._deliver()

    def _hand_over(self, error: Exception, consumer: "Consumer") -> bool:
        """Give an error to whose fault it is; False where that is this consumer, or nobody known."""
        who, live = blamed(error), [*self._engine.requests.values()]
        names = [request.id for request in live if who in (request, request.sampler)]
        guilty = self._owners.get(names[0]) if names else None
        if guilty is None or guilty is consumer:
            return False
        guilty.error = error
        self.leave(guilty)
        return True

    def leave(self, consumer: "Consumer") -> None:
        """Cancel what of a consumer still runs, and forget it."""
        for request_id in consumer.live:
            # Else it has ended, and the name may be another's now.
            if self._owners.get(request_id) is consumer:
                self._owners.pop(request_id, None)
                self._engine.cancel(request_id)

    def _deliver(self) -> None:
        """Every event to whose it is. Whoever is interrupted here is followed by another who goes on."""
        self._events.extend(self._engine.take_events())
        while self._events:
            event = self._events[0]
            owner = self._owners.get(event.request_id)  # it may leave at any time
            if owner is not None:
                owner.take(event)
            self._events.popleft()
            if event.finish_reason is not None:
                self._owners.pop(event.request_id, None)

    def _count(self, observation: Observation) -> None:
        for row, request in enumerate(observation.view.requests):
            choice, owner = observation.plan.choices[row], self._owners.get(request.id)
            if choice.drafter is None or owner is None:
                continue
            stats = owner.drafters[request.id].setdefault(choice.drafter, DrafterStats())
            stats.steps += observation.proposed[row] > 0
            stats.drafted += observation.drafted[row]
            stats.proposed += observation.proposed[row]
            stats.accepted += observation.accepted[row]


class Consumer:
    """The requests of one caller: iterate over their events until all have ended."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.events: deque[TokenEvent] = deque()
        self.error: Exception | None = None  # of its own, which another's step met with
        self._latest: TokenEvent | None = None
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

    def take(self, event: TokenEvent) -> None:
        """Keep an event until it is asked for; once, also where it is given twice in a row."""
        if event is not self._latest:
            self._latest = event
            self.events.append(event)

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
