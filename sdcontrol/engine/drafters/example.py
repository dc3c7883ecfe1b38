"""A drafter of your own, as an example: it completes phrases that it was given.

Useful where texts hold long fixed phrases (licence headers, boilerplate, forms) that no earlier
text shows. Knows nothing of models, policies or the engine: see `Drafter` for what it may override,
and `sdcontrol.engine.drafters.checks` for what every drafter is held to.

    Engine(model, drafters=["ngram", PhraseDrafter([tokenizer.encode(licence)])], planner=...)
"""

from collections.abc import Sequence

from sdcontrol.core import Hint
from sdcontrol.engine.drafters.base import Draft, Drafter, DraftRequest, DraftTask, KeepDrafting
from sdcontrol.errors import ConfigError

__all__ = ["PhraseDrafter"]


class PhraseDrafter(Drafter):
    """Once a text has said `match_tokens` tokens of a phrase in a row, drafts the rest of it.

    Where several phrases go on from the same tokens, the first one given is drafted. Raises
    `ConfigError` for a phrase that is no longer than `match_tokens`.
    """

    name = "phrases"

    def __init__(self, phrases: Sequence[Sequence[int]], *, match_tokens: int = 3) -> None:
        self._match_tokens = match_tokens
        self._rest: dict[tuple[int, ...], tuple[int, ...]] = {}
        for phrase in phrases:
            if not 1 <= match_tokens < len(phrase):
                raise ConfigError(
                    f"match_tokens {match_tokens} with a phrase of {len(phrase)} tokens; "
                    "give at least 1, and longer phrases"
                )
            for end in range(match_tokens, len(phrase)):
                said = tuple(phrase[end - match_tokens : end])
                self._rest.setdefault(said, tuple(phrase[end:]))

    def hint(self, request: DraftRequest, arm: str) -> Hint:
        """How much of a phrase is left: none for most texts, so that nobody plans for it."""
        return Hint(max_draft_tokens=len(self._rest_of(request)))

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> list[Draft]:
        """The rest of the phrase that each text is in."""
        return [Draft.chain(self._rest_of(task.request)[: task.num_draft_tokens]) for task in tasks]

    def _rest_of(self, request: DraftRequest) -> tuple[int, ...]:
        return self._rest.get(tuple(request.tokens[-self._match_tokens :]), ())
