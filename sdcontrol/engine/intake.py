"""The live requests of an engine, and the door through which other threads come in.

Knows requests and what can never fit; nothing of steps.
"""

import threading
from collections.abc import Callable

from sdcontrol.engine.request import Request
from sdcontrol.errors import RequestRefused

__all__ = ["Intake"]


class Intake:
    """Requests from submission to their end. `add` and `cancel` may be called from any thread."""

    def __init__(
        self, *, capacity_tokens: int, position_limit: int | None, vocab_size: int
    ) -> None:
        self.live: dict[str, Request] = {}
        self._capacity_tokens = capacity_tokens
        self._position_limit = position_limit
        self._vocab_size = vocab_size
        self._arrivals: list[Request] = []
        self._cancels: list[Request] = []
        self._num_named = 0
        self._lock = threading.RLock()  # a stream that is collected amid `add` cancels

    def add(
        self,
        make: Callable[[str], Request],
        request_id: str | None,
        arrived: Callable[[Request], None],
    ) -> str:
        """Take the request that `make` makes for its id, and say so to `arrived` before any step.

        Raises `RequestRefused`.
        """
        with self._lock:
            if not isinstance(request_id, str | None):
                raise RequestRefused(
                    f"request id {request_id!r}; give a string, None for a fresh one"
                )
            request = make(self._fresh_name() if request_id is None else request_id)
            if request.id in self.live:
                raise RequestRefused(f"request id {request.id!r} is taken; choose another")
            self._check_fits(request)
            arrived(request)
            self.live[request.id] = request
            self._arrivals.append(request)
        return request.id

    def cancel(self, request_id: str) -> bool:
        """Ask for a request's end; False where no such request is live."""
        with self._lock:
            request = self.live.get(request_id)
            if request is not None:
                request.is_cancelled = True
                self._cancels.append(request)
            return request is not None

    @property
    def has_news(self) -> bool:
        """Whether anything arrived or is to be cancelled since `take`."""
        return bool(self._arrivals or self._cancels)

    def take(self) -> tuple[list[Request], list[Request]]:
        """What arrived and what is to be cancelled since the last call."""
        with self._lock:
            taken = self._arrivals, self._cancels
            self._arrivals, self._cancels = [], []
        return taken

    def start_again(self) -> None:
        """Whoever has not been told its end arrives again, and what was cancelled is cancelled again."""
        with self._lock:
            for request in list(self.live.values()):
                request.start_again()
                if request.finish_reason is not None:
                    del self.live[request.id]
            self._arrivals = list(self.live.values())
            self._cancels = [request for request in self._arrivals if request.is_cancelled]

    def remove(self, request: Request) -> None:
        """The request ended: its id is free again."""
        with self._lock:
            del self.live[request.id]

    def _fresh_name(self) -> str:
        """One that nobody chose for a live request."""
        while (name := f"request-{self._num_named}") in self.live:
            self._num_named += 1
        self._num_named += 1
        return name

    def _check_fits(self, request: Request) -> None:
        name, most = f"request {request.id!r}", request.scheduled.max_tokens
        if not request.tokens:
            raise RequestRefused(f"{name}: empty prompt; give at least 1 token")
        if most > self._capacity_tokens:
            raise RequestRefused(
                f"{name} may grow to {most} tokens, the KV cache holds {self._capacity_tokens}; "
                "shorten it or raise kv_tokens"
            )
        if self._position_limit is not None and most > self._position_limit:
            raise RequestRefused(
                f"{name} may grow to {most} tokens; this model's positions can be batched only to "
                f"{self._position_limit}, where its table or original rope ends; shorten it"
            )
        low, high = min(request.tokens), max(request.tokens)
        if low < 0 or high >= self._vocab_size:
            raise RequestRefused(
                f"{name}: token {low if low < 0 else high} is outside [0, {self._vocab_size}); "
                "tokenize with the model's own tokenizer"
            )
