"""How drafts are accepted in part 6: at rates of their own, which requests' seeds tell.

Knows verification; nothing of arms or time.
"""

from collections.abc import Mapping, Sequence

from sdcontrol.core import family_of
from sdcontrol.engine.verify import SyntheticVerifier, VerifyTask

__all__ = ["KINDS", "MIXES", "kind_rates", "seeds_of"]

KINDS: Mapping[float, Mapping[str, float]] = {
    0.5: {"draft_model": 0.5, "sparse_kv": 0.75, "ngram": 0.1},
    0.7: {"draft_model": 0.7, "sparse_kv": 0.85, "ngram": 0.3},
    0.9: {"draft_model": 0.9, "sparse_kv": 0.95, "ngram": 0.6},
}
"""By the draft model's acceptance, that of the others: a request that is easy is so for all."""

MIXES: Mapping[str, tuple[float, ...]] = {
    "mixed": (0.5, 0.7, 0.9),
    "0.5": (0.5,),
    "0.7": (0.7,),
    "0.9": (0.9,),
}
_RATES = tuple(KINDS)


def kind_rates() -> SyntheticVerifier:
    """Accepts at the rates of the request's kind, which is its seed's remainder.

    The number that decides depends on request and position alone, so that arms share their luck.
    """
    return SyntheticVerifier(_rates_of, shares_luck=True)


def _rates_of(task: VerifyTask) -> tuple[float]:
    kind = _RATES[task.sampler.seed % len(_RATES)]
    return (KINDS[kind][family_of(task.drafter)],)


def seeds_of(mix: Sequence[float], batch_size: int, block: int) -> list[int]:
    """One per request. Kinds rotate with pairs of blocks, an odd one and the even one after it."""
    turn = max(block - 1, 0) // 2
    kinds = [_RATES.index(mix[(row + turn) % len(mix)]) for row in range(batch_size)]
    return [(1009 * block + row) * len(_RATES) + kind for row, kind in enumerate(kinds)]
