"""A price of one number of tokens, asked for an array of them. Knows no prices."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

import numpy as np

__all__ = ["of_each"]

_Price = TypeVar("_Price", bound=Callable[..., float])


def of_each(price: _Price) -> _Price:
    """A method `price(self, family, num_tokens)`, whose answer to an array is one of its shape."""

    @wraps(price)
    def asked(self: object, family: str, num_tokens: object) -> object:
        if not isinstance(num_tokens, np.ndarray):
            return price(self, family, num_tokens)
        seconds = [price(self, family, number) for number in num_tokens.ravel().tolist()]
        return np.array(seconds, np.float64).reshape(num_tokens.shape)

    return cast(_Price, asked)
