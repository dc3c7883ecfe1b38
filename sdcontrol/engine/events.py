"""What happens to requests, for those who consume tokens and for who watches: a recorder, say.

Knows requests and their events; nothing of steps. A watcher that raises is not told again.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from sdcontrol.engine.request import FinishReason, Request, TokenEvent
from sdcontrol.logs import EventLog

__all__ = ["Events", "RequestWatcher"]

log = EventLog(__name__)


@runtime_checkable
class RequestWatcher(Protocol):
    """A planner that has these two methods is told of requests; any thread may tell it."""

    def request_arrived(
        self,
        request_id: str,
        *,
        prompt: Sequence[int],
        max_new_tokens: int,
        temperature: float,
        seed: int,
    ) -> None:
        """A request was submitted."""
        ...

    def tokens_emitted(
        self, request_id: str, tokens: Sequence[int], finish_reason: FinishReason | None
    ) -> None:
        """A step gave a request tokens, or ended it."""
        ...


class Events:
    """The events of an engine since they were last taken."""

    def __init__(self, planner: object) -> None:
        self._watcher = planner if isinstance(planner, RequestWatcher) else None
        self._events: list[TokenEvent] = []

    def arrived(self, request: Request) -> None:
        """A request was taken in."""
        if self._watcher is None:
            return
        try:
            self._watcher.request_arrived(
                request.id,
                prompt=request.tokens,
                max_new_tokens=request.rules.max_new_tokens,
                temperature=request.temperature,
                seed=request.sampler.seed,
            )
        except Exception as error:
            self._dismiss(error)

    def tell(
        self, request: Request, tokens: tuple[int, ...], reason: FinishReason | None = None
    ) -> None:
        """A request has new tokens, or ended."""
        event = TokenEvent(request.id, tokens, reason)
        told = request.generated_tokens, reason
        # No call stands between these two, and only after one are signals looked for.
        request.told = told
        self._events.append(event)
        if self._watcher is None:
            return
        try:
            self._watcher.tokens_emitted(event.request_id, event.tokens, event.finish_reason)
        except Exception as error:
            self._dismiss(error)

    def take(self) -> list[TokenEvent]:
        """Every event since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _dismiss(self, error: Exception) -> None:
        log.warning("request_watcher_failed", error=repr(error))
        self._watcher = None
