"""Service level objectives: what a request may take to count.

Knows two limits; nothing of requests' origin.
"""

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SLO"]


class SLO(BaseModel):
    """A request counts when its first token and its pace keep both limits. None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_seconds: float | None = Field(None, gt=0, description="to the first token")
    tpot_seconds: float | None = Field(None, gt=0, description="per token after the first")
