"""Recording for the device, without one: a stand-in fails as torch 2.11 does where a capture is invalid."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from sdcontrol.engine import graph_recorder
from sdcontrol.engine.graph_recorder import CudaRecorder, recording_errors

CPU = torch.device("cpu")
Pool = tuple[int, int]


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.device = device
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)


@dataclass
class FakeGenerator:
    is_recording: bool = False

    def clone_state(self) -> "FakeGenerator":
        return FakeGenerator()

    def graphsafe_set_state(self, other: "FakeGenerator") -> None:
        self.is_recording = other.is_recording


@dataclass
class FakeCuda:
    """`torch.cuda`, as far as a recorder uses it."""

    current: FakeStream = field(default_factory=FakeStream)
    generator: FakeGenerator = field(default_factory=FakeGenerator)
    filled: set[Pool] = field(default_factory=set)
    released: list[Pool] = field(default_factory=list)
    num_pools: int = 0
    is_valid: bool = True
    num_unused: int = 7
    workspace: int = 32  # of cuBLAS, from the forward before
    free: int = 1 << 20
    said: list[str] = field(default_factory=list)

    def handle(self) -> Pool:
        self.num_pools += 1
        return (0, self.num_pools)

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: object, *, pool: Pool, stream: FakeStream, **_: object
    ) -> Iterator[None]:
        if pool in self.filled:
            raise RuntimeError("already recording to mempool_id")
        before, self.current = self.current, stream
        self.filled.add(pool)
        self.generator.is_recording = True
        self.said.append("begin")
        yield
        self.said.append("end")
        if not self.is_valid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.filled.remove(pool)
        self.generator.is_recording = False
        self.current = before

    def end(self, index: int, pool: Pool) -> None:
        self.filled.remove(pool)

    def release(self, index: int, pool: Pool) -> None:
        self.released.append(pool)

    def give_back(self) -> None:
        self.free += self.num_unused
        self.num_unused = 0

    def clear_workspaces(self) -> None:
        self.said.append("clear")
        self.num_unused += self.workspace
        self.workspace = 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    names: dict[str, object] = {
        "device": nullcontext,
        "current_device": lambda: 0,
        "current_stream": lambda: fake.current,
        "set_stream": fake.set_stream,
        "stream": fake.stream,
        "Stream": FakeStream,
        "CUDAGraph": lambda: type("Graph", (), {"replay": lambda self: None})(),
        "graph": fake.graph,
        "graph_pool_handle": fake.handle,
        "default_generators": (fake.generator,),
        "empty_cache": fake.give_back,
        "memory_reserved": lambda device: 100 + fake.num_unused + fake.workspace,
        "mem_get_info": lambda device: (fake.free, 1 << 30),
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", fake.release, raising=False)
    clear = fake.clear_workspaces
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    graph_recorder._side_stream.cache_clear()
    yield fake
    graph_recorder._side_stream.cache_clear()


def nothing() -> None: ...


def test_a_capture_that_fails_leaves_the_device_as_it_was(cuda: FakeCuda) -> None:
    recorder, before = CudaRecorder(CPU), cuda.current
    cuda.is_valid = False
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.capture(nothing)
    assert cuda.current is before
    assert not cuda.filled
    assert cuda.released == [(0, 1)]
    assert not cuda.generator.is_recording
    cuda.is_valid = True
    recorder.capture(nothing)()


def test_a_pool_that_was_ended_already_is_not_released_by_us(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later torch ends it itself. Its last graph may have gone with it: another pool is taken."""

    def refuse(index: int, pool: Pool) -> None:
        raise RuntimeError("not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    recorder = CudaRecorder(CPU)
    cuda.is_valid = False
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.capture(nothing)
    assert cuda.released == []
    cuda.is_valid = True
    recorder.capture(nothing)()


def test_what_fails_before_the_capture_is_waited_for(cuda: FakeCuda) -> None:
    def fail() -> None:
        raise KeyError("a warm-up")

    before = cuda.current
    with pytest.raises(KeyError):
        CudaRecorder(CPU).capture(fail)
    assert cuda.current is before
    assert [type(stream) for stream in before.waited] == [FakeStream]


def streams_of(cuda: FakeCuda, recorder: CudaRecorder) -> set[FakeStream]:
    seen: set[FakeStream] = set()
    recorder.capture(lambda: seen.add(cuda.current))
    return seen


def test_recorders_share_a_stream_for_each_on_which_graphs_are_replayed(cuda: FakeCuda) -> None:
    first, again = (streams_of(cuda, CudaRecorder(CPU)) for _ in range(2))
    assert first == again
    assert len(first) == 1
    cuda.current = FakeStream()
    assert streams_of(cuda, CudaRecorder(CPU)).isdisjoint(first)


def test_threads_record_one_after_the_other(cuda: FakeCuda) -> None:
    running: list[int] = []
    most: list[int] = []

    def work() -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.002)
        running.pop()

    recorders = [CudaRecorder(CPU) for _ in range(3)]
    threads = [threading.Thread(target=r.capture, args=(work,)) for r in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 9  # two warm-ups each, and the capture


def test_a_graph_takes_workspaces_of_its_own_which_nobody_else_gets(cuda: FakeCuda) -> None:
    """From the list of all, they could be freed while the graph still writes there."""
    CudaRecorder(CPU).capture(lambda: cuda.said.append("work"))
    assert cuda.said == ["work", "work", "clear", "begin", "work", "end", "clear"]
    cuda.said.clear()
    cuda.is_valid = False
    with pytest.raises(RuntimeError):
        CudaRecorder(CPU).capture(nothing)
    assert cuda.said[-1] == "clear"


def test_room_is_taken_once_for_all_graphs_of_a_pool(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def empty(size: int, **_: object) -> None:
        if size:
            taken.append(size)

    monkeypatch.setattr(torch, "empty", empty)
    recorder = CudaRecorder(CPU, room_bytes=5000)
    recorder.capture(nothing)
    recorder.capture(nothing)
    assert taken == [5000]
    cuda.is_valid = False
    with pytest.raises(RuntimeError):  # graphs that were recorded keep theirs
        recorder.capture(nothing)
    cuda.is_valid = True
    recorder.capture(nothing)
    assert taken == [5000]
    cuda.free, cuda.num_unused = 4000, 1000
    CudaRecorder(CPU, room_bytes=5000).capture(nothing)
    assert taken == [5000]
    cuda.free, cuda.num_unused = 4000, 1001  # that torch keeps for nobody
    CudaRecorder(CPU, room_bytes=5000).capture(nothing)
    assert taken == [5000, 5000]


def test_memory_that_nobody_uses_is_not_counted(cuda: FakeCuda) -> None:
    """A capture gives it back, and workspaces: the difference of two readings would be negative."""
    assert CudaRecorder(CPU).reserved_bytes() == 100
    assert (cuda.num_unused, cuda.workspace) == (0, 0)


def test_a_kernel_that_does_not_fit_is_an_error_of_recording() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    assert isinstance(errors.OutOfResources(300_000, 232_448, "shared memory"), recording_errors())
    assert not isinstance(AssertionError(), recording_errors())


def test_without_triton_nothing_of_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    assert recording_errors() == (RuntimeError,)
