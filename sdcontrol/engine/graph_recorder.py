"""Work for the device, recorded once and repeated by one call; a recording that fails leaves nothing.

Knows torch's CUDA graphs; nothing of models, buckets or what the work is.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Protocol

import torch

__all__ = ["CudaRecorder", "GraphRecorder", "give_back_unused", "recording_errors"]

_WARM_UPS = 2  # compile what is compiled on first use, and let libraries make their handles
_ONE_AT_A_TIME = threading.Lock()  # recorders share streams


class GraphRecorder(Protocol):
    """Turns work for the device into something that can be repeated by one call."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` asks of the device; calling the result does it once more.

        `work` may be run several times. Raises one of `recording_errors` where it cannot be
        recorded; everything else on the device then goes on as before.
        """
        ...

    def reserved_bytes(self) -> int:
        """Device memory taken so far, by everybody. Takes time: for use around captures."""
        ...


class CudaRecorder:
    """torch's CUDA graphs; all of one recorder share their memory, so they never run at once.

    `room_bytes` are taken with the first, for all: a pool never gives memory back, and cannot join
    two pieces, so that graphs recorded in the order of their size would take as much as all of them
    together. The room is there as long as one of the graphs.
    """

    def __init__(self, device: torch.device, room_bytes: int = 0) -> None:
        self._device = device
        self._room_bytes = room_bytes
        self._has_room = False
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `GraphRecorder`."""
        with _ONE_AT_A_TIME, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            side = _side_stream(current)
            _warm_up(work, current, side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, hence "thread_local".
            mode = "thread_local"
            room = self._room_to_take()
            with (
                _own_workspaces(),
                self._undone_on_failure(current),
                torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode=mode),
            ):
                torch.empty(room, dtype=torch.uint8, device=self._device)  # and given to the work
                work()
            self._has_room = True
        return graph.replay

    def reserved_bytes(self) -> int:
        """What torch's allocator holds for somebody, workspaces of cuBLAS aside: captures clear those.

        What nobody uses every capture gives back.
        """
        _clear_workspaces()
        give_back_unused()
        return torch.cuda.memory_reserved(self._device)

    def _room_to_take(self) -> int:
        if self._has_room or not self._room_bytes:
            return 0
        torch.cuda.empty_cache()  # the graph may have what the warm-ups left behind
        free = torch.cuda.mem_get_info(self._device)[0]
        return self._room_bytes if self._room_bytes < free else 0

    @contextmanager
    def _undone_on_failure(self, current: torch.cuda.Stream) -> Iterator[None]:
        """Put back what torch (2.11) leaves as it is where an invalid capture ends with an error."""
        try:
            yield
        except BaseException:
            torch.cuda.set_stream(current)
            self._change_pool()
            _end_recording_of_noise()
            raise

    def _change_pool(self) -> None:
        """The old one may still count as being filled, or be gone with its last graph."""
        index = torch.cuda.current_device()
        with suppress(RuntimeError, AttributeError):  # it was ended, or torch has other names now
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)  # else nobody would
        self._pool = torch.cuda.graph_pool_handle()


def give_back_unused() -> None:
    """Let others have the memory that torch keeps for nobody; not while a graph is recorded."""
    with _ONE_AT_A_TIME:
        torch.cuda.empty_cache()


def recording_errors() -> tuple[type[Exception], ...]:
    """What is raised where work cannot be recorded: Triton's errors are no `RuntimeError`s."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return RuntimeError, TritonError


@cache
def _side_stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """Where graphs that are replayed on `current` are recorded."""
    return torch.cuda.Stream(current.device)


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let cuBLAS take its workspace anew inside, from the graph's own memory, which lives as long.

    One that it has already belongs to torch's list alone, which others may clear (as `torch.compile`
    does around its own graphs), and a graph would go on writing there. We clear it, too: graphs that
    somebody recorded by hand are in that danger with either.
    """
    _clear_workspaces()
    try:
        yield
    finally:
        _clear_workspaces()


def _clear_workspaces() -> None:
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # a name of torch's own
    if clear is not None:
        clear()


def _warm_up(work: Callable[[], None], current: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
    finally:
        current.wait_stream(side)


def _end_recording_of_noise() -> None:
    """The device's generator would refuse to draw: only a capture that ends well tells it so."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
