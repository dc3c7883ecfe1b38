"""Independent runs at once: in this process, on this machine's cores, or on Ray.

Knows a function and what it is called with, both of which must be picklable; nothing of what is run.
"""

import importlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import TypeVar

from sdcontrol.errors import ConfigError
from sdcontrol.extras import needed

__all__ = ["Pool"]

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

_CONNECT_SECONDS = 5.0
_GRACE_SECONDS = 3.0  # in which interrupted workers end by themselves


@dataclass(frozen=True, slots=True)
class Pool:
    """Where runs go. `ray_address` is a cluster's; "local" one of this machine, None: no Ray.

    With one worker they run here, one after another.
    """

    workers: int = 1
    ray_address: str | None = None

    def run(
        self, function: Callable[[_Job], _Result], jobs: Sequence[_Job]
    ) -> Iterator[tuple[int, _Result]]:
        """Results as they come, each with its job's place. The first error ends it all.

        Raises `ConfigError` where Ray is asked for and is not there, and what `function` raises.
        """
        if self.ray_address is not None:
            return _on_ray(function, jobs, self)
        if min(self.workers, len(jobs)) > 1:
            return _on_cores(function, jobs, min(self.workers, len(jobs)))
        return ((place, function(job)) for place, job in enumerate(jobs))


def _on_cores(
    function: Callable[[_Job], _Result], jobs: Sequence[_Job], workers: int
) -> Iterator[tuple[int, _Result]]:
    others = set(active_children())
    context = get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)
    try:
        with _interrupts(signal.SIG_BLOCK):  # workers begin like this
            run = partial(_run, function)
            places = {pool.submit(run, job): place for place, job in enumerate(jobs)}
        for done in as_completed(places):
            yield places[done], done.result()
    except (KeyboardInterrupt, GeneratorExit):
        _interrupt(places, set(active_children()) - others)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _run(function: Callable[[_Job], _Result], job: _Job) -> _Result:
    """In a worker: an interrupt counts while a job runs. Elsewhere nobody would handle it."""
    with _interrupts(signal.SIG_UNBLOCK):
        return function(job)


@contextmanager
def _interrupts(how: int) -> Iterator[None]:
    """Let interrupts wait meanwhile, or let them come."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(how, {signal.SIGINT})  # one that has waited may come at once
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """In a worker: end when the process ends that began it, which may have no time to say so."""
    parent = parent_process()
    assert parent is not None

    def watch(sentinel: int) -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()


def _interrupt(futures: "Iterable[Future[_Result]]", workers: Iterable[BaseProcess]) -> None:
    """End what runs on. A terminal's Ctrl-C reaches workers too; this is for one that did not.

    Again and again, as a worker that ends a job may have been handed the next one before.
    """
    for future in futures:
        future.cancel()
    while wait(futures, timeout=_GRACE_SECONDS).not_done:
        for worker in workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, signal.SIGINT)


def _on_ray(
    function: Callable[[_Job], _Result], jobs: Sequence[_Job], pool: Pool
) -> Iterator[tuple[int, _Result]]:
    with needed():
        ray = importlib.import_module("ray")
    is_own = not ray.is_initialized()
    if is_own:
        _connect(ray, pool)
    try:
        remote = ray.remote(function)
        places = {remote.remote(job): place for place, job in enumerate(jobs)}
        while places:
            done, _ = ray.wait(list(places))
            yield places.pop(done[0]), _result_of(ray, done[0])
    finally:
        if is_own:
            ray.shutdown()


def _connect(ray: object, pool: Pool) -> None:
    """Join the cluster, or begin one here. Raises `ConfigError` where none answers."""
    settings: dict[str, object] = {"log_to_driver": False, "logging_level": "error"}
    if pool.ray_address == "local":
        settings |= {"num_cpus": pool.workers, "include_dashboard": False}
    try:
        _check_answers(str(pool.ray_address))
        ray.init(address=pool.ray_address, **settings)  # type: ignore[attr-defined]
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--ray {pool.ray_address}: no cluster answers: {error}; give its address, or none for "
            "this machine"
        ) from error


def _check_answers(address: str) -> None:
    """Raise `OSError` where nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def _result_of(ray: object, reference: object) -> _Result:  # type: ignore[type-var]
    """The result, or the run's own error in place of Ray's wrapper around it."""
    try:
        return ray.get(reference)  # type: ignore[attr-defined,no-any-return]
    except ray.exceptions.RayTaskError as error:  # type: ignore[attr-defined]
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
