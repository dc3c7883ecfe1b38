"""Loops over arrays, compiled to machine code by numba.

    @compiled("float64(float64[::1], int64)")
    def best(values, count): ...

A signature is compiled when its module is imported, once per machine: numba keeps the result on
disk. It looks at one file only, though a caller keeps what it inlined from others, so what is kept
goes by a digest of all compiled files: a change of one compiles them all anew. Where numba cannot be imported the same function runs as plain Python: same results, slower.
`array_at` is for loops over many arrays at once, and needs numba. Knows nothing of what is computed.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from sdcontrol.logs import EventLog

__all__ = ["array_at", "compiled", "is_compiling"]

_Function = TypeVar("_Function", bound=Callable[..., object])

try:
    import numba
    from numba import carray  # type: ignore[attr-defined]  # as documented
    from numba.core import cgutils
    from numba.extending import intrinsic, overload
except ImportError:  # a Python that is too new for it, say
    numba = None  # type: ignore[assignment]  # a module that is missing
    EventLog(__name__).warning(
        "numba_missing", remedy="pip install numba; planning is slow without"
    )

is_compiling = numba is not None


def compiled(*signatures: str, is_inlined: bool = False) -> Callable[[_Function], _Function]:
    """Compile a function for `signatures`, eagerly. It may call other compiled functions.

    One that `is_inlined` becomes part of those that call it. Right after a forward calls are dear: tuples of
    arrays are handed on piece by piece, to code that lies elsewhere.
    """

    def decorate(function: _Function) -> _Function:
        if numba is None:
            return function
        function.__qualname__ += f"-{_digest()}"  # part of the names of numba's files
        compile_for = numba.njit(
            list(signatures),
            cache=True,
            nogil=True,
            error_model="numpy",
            forceinline=is_inlined,
        )
        return cast(_Function, compile_for(function))

    return decorate


def array_at(address: int, size: int) -> NDArray[np.uint32]:
    """In compiled code: the `size` numbers that lie at an address, `array.ctypes.data` of theirs.

    Nothing is checked, and nothing kept alive: the caller holds the array meanwhile.
    """
    raise NotImplementedError("plain Python has the array itself")


def _pointer(_: object, address: Any) -> tuple[object, Callable[..., object]]:
    """How numba is to make a pointer of an integer: the signature, and what generates the code."""

    def generate(_: object, builder: Any, __: object, arguments: Any) -> object:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return numba.types.voidptr(address), generate


def _compiled_array_at(address: Any, size: Any) -> Callable[..., object]:
    """What stands for `array_at` in compiled code."""

    def array(address: Any, size: Any) -> object:
        return carray(_pointer_to(address), size, np.uint32)

    return array


if is_compiling:
    _pointer_to: Any = intrinsic(_pointer)
    overload(array_at)(_compiled_array_at)


@cache
def _digest() -> str:
    """Of this file and all files of this package that hold compiled functions."""
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    marks = (b"\n@compiled(", b"\ndef array_at(")
    compiled_ones = b"".join(source for source in sources if any(mark in source for mark in marks))
    return hashlib.sha256(compiled_ones).hexdigest()[:12]
