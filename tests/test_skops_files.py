"""What skops files are read: arrays, numbers and strings, and nothing that unpacks to gigabytes.

They are read beside modules that import others when they are asked for a name, too.
"""

import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest

from sdcontrol.errors import ConfigError
from sdcontrol.skops_files import read_skops, write_skops

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


def _estimator() -> object:
    linear_model = pytest.importorskip("sklearn.linear_model", reason="sklearn is not installed")
    return linear_model.LinearRegression()


@pytest.mark.parametrize(
    "make",
    [
        _estimator,
        lambda: np.random.default_rng(0),
        lambda: np.add,
        lambda: np.ma.array([1.0]),
        lambda: OrderedDict(a=1),
        lambda: {1, 2},
        lambda: b"bytes",
    ],
    ids=["estimator", "generator", "function", "masked array", "ordered", "set", "bytes"],
)
def test_what_skops_would_build_beside_arrays_and_numbers_is_refused(
    tmp_path: Path, make: Callable[[], object]
) -> None:
    pytest.importorskip("skops", reason="skops is not installed")
    write_skops({"numbers": [1, 2.5, True, "a"], "array": np.zeros(2)}, tmp_path / "a.skops")
    assert read_skops(tmp_path / "a.skops")["numbers"] == [1, 2.5, True, "a"]  # type: ignore[index]
    write_skops({"numbers": [{"deep": make()}]}, tmp_path / "b.skops")
    with pytest.raises(
        ConfigError, match=r"b\.skops' holds .*; only arrays and numbers are loaded"
    ):
        read_skops(tmp_path / "b.skops")


def test_a_type_that_is_known_is_built_in_its_own_way_alone(tmp_path: Path) -> None:
    """A file may name a dict, and say that it be made by calling a function of the operator module."""
    pytest.importorskip("skops", reason="skops is not installed")
    kind = {"__class__": "dict", "__module__": "builtins", "__loader__": "OperatorFuncNode"}
    with ZipFile(tmp_path / "a.skops", "w") as archive:
        archive.writestr("schema.json", json.dumps({**kind, "attrs": {}, "protocol": 0}))
    with pytest.raises(ConfigError, match=r"holds \['builtins\.dict'\]"):
        read_skops(tmp_path / "a.skops")


def test_a_file_that_unpacks_to_more_than_any_model_is_not_unpacked(tmp_path: Path) -> None:
    pytest.importorskip("skops", reason="skops is not installed")
    with ZipFile(tmp_path / "a.skops", "w", ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", b" " * (1 << 27))
    with pytest.raises(ConfigError, match="unpacks to 134217728 bytes, more than 67108864"):
        read_skops(tmp_path / "a.skops")
