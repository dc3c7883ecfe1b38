"""How often something was compiled in this process, as Triton and torch say themselves.

Triton compiles a kernel when it is first launched with arguments of their kind, `torch.compile` when
a layer meets what its code does not fit: up to seconds, wherever the time is counted. Knows nothing
of steps. What nobody has imported has compiled nothing, and Triton's interpreter never does.
"""

import sys
import threading

__all__ = ["compilations"]


class _Listener:
    """Counts its calls, whichever thread they come from."""

    def __init__(self) -> None:
        self.calls = 0
        self._lock = threading.Lock()

    def __call__(self, *_: object) -> None:
        with self._lock:
            self.calls += 1


_LISTENER = _Listener()


def compilations() -> int:
    """How many there were since somebody first asked: by any thread, and never fewer than before.

    Kernels that are loaded from Triton's files count as well. Listeners of others stay.
    """
    _listen_to_triton()
    _listen_to_torch()
    return _LISTENER.calls


def _listen_to_triton() -> None:
    """A kernel is loaded between its compilation and its first launch, one from a file too."""
    runtime = getattr(sys.modules.get("triton.knobs"), "runtime", None)
    add = getattr(getattr(runtime, "kernel_load_start_hook", None), "add", None)
    if add is not None:
        add(_LISTENER)  # once, however often it is asked to


def _listen_to_torch() -> None:
    """Inductor launches its kernels without Triton. These are torch's own names, which may change."""
    handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
    add = getattr(handler, "register_end_callback", None)
    if add is not None and _LISTENER not in getattr(handler, "end_callbacks", ()):
        add(_LISTENER)  # anew after `torch.compiler.reset`
