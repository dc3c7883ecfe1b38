"""Loops over arrays, compiled to machine code by numba.

    @compiled("float64(float64[::1], int64)")
    def best(values, count): ...

A signature is compiled when its module is imported, once per machine, which is said aloud: numba keeps the
result on disk. It looks at one file only, though a caller keeps what it inlined from others, so what is kept
goes by a digest of all compiled files: a change of one compiles them all anew. Where nothing can be kept, each
process compiles; where numba cannot be imported, or its compiler is turned off, the same function runs as
plain Python: same results, slower.
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

_log = EventLog(__name__)

try:
    import numba
    from numba import carray  # type: ignore[attr-defined]  # as documented
    from numba.core import cgutils, serialize
    from numba.extending import intrinsic, overload
except ImportError:  # a Python that is too new for it, say
    numba = None  # type: ignore[assignment]  # a module that is missing
    _log.warning("numba_missing", remedy="pip install numba; planning is slow without")

is_compiling = numba is not None and not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
_DURATION = "one to two minutes"


def compiled(*signatures: str, is_inlined: bool = False) -> Callable[[_Function], _Function]:
    """Compile a function for `signatures`, eagerly. It may call other compiled functions.

    One that `is_inlined` becomes part of those that call it. Right after a forward calls are dear: tuples of
    arrays are handed on piece by piece, to code that lies elsewhere.
    """

    def decorate(function: _Function) -> _Function:
        if not is_compiling:
            return function
        function.__qualname__ += f"-{_digest()}"  # part of the names of numba's files
        try:
            made = _made(function, signatures, is_inlined=is_inlined, is_kept=True)
        except (RuntimeError, OSError):  # no folder may be written, or none has room
            _say_that_nothing_is_kept()
            made = _made(function, signatures, is_inlined=is_inlined, is_kept=False)
        else:
            if made.stats.cache_misses:
                _say_that_all_is_compiled()
        return cast(_Function, made)

    return decorate


def _made(
    function: Callable[..., object],
    signatures: tuple[str, ...],
    *,
    is_inlined: bool,
    is_kept: bool,
) -> Any:
    compile_for = numba.njit(
        list(signatures),
        cache=is_kept,
        nogil=True,
        error_model="numpy",
        forceinline=is_inlined,
    )
    return compile_for(function)


@cache
def _say_that_all_is_compiled() -> None:
    """Say so once, after the first function of many."""
    _log.warning("compilation_begun", takes=_DURATION, once="on this machine")


@cache
def _say_that_nothing_is_kept() -> None:
    """Say so once."""
    remedy = "let NUMBA_CACHE_DIR name a folder that may be written"
    _log.warning("compiled_code_not_kept", takes=_DURATION, each="process", remedy=remedy)


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


def _let_interrupts_wait() -> None:
    """Have numba find the types of arrays that compiled code returns in a cache, which is no Python.

    As Python is where an interrupt that came meanwhile is raised, and numba does not look for errors there:
    the process may die. numba takes its function for that once, for the first array that any compiled code
    returns: an application's own, before this is imported, keeps the danger.
    """
    find = getattr(serialize, "_numba_unpickle", None)
    if find is not None:
        serialize._numba_unpickle = cache(find)


if is_compiling:
    _pointer_to: Any = intrinsic(_pointer)
    overload(array_at)(_compiled_array_at)
    _let_interrupts_wait()


@cache
def _digest() -> str:
    """Of this file and all files of this package that hold compiled functions."""
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    marks = (b"\n@compiled(", b"\ndef array_at(")
    compiled_ones = b"".join(source for source in sources if any(mark in source for mark in marks))
    return hashlib.sha256(compiled_ones).hexdigest()[:12]
