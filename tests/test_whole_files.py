"""Files that are written whole: what stands there afterwards, and what stays where it cannot be written."""

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdcontrol import whole_files
from sdcontrol.cli import main
from sdcontrol.whole_files import alone_in, write_whole


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may have more than 64 bytes: as on a full disk, but for the error's number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path, small_disk: None) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(OSError, match="file") as raised:
        write_whole(path, b"x" * 1000)
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_that_does_not_fit_leaves_the_last_one(
    tmp_path: Path, small_disk: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    path.write_text("{}")
    assert main(["inspect", "bundled:off", "--json", str(path)]) == 2
    assert "result.json cannot be written" in capsys.readouterr().err
    assert path.read_text() == "{}"
    assert list(tmp_path.iterdir()) == [path]


def test_where_nothing_may_be_written_is_said_before_the_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    may = os.access

    def access(path: str | Path, mode: int) -> bool:  # whoever is root may write anywhere
        return Path(path) != closed and Path(path).parent != closed and may(path, mode)

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr("sdcontrol.cli.inspect.find_trace", lambda given: Path(given))
    for path in (closed / "new.json", closed / "old.json"):
        assert main(["inspect", "no trace at all", "--json", str(path)]) == 2
        assert f"{path.name} cannot be written: there is no permission" in capsys.readouterr().err
        (closed / "old.json").write_text("{}")
    assert main(["inspect", "no trace at all", "--json", str(tmp_path / "result.json")]) == 2
    assert "permission" not in capsys.readouterr().err


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"before")
    path.chmod(0o600)
    link.symlink_to(path)
    write_whole(path, b"after")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"after", 0o600)
    write_whole(link, b"through the link")
    assert link.is_symlink()
    assert path.read_bytes() == b"through the link"
    write_whole(Path(os.devnull), b"x")
    assert Path(os.devnull).is_char_device()


def test_who_writes_what_was_read_waits_for_others(tmp_path: Path) -> None:
    """Threads of this process, and another process."""
    path = tmp_path / "count"
    path.write_text("0")

    def one_more() -> None:
        with alone_in(tmp_path):
            count = int(path.read_text())
            time.sleep(0.05)
            path.write_text(str(count + 1))

    script = (
        "import pathlib, sys\n"
        "from sdcontrol.whole_files import alone_in\n"
        "with alone_in(pathlib.Path(sys.argv[1])):\n"
        "    print('in', flush=True)\n"
        "    sys.stdin.read()\n"
        "    pathlib.Path(sys.argv[1], 'count').write_text('10')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"in\n"
        threads = [threading.Thread(target=one_more) for _ in range(3)]
        for thread in threads:
            thread.start()
        threads[0].join(0.2)
        assert path.read_text() == "0"  # nobody else is in
        other.communicate()
    for thread in threads:
        thread.join()
    assert path.read_text() == "13"


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one that is stopped amid it, or where there is nothing to be locked."""
    monkeypatch.setattr(whole_files, "_MOST_WAIT_SECONDS", 0.05)
    started = time.monotonic()
    with alone_in(tmp_path), alone_in(tmp_path), alone_in(tmp_path / "none"):
        assert 0.05 <= time.monotonic() - started < 5.0
