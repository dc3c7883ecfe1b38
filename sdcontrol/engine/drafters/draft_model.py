"""Draft with a smaller model of the same vocabulary.

Its cache lies in the engine's blocks, in tensors of its own, and may lag: while it is not chosen
it computes nothing, and it catches up in its first round when it is chosen again.

    committed tokens   0 ............ cached ....... L-1
                       in its cache   to catch up    last: gives the first draft token
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from transformers import PreTrainedModel

from sdcontrol.core import Hint
from sdcontrol.engine.drafters.base import Draft, DraftRequest, DraftTask, KeepDrafting
from sdcontrol.engine.drafters.host import CATCH_UP_TOKENS, DraftHost, ModelDrafter
from sdcontrol.engine.drafters.rounds import RoundModel, draft_in_rounds
from sdcontrol.engine.model_checks import most_tokens
from sdcontrol.engine.packing import Segment
from sdcontrol.engine.request import Request
from sdcontrol.engine.runner import ModelRunner, unwrap
from sdcontrol.errors import ConfigError

__all__ = ["DraftModelDrafter"]

_MOST_OFFERS = 4096  # kept
_LEAST_SHARED_VOCABULARY = 0.9


class DraftModelDrafter(ModelDrafter):
    """A causal language model as drafter, under the arm `name`.

    Raises `UnsupportedModel` for what the attention path cannot honour, `ConfigError` where the
    vocabularies cannot be the same.
    """

    def __init__(self, model: object, *, name: str = "draft_model") -> None:
        self.name = name
        self.model: PreTrainedModel = unwrap(model)
        self._offer_of: dict[int, Mapping[str, Hint]] = {}  # by lag
        self._cached: dict[str, int] = {}  # tokens in our cache; absent: ask the blocks
        self._written: dict[str, int] = {}  # this step's drafts in our cache
        self._strangers: set[str] = set()  # requests with tokens that our model does not have

    def attach(self, host: DraftHost) -> None:
        """Join an engine on the same device, with a vocabulary that differs in padding only."""
        runner = ModelRunner(self.model, host.config.attention_backend)
        ours, theirs = runner.vocab_size, host.target.vocab_size
        if min(ours, theirs) < _LEAST_SHARED_VOCABULARY * max(ours, theirs):
            raise ConfigError(
                f"draft model {self.name!r} has {ours} tokens, the target {theirs}; "
                "use a draft model with the target's tokenizer"
            )
        if runner.device != host.target.device:
            raise ConfigError(
                f"draft model {self.name!r} is on {runner.device}, the target on "
                f"{host.target.device}; move it there"
            )
        self._runner = runner
        self._vocab_size = theirs
        self._position_limit = most_tokens(self.model)
        self._host = host
        host.runners[self.name] = runner

    def start(self, request: DraftRequest) -> None:
        """Note whether our model knows every token of the prompt."""
        self._check_tokens(request, request.tokens)

    def arms_for(self, request: DraftRequest) -> tuple[str, ...]:
        """Our one arm, where our model knows all tokens and positions."""
        limit = self._position_limit
        if request.id in self._strangers or (limit and len(request.tokens) + 64 > limit):
            return ()
        return self.arms

    def hint(self, request: DraftRequest, arm: str) -> Hint:
        """How far our cache lags."""
        assert isinstance(request, Request)
        lag = len(request.tokens) - 1 - self._cached_tokens(request)
        return Hint(catch_up_tokens=max(lag, 0))

    def offers(self, requests: Sequence[DraftRequest]) -> Sequence[Mapping[str, Hint | None]]:
        """As `hint` says; the same lag is the same object."""
        if self._strangers or self._position_limit:
            return super().offers(requests)
        return [self._offer(len(r.tokens) - 1 - self._cached_tokens(r)) for r in requests]  # type: ignore[arg-type]  # the engine's own requests

    def _offer(self, lag: int) -> Mapping[str, Hint]:
        known = self._offer_of.get(lag)
        if known is None:
            if len(self._offer_of) >= _MOST_OFFERS:
                self._offer_of.clear()
            hint = Hint(catch_up_tokens=max(lag, 0))
            known = self._offer_of[lag] = MappingProxyType({self.name: hint})
        return known

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> list[Draft]:
        """Chains, one forward a round for all requests."""
        self._catch_up([request for task in tasks if isinstance(request := task.request, Request)])
        model = RoundModel(self._runner, self._segment, self._host.verification, self._vocab_size)
        drafts = draft_in_rounds(tasks, keep_drafting, model)
        for task, draft in zip(tasks, drafts, strict=True):
            self._written[task.request.id] = len(draft.tokens) - 1  # the last one was not fed
        return drafts

    def commit(self, request: DraftRequest, num_new_tokens: int) -> None:
        """Our cache stands as far as what we fed was accepted."""
        assert isinstance(request, Request)
        before = len(request.tokens) - num_new_tokens
        self._check_tokens(request, request.tokens[before:])
        written = self._written.pop(request.id, None)
        if written is not None:
            self._set_cached(request, before + min(written, num_new_tokens - 1))

    def commit_all(self, committed: Sequence[tuple[DraftRequest, int]]) -> None:
        """See `commit`: where we fed nothing and know every token, it changes nothing."""
        if self._written or self._runner.vocab_size < self._vocab_size:
            super().commit_all(committed)

    def lose_cache(self, request: DraftRequest) -> None:
        """What blocks the request gets next, and what we know of them, is open."""
        self._cached.pop(request.id, None)
        self._written.pop(request.id, None)

    def finish(self, request: DraftRequest) -> None:
        """Forget the request."""
        self.lose_cache(request)
        self._strangers.discard(request.id)

    def _check_tokens(self, request: DraftRequest, tokens: Sequence[int]) -> None:
        if self._runner.vocab_size < self._vocab_size and max(tokens) >= self._runner.vocab_size:
            self._strangers.add(request.id)

    def _cached_tokens(self, request: Request) -> int:
        """Tokens in our cache: those of the leading blocks that we have filled for anybody."""
        known = self._cached.get(request.id)
        if known is not None:
            return known
        pool = self._host.blocks
        table = request.scheduled.table
        full = request.scheduled.cached_tokens // pool.block_size
        count = 0
        while count < full and pool.is_marked(table.blocks[count], self.name):
            count += 1
        self._cached[request.id] = count * pool.block_size
        return self._cached[request.id]

    def _set_cached(self, request: Request, num_tokens: int) -> None:
        """Blocks that we have filled with committed tokens are marked for whoever shares them."""
        pool = self._host.blocks
        first = self._cached.get(request.id, 0) // pool.block_size
        for block in request.scheduled.table.blocks[first : num_tokens // pool.block_size]:
            pool.mark(block, self.name)
        self._cached[request.id] = num_tokens

    def _segment(self, request: Request, drafted: Sequence[int]) -> Segment:
        length = len(request.tokens)
        start = length - 1 + len(drafted) if drafted else self._cached_tokens(request)
        tokens = drafted[-1:] if drafted else request.tokens[start:]
        return self._piece(request, start, list(tokens), num_logits=1)

    def _piece(
        self, request: Request, start: int, tokens: list[int], *, num_logits: int
    ) -> Segment:
        block_size = self._host.config.block_size
        return Segment(
            tokens=tokens,
            start=start,
            table=request.page_table(block_size),
            slots=request.slots(start, len(tokens), block_size),
            num_logits=num_logits,
        )

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Compute what lags, but for one forward's worth, which comes with the first round."""
        lags = [len(request.tokens) - self._cached_tokens(request) for request in requests]
        for forward in _computed_ahead(lags):
            pieces: list[Segment] = []
            for row, count in forward:
                start = self._cached_tokens(requests[row])
                tokens = requests[row].tokens[start : start + count]
                pieces.append(self._piece(requests[row], start, tokens, num_logits=0))
            self._runner.forward(pieces)
            for piece, (row, _) in zip(pieces, forward, strict=True):
                self._set_cached(requests[row], piece.start + len(piece.tokens))


def _computed_ahead(lags: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """By forward, who computes how many tokens, so that `CATCH_UP_TOKENS` remain, or one for each."""
    ahead, room = sum(lags) - CATCH_UP_TOKENS, CATCH_UP_TOKENS
    forward: list[tuple[int, int]] = []
    for row, lag in enumerate(lags):
        left = min(lag - 1, ahead)
        while left > 0:
            count = min(left, room)
            forward.append((row, count))
            left, ahead, room = left - count, ahead - count, room - count
            if not room:
                yield forward
                forward, room = [], CATCH_UP_TOKENS
    if forward:
        yield forward
