"""One drafter, one length, for everyone who may use it. Knows nothing of cost or acceptance."""

from typing import ClassVar, Literal

from pydantic import Field

from sdcontrol.core import BatchView, Belief, Plan
from sdcontrol.errors import ConfigError
from sdcontrol.policies.base import Policy, PolicyConfig

__all__ = ["Static", "StaticConfig"]


class StaticConfig(PolicyConfig):
    """Shorthand: "static:DRAFTER:TOKENS", where the drafter's name may itself contain ":"."""

    example: ClassVar[str] = "static:ngram:4"

    kind: Literal["static"] = "static"
    drafter: str = Field(min_length=1)
    num_draft_tokens: int = Field(ge=0)

    def build(self) -> "Static":
        """The policy."""
        return Static(self.drafter, self.num_draft_tokens)

    @classmethod
    def from_text(cls, text: str) -> dict[str, object]:
        """`"sparse_kv:512:4"` is 4 tokens by the drafter `sparse_kv:512`."""
        drafter, _, tokens = text.rpartition(":")
        if not drafter or not tokens.isdecimal():
            raise ConfigError(
                f'static policy "static:{text}": the form is "static:DRAFTER:TOKENS", '
                f'for example "{cls.example}"'
            )
        return {"drafter": drafter, "num_draft_tokens": int(tokens)}


class Static(Policy):
    """Always the same, cut where a request, a hint or the free KV slots allow less."""

    uses_belief = False

    def __init__(self, drafter: str, num_draft_tokens: int) -> None:
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The fixed choice for everyone."""
        reason = f"static: {self.drafter} x {self.num_draft_tokens}"
        return Plan.uniform(view, self.drafter, self.num_draft_tokens, reason)
