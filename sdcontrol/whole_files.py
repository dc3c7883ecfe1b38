"""Files that are there in full, or as they were before.

Knows bytes; nothing of what they mean.
"""

import os
import shutil
import uuid
from pathlib import Path

__all__ = ["write_whole"]


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
