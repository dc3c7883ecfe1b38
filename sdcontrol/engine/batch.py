"""One step's batch: what the planner sees, what the model computes, what the requests keep.

Knows requests, drafts and verdicts; nothing of policies, models or time.

    tokens of one request     cached | last | draft ...
    positions                 0 .. L-2  L-1   L ..          L = tokens committed so far
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from sdcontrol.core import BatchView, Choice, Observation, Plan, RequestView, Timing
from sdcontrol.engine.drafters.base import Draft
from sdcontrol.engine.drafters.vetting import Offer
from sdcontrol.engine.drafting import NO_DRAFT, NO_OFFER, Drafting, Drafts
from sdcontrol.engine.packing import Segment
from sdcontrol.engine.request import Request
from sdcontrol.engine.verify import Verdict, VerifyTask
from sdcontrol.scheduling.scheduler import ScheduledBatch, ScheduledRequest

__all__ = ["Batch", "Moves", "Piece"]

Moves = list[tuple[Request, list[int], list[int]]]
"""Per request, positions whose contents move to other positions."""


@dataclass(slots=True)
class Piece:
    """One request's part of a step."""

    request: Request
    num_new_tokens: int  # computed in this step, drafts aside
    completes: bool  # whether its last logits give a token
    draft: Draft = NO_DRAFT
    arm: str = ""
    emitted: int = 0  # tokens that the request took of this step
    is_ahead: bool = False  # its token is the last step's, which the host does not know yet

    def segment(self, block_size: int) -> Segment:
        """The piece as the model computes it."""
        request, draft = self.request, self.draft
        start = request.scheduled.cached_tokens
        tokens = [0] if self.is_ahead else request.tokens[start : start + self.num_new_tokens]
        tokens.extend(draft.tokens)
        return Segment(
            tokens,
            start,
            request.page_table(block_size),
            request.slots(start, len(tokens), block_size),
            1 + len(draft.tokens) if self.completes else 0,
            draft.parents if draft.parents and not draft.is_chain else None,
        )


class Batch:
    """The pieces of one step, those that decode first.

    `is_ahead` of a step that begins before the last one's tokens are known, one for each request.
    """

    def __init__(
        self, scheduled: ScheduledBatch, live: Mapping[str, Request], *, is_ahead: bool = False
    ) -> None:
        self.prefill_tokens = scheduled.prefill_tokens
        self.others_wait = scheduled.others_wait
        self._num_unknown = int(is_ahead)  # tokens of each request
        self.decoding = [
            Piece(live[row.request.id], 1, True, is_ahead=is_ahead) for row in scheduled.decoding
        ]
        self.pieces = self.decoding + [
            Piece(live[row.request.id], row.num_new_tokens, row.completes)
            for row in scheduled.prefilling
        ]

    @property
    def requests(self) -> list[Request]:
        """Those that decode, in the view's order."""
        return [piece.request for piece in self.decoding]

    @property
    def unknown(self) -> list[ScheduledRequest]:
        """The requests whose last token the host does not know yet."""
        own = [piece.request for piece in self.decoding]
        return [r.scheduled for r in own if len(r.tokens) < r.scheduled.num_tokens]

    def view(self, step: int, free_kv_tokens: int, drafting: Drafting | None) -> BatchView:
        """What a planner sees. Without `drafting` nobody may draft."""
        requests, late = self.requests, self._num_unknown
        may_draft = [drafting is not None and r.remaining_tokens - late > 1 for r in requests]
        offers = iter(drafting.offers([*compress(requests, may_draft)]) if drafting else ())
        rows = zip(requests, may_draft, strict=True)
        return BatchView(
            step=step,
            requests=tuple([_view(r, late, next(offers) if may else NO_OFFER) for r, may in rows]),
            free_kv_tokens=free_kv_tokens,
            prefill_tokens=self.prefill_tokens,
            others_wait=self.others_wait,
        )

    def keep(self, rows: Sequence[int]) -> None:
        """Only these of the decoding pieces, which are all that there are."""
        self.decoding = self.pieces = [self.decoding[row] for row in rows]

    def take(self, drafts: Sequence[Draft], choices: Sequence[Choice]) -> None:
        """Give the decoding pieces their drafts."""
        for piece, draft, choice in zip(self.decoding, drafts, choices, strict=True):
            piece.draft = draft
            piece.arm = choice.drafter or ""

    def segments(self, block_size: int) -> list[Segment]:
        """What the model computes, in the order of the pieces."""
        return [piece.segment(block_size) for piece in self.pieces]

    def tasks(self, first_rows: Iterable[int]) -> list[VerifyTask]:
        """What the verifier decides: the pieces that complete, in order."""
        return [
            VerifyTask(
                piece.request.sampler, piece.request.tokens, piece.draft, first_row, piece.arm
            )
            for piece, first_row in zip(self.pieces, first_rows, strict=True)
            if piece.completes
        ]

    @property
    def most_outputs(self) -> list[int]:
        """How many tokens each decoding request may be given at most."""
        return [1 + len(piece.draft.tokens) for piece in self.decoding]

    def outputs(self, verdicts: Sequence[Verdict]) -> list[list[int]]:
        """What each piece that completes is given by its verdict, before stop rules; decoding ones first."""
        completed = [piece for piece in self.pieces if piece.completes]
        return [_output(*pair) for pair in zip(completed, verdicts, strict=True)]

    def accept(self, verdicts: Iterable[Verdict], outputs: Iterable[list[int]]) -> Moves:
        """Append the verdicts' outputs to the requests; blocks are still those of before."""
        moves: Moves = []
        remaining = zip(verdicts, outputs, strict=True)
        for piece in self.pieces:
            if piece.completes:
                _accept(piece, *next(remaining), moves)
            else:
                cached = piece.request.scheduled.cached_tokens
                piece.request.cached_after = cached + piece.num_new_tokens
        return moves

    def observation(
        self,
        view: BatchView,
        plan: Plan,
        drafts: Drafts,
        verdicts: Sequence[Verdict],
        *,
        timing: Timing,
        shadow: Mapping[str, tuple[int | None, ...]],
        faults: tuple[str, ...],
    ) -> Observation:
        """What came of the step, for the requests of the view."""
        own = verdicts[: len(self.decoding)]
        are_chains = all(piece.draft.is_chain for piece in self.decoding)
        observation = Observation(
            view=view,
            plan=plan,
            drafted=drafts.drafted,
            proposed=tuple([len(piece.draft.tokens) for piece in self.decoding]),
            accepted=tuple([len(verdict.accepted_nodes) for verdict in own]),
            emitted=tuple([piece.emitted for piece in self.decoding]),
            timing=timing,
            accepted_nodes=None if are_chains else tuple([v.accepted_nodes for v in own]),
            confidence=drafts.confidence,
            shadow=shadow,
            faults=faults,
            launched_ahead=self._num_unknown > 0,
        )
        object.__setattr__(observation, "_is_sound", True)  # counted here, or vetted
        return observation


def _output(piece: Piece, verdict: Verdict) -> list[int]:
    """The tokens that a verdict gives, before stop rules."""
    tokens = piece.draft.tokens
    return [*[tokens[node] for node in verdict.accepted_nodes], verdict.next_token]


def _accept(piece: Piece, verdict: Verdict, output: list[int], moves: Moves) -> None:
    request, draft, path = piece.request, piece.draft, verdict.accepted_nodes
    length = len(request.tokens)
    piece.emitted = emitted = request.append(output)
    request.cached_after = length + min(len(path), emitted - 1)
    if path and path[-1] != len(path) - 1 and request.finish_reason is None:
        moved = [(node, depth) for depth, node in enumerate(path) if node != depth]
        sources = [length + node for node, _ in moved]
        moves.append((request, sources, [length + depth for _, depth in moved]))
    arm = piece.arm
    request.stats.steps += 1
    if arm:
        request.stats.count(arm, proposed=len(draft.tokens), accepted=len(path))


def _view(request: Request, num_unknown: int, offer: Offer) -> RequestView:
    context = len(request.tokens) + num_unknown
    generated = context - request.prompt_tokens
    remaining = request.rules.max_new_tokens - generated
    return RequestView(request.id, context, generated, remaining, request.temperature, *offer)
