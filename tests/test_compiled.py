"""Loops that are compiled once on a machine, or in each process where nothing can be kept."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from sdcontrol import compiled as module
from sdcontrol.compiled import compiled, is_compiling

pytestmark = pytest.mark.skipif(not is_compiling, reason="numba is not installed")

SUM = """
def sum_to(n):
    total = 0
    for i in range(n + 1):
        total += i
    return total
"""
SIGNATURE = "int64(int64)"


@pytest.fixture(autouse=True)
def said_nothing_yet() -> Iterator[None]:
    """Each is said once in a process; to standard logging, whatever tests before this one configured."""
    structlog.reset_defaults()
    once = module._say_that_all_is_compiled, module._say_that_nothing_is_kept
    for say in once:
        say.cache_clear()
    yield
    for say in once:
        say.cache_clear()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Callable[[int], int]]:
    """A function of a file of its own, as a process finds it that has just begun."""
    (tmp_path / "loops_to_compile.py").write_text(SUM)
    monkeypatch.syspath_prepend(tmp_path)

    def fresh() -> Callable[[int], int]:
        monkeypatch.delitem(sys.modules, "loops_to_compile", raising=False)
        found: Callable[[int], int] = importlib.import_module("loops_to_compile").sum_to
        return found

    return fresh


def test_it_is_said_once_that_loops_are_compiled_and_never_where_they_were(
    fresh: Callable[[], Callable[[int], int]], caplog: pytest.LogCaptureFixture
) -> None:
    for signature in (SIGNATURE, "int64(int32)"):
        assert compiled(signature)(fresh())(4) == 10
    assert caplog.text.count("compilation_begun") == 1
    module._say_that_all_is_compiled.cache_clear()
    caplog.clear()
    assert compiled(SIGNATURE)(fresh())(4) == 10
    assert not caplog.text


def test_where_nothing_can_be_kept_each_process_compiles_and_is_told_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a container whose file system is read-only: numba has no place for what is in no file."""
    for _ in range(2):
        names: dict[str, Callable[[int], int]] = {}
        exec(compile(SUM, "<nowhere>", "exec"), names)
        assert compiled(SIGNATURE)(names["sum_to"])(4) == 10
    assert caplog.text.count("compiled_code_not_kept") == 1
    assert "NUMBA_CACHE_DIR" in caplog.text
    assert "compilation_begun" not in caplog.text
