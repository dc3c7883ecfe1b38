"""Files that are there in full, or as they were before, and folders in which one writes at a time.

Knows bytes; nothing of what they mean.
"""

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system without it: nobody waits
    fcntl = None  # type: ignore[assignment]

__all__ = ["alone_in", "held", "write_whole"]

_MOST_WAIT_SECONDS = 30.0  # for others that are in a folder


def write_whole(path: Path, content: bytes) -> None:
    """Write a file at one stroke, whenever the machine stops; a link or a device is written where it is.

    Raises `OSError`, which names the path; the file is as it was then.
    """
    try:
        if _stays_in_place(path):
            path.write_bytes(content)
        else:
            _replace(path, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _stays_in_place(path: Path) -> bool:
    """Where nothing else may take its place, or none can be made beside it."""
    is_other = path.is_symlink() or (path.exists() and not path.is_file())
    return is_other or not os.access(path.parent, os.W_OK)


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process or thread is in here for `folder`, so that what is read is what is replaced.

    Half a minute at most, and not at all where a folder cannot be locked: then as if nobody were there.
    """
    handle = _opened(folder)
    try:
        if handle is not None:
            _wait_for(handle)
        yield
    finally:
        if handle is not None:
            os.close(handle)  # and what was locked by it is free


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Hold `folder` for as long as this lasts; False where another process or thread holds it, without waiting.

    True as well where a folder cannot be locked.
    """
    handle = _opened(folder)
    try:
        yield handle is None or _is_locked(handle)
    finally:
        if handle is not None:
            os.close(handle)


def _is_locked(handle: int) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that knows no locks
        pass
    return True


def _opened(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY)
    except OSError:
        return None


def _wait_for(handle: int) -> None:
    until = time.monotonic() + _MOST_WAIT_SECONDS
    while not _is_locked(handle) and time.monotonic() < until:
        time.sleep(0.01)
