"""What anybody's belief says, as arrays of the shape that was asked for; or an error that says how.

Knows nothing of what the numbers are for. The tables of our own estimators are read as they are.
"""

from collections.abc import Mapping

import numpy as np

from sdcontrol.core import Cost, FloatArray
from sdcontrol.errors import PlanError

__all__ = ["draft_seconds", "survival_table", "verify_seconds"]


def survival_table(survival: Mapping[str, FloatArray], arm: str, num_requests: int) -> FloatArray:
    """Of an arm, `[requests, K]`. Raises `PlanError` for any other shape."""
    rows = np.asarray(survival[arm], np.float64)
    if rows.ndim != 2 or len(rows) != num_requests:
        raise PlanError(
            f"survival of {arm!r} has the shape {rows.shape} for {num_requests} requests; give "
            "[requests, K], a row per request of the view"
        )
    return rows


def verify_seconds(
    cost: Cost, num_tokens: FloatArray, kv_tokens: float, num_requests: int
) -> FloatArray:
    """One forward for each of `num_tokens`; a new array of their shape.

    Raises `PlanError` for a cost that cannot take an array, or whose answer does not fit it.
    """
    return _asked(cost, "verify_seconds", num_tokens.shape, num_tokens, kv_tokens, num_requests)


def draft_seconds(
    cost: Cost, family: str, num_requests: FloatArray, kv_tokens: FloatArray
) -> FloatArray:
    """One round for each of `num_requests`; a new array of their shape. Errors as above."""
    return _asked(cost, "draft_seconds", num_requests.shape, family, num_requests, kv_tokens)


def _asked(cost: Cost, what: str, shape: tuple[int, ...], *arguments: object) -> FloatArray:
    try:
        answer = np.array(getattr(cost, what)(*arguments), np.float64)
        if answer.shape != shape:  # broadcasting takes six times as long as all else
            answer = np.broadcast_to(answer, shape).copy()
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{what} of {type(cost).__name__}, asked for an array of {shape[0]}: {error}; take arrays "
            "and answer one number for each or one for all, as np.maximum does and max does not"
        ) from error
    return answer
