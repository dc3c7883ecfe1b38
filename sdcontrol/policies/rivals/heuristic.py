"""Two more when all were accepted, else one fewer: transformers' schedule of assistant tokens.

Knows neither cost nor survival; per request, since transformers assists one request at a time. Each
request begins anew, as with its `heuristic_transient`.
"""

from typing import Literal

from pydantic import Field

from sdcontrol.core import BatchView, Belief, Observation, Plan
from sdcontrol.policies.rivals.one_drafter import OneDrafter, OneDrafterConfig

__all__ = ["Heuristic", "HeuristicConfig"]

_REQUESTS = 4096  # lengths remembered, oldest forgotten first


class HeuristicConfig(OneDrafterConfig):
    """`initial_tokens` for a new request, never more than `max_tokens`."""

    kind: Literal["heuristic"] = "heuristic"
    initial_tokens: int = Field(default=5, ge=1)
    max_tokens: int = Field(default=20, ge=1)

    def build(self) -> "Heuristic":
        """The policy."""
        return Heuristic(self.drafter, self.initial_tokens, self.max_tokens)


class Heuristic(OneDrafter):
    """Each request has a length: +2 after a step that accepted all of it, else -1, at least 1."""

    def __init__(self, drafter: str | None, initial_tokens: int, max_tokens: int) -> None:
        super().__init__(drafter)
        self.initial_tokens = initial_tokens
        self.max_tokens = max_tokens
        self._tokens: dict[str, int] = {}

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """Every request's own length, cut to what the view and the belief allow."""
        drafter = self.drafter_for(view)
        if drafter is None:
            return Plan.off(view, "heuristic: no drafter")
        most = min(self.max_tokens, self.longest(view, belief) or self.max_tokens)
        free, choices = view.free_kv_tokens, []
        for request in view.requests:
            wanted = min(self._tokens.get(request.id, self.initial_tokens), most)
            alone = Plan.uniform(BatchView(view.step, (request,), free), drafter, wanted)
            choices.append(alone.choices[0])
            free -= choices[-1].num_draft_tokens
        return Plan(tuple(choices), "heuristic")

    def update(self, observation: Observation) -> None:
        """Lengthen what was accepted in full, shorten the rest."""
        rows = zip(
            observation.view.requests, observation.proposed, observation.accepted, strict=True
        )
        for request, proposed, accepted in rows:
            if not proposed:
                continue
            tokens = self._tokens.pop(request.id, self.initial_tokens)
            tokens = tokens + 2 if accepted == proposed else tokens - 1
            self._tokens[request.id] = min(max(tokens, 1), self.max_tokens)
        while len(self._tokens) > _REQUESTS:
            del self._tokens[next(iter(self._tokens))]
