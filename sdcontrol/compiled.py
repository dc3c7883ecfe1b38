"""Loops over arrays, compiled to machine code by numba.

    @compiled("float64(float64[::1], int64)")
    def best(values, count): ...

A signature is compiled when its module is imported, once per machine: numba keeps the result on
disk. Where numba cannot be imported the same function runs as plain Python: same results, slower.
Knows nothing of what is computed.
"""

from collections.abc import Callable
from typing import TypeVar, cast

from sdcontrol.logs import EventLog

__all__ = ["compiled", "is_compiling"]

_Function = TypeVar("_Function", bound=Callable[..., object])

try:
    import numba
except ImportError:  # a Python that is too new for it, say
    numba = None  # type: ignore[assignment]
    EventLog(__name__).warning(
        "numba_missing", remedy="pip install numba; planning is slow without"
    )

is_compiling = numba is not None


def compiled(*signatures: str) -> Callable[[_Function], _Function]:
    """Compile a function for `signatures`, eagerly. It may call other compiled functions."""

    def decorate(function: _Function) -> _Function:
        if numba is None:
            return function
        compile_for = numba.njit(list(signatures), cache=True, nogil=True, error_model="numpy")
        return cast(_Function, compile_for(function))

    return decorate
