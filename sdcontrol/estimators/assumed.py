"""What drafting rounds are assumed to take before they are measured.

Knows a prior, and what forwards of the target took; nothing of measured rounds.
"""

from collections.abc import Mapping

from sdcontrol.core import Cost
from sdcontrol.estimators.forward import LearntForward
from sdcontrol.estimators.rounds import RoundPrice
from sdcontrol.estimators.uninformed import UninformedCost, catch_up_share_of, share_of

__all__ = ["AssumedRounds"]

# Where a prior's round is looked at, for a line through it.
_REQUESTS, _KV_TOKENS = 32.0, 65536.0


class AssumedRounds:
    """A given prior at the measured speed, or a share of our own target's forward.

    `catch_up_shares`, by family, are those of a token of a prompt, where they are known.
    """

    def __init__(
        self, informed: Cost | None, forward: LearntForward, catch_up_shares: Mapping[str, float]
    ) -> None:
        self._informed, self._forward = informed, forward
        self._catch_up_shares = dict(catch_up_shares)
        self._lines: dict[str, RoundPrice] = {}  # the prior's
        self._prices: dict[str, RoundPrice] = {}

    def forget(self) -> None:
        """The forward has learnt: assumptions follow."""
        self._prices.clear()

    def price(self, family: str) -> RoundPrice:
        """Of one round; kept until `forget`."""
        if family not in self._prices:
            self._prices[family] = self._price(family)
        return self._prices[family]

    def per_caught_up_token(self, family: str) -> float:
        """By how many seconds a token to catch up with makes the first round longer."""
        if self._informed is not None:
            return self.price(family).per_request
        c = (
            self._forward.coefficients
        )  # without the fifth: a head is only of a request's last token
        share = self._catch_up_shares.get(family, catch_up_share_of(family))
        return share * max(float(c[0]) * UninformedCost.per_token_seconds + float(c[2]), 0.0)

    def catch_up_seconds(
        self, family: str, num_tokens: float, per_token: float | None = None
    ) -> float:
        """Of a catch-up, in the first round: as the prior says, else `per_token`, by default as assumed now."""
        if num_tokens <= 0:
            return 0.0
        price = getattr(self._informed, "catch_up_seconds", None)
        if price is not None:
            return self._forward.speed * float(price(family, num_tokens))
        each = self.per_caught_up_token(family) if per_token is None else per_token
        return each * num_tokens

    def _price(self, family: str) -> RoundPrice:
        if self._informed is not None:
            prior, speed = self._line(family, self._informed), self._forward.speed
            return RoundPrice(
                speed * prior.constant, speed * prior.per_request, speed * prior.per_kv_token
            )
        share, c = share_of(family), self._forward.coefficients
        per_token = c[0] * UninformedCost.per_token_seconds + c[2] + c[4]
        per_kv_token = c[0] * UninformedCost.per_kv_token_seconds + c[3] + c[5]
        constant = c[0] * UninformedCost.constant_seconds + c[1]
        return RoundPrice(share * constant, share * per_token, share * per_kv_token)

    def _line(self, family: str, informed: Cost) -> RoundPrice:
        """The prior's round as a straight line."""
        if family not in self._lines:
            price = informed.draft_seconds
            base = float(price(family, 1.0, 0.0))
            per_request = max(float(price(family, _REQUESTS, 0.0)) - base, 0.0) / (_REQUESTS - 1.0)
            per_kv_token = max(float(price(family, 1.0, _KV_TOKENS)) - base, 0.0) / _KV_TOKENS
            self._lines[family] = RoundPrice(
                max(base - per_request, 0.0), per_request, per_kv_token
            )
        return self._lines[family]
