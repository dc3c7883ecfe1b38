"""Skops files beside modules that import others when they are asked for a name."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BROKEN_ALIAS = """
import sys
from pathlib import Path
from types import ModuleType

from sdcontrol.skops_files import read_skops, write_skops


def fail(name):
    raise NameError(f"asked for {name}")


alias = sys.modules["broken_alias"] = ModuleType("broken_alias")
alias.__getattr__ = fail
write_skops({"numbers": [1, 2]}, Path("a.skops"))
print(read_skops(Path("a.skops")), sys.modules["broken_alias"] is alias)
"""


def test_an_alias_that_cannot_be_asked_for_names_is_left_alone(
    run: Callable[[list[str], Path], str], tmp_path: Path
) -> None:
    """So are 200 of transformers 5.17 where Pillow is missing."""
    pytest.importorskip("skops", reason="skops is not installed")
    assert run([sys.executable, "-c", BROKEN_ALIAS], tmp_path) == "{'numbers': [1, 2]} True\n"
