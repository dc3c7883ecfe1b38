"""Loops over arrays, compiled to machine code by numba.

    @compiled("float64(float64[::1], int64)")
    def best(values, count): ...

A signature is compiled when its module is imported, once per machine: numba keeps the result on
disk. It looks at one file only, though a caller keeps what it inlined from others, so what is kept
goes by a digest of all compiled files: a change of one compiles them all anew. Where numba cannot be imported the same function runs as plain Python: same results, slower.
Knows nothing of what is computed.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

from sdcontrol.logs import EventLog

__all__ = ["compiled", "is_compiling"]

_Function = TypeVar("_Function", bound=Callable[..., object])

try:
    import numba
except ImportError:  # a Python that is too new for it, say
    numba = None  # type: ignore[assignment]  # a module that is missing
    EventLog(__name__).warning(
        "numba_missing", remedy="pip install numba; planning is slow without"
    )

is_compiling = numba is not None


def compiled(*signatures: str) -> Callable[[_Function], _Function]:
    """Compile a function for `signatures`, eagerly. It may call other compiled functions."""

    def decorate(function: _Function) -> _Function:
        if numba is None:
            return function
        function.__qualname__ += f"-{_digest()}"  # part of the names of numba's files
        compile_for = numba.njit(list(signatures), cache=True, nogil=True, error_model="numpy")
        return cast(_Function, compile_for(function))

    return decorate


@cache
def _digest() -> str:
    """Of all files of this package that hold compiled functions."""
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    compiled_ones = b"".join(source for source in sources if b"\n@compiled(" in source)
    return hashlib.sha256(compiled_ones).hexdigest()[:12]
