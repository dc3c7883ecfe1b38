"""The shape of the project: its names, sizes, links and wheel, and what no file may contain."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import sdcontrol
from sdcontrol import core, errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sdcontrol"

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40  # without its docstring
LONGER_FOR_A_REASON: dict[str, str] = {}
"""Path, or path::function, to the reason why it is longer than that."""

Run = Callable[[list[str], Path], str]

LINKED = ("engine", "policies", "traces")
HEAVY = ("torch", "transformers", "triton")
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_BUILTINS = {"eval", "exec", "__import__"}
UNSAFE_CALLS = {"torch.load", "pandas.read_pickle"}
UNSAFE_KEYWORDS = {"trust_remote_code", "allow_pickle"}


def sources(*folders: Path) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


# Versions


def test_the_oldest_versions_to_test_with_are_the_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [Requirement(line) for line in (*project["dependencies"], *chain(*extras.values()))]
    bounds = {one.name.lower(): Version(bound.version) for one in asked for bound in one.specifier}
    lines = (ROOT / "constraints.oldest.txt").read_text("utf-8").splitlines()
    oldest = {name: Version(v) for name, _, v in (line.partition("==") for line in lines[1:])}
    assert oldest == {name: bounds[name] for name in oldest}
    assert oldest.keys() >= {Requirement(line).name.lower() for line in project["dependencies"]}


# Names


@pytest.mark.parametrize("module", [core, errors], ids=lambda module: module.__name__)
def test_all_lists_what_a_module_defines_in_public(module: ModuleType) -> None:
    assert module.__file__
    defined: set[str] = set()
    for node in ast.parse(Path(module.__file__).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
    assert {name for name in defined if not name.startswith("_")} == set(module.__all__)


def test_the_package_offers_the_vocabulary_the_errors_and_the_four_entrances() -> None:
    helpers = {"Confidence", "FloatArray", "family_of"}
    entrances = {"Controller", "Engine", "SpeculativeDecoder", "policies"}
    assert set(sdcontrol.__all__) == {*core.__all__, *errors.__all__, *entrances} - helpers
    assert len(set(sdcontrol.__all__)) == len(sdcontrol.__all__)
    assert set(sdcontrol.__all__) <= set(dir(sdcontrol))
    loaded = {name for name, value in vars(sdcontrol).items() if isinstance(value, type)}
    assert loaded <= set(sdcontrol.__all__)


@pytest.mark.parametrize("name", sdcontrol.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(sdcontrol, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sdcontrol.no_such_name  # type: ignore[attr-defined]


def test_errors_descend_as_their_docstring_draws_them() -> None:
    assert errors.__doc__
    drawn: dict[str, str] = {}
    above: dict[int, str] = {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"^(?P<rail>[ │├└─]*)(?P<name>[A-Z]\w+)(?:  .*)?$", line)
        if match is None:
            continue
        depth = (len(match["rail"]) - 4) // 4
        above[depth] = match["name"]
        drawn[match["name"]] = above[depth - 1] if depth else "Exception"
    assert drawn == {name: getattr(errors, name).__base__.__name__ for name in errors.__all__}


def test_import_sdcontrol_loads_nothing_heavy(run: Run) -> None:
    program = f"import sdcontrol, sys; print([m for m in {HEAVY} if m in sys.modules])"
    assert run([sys.executable, "-c", program], ROOT).strip() == "[]"


# Sizes


def test_files_hold_one_noun_each() -> None:
    lengths = [
        (path.relative_to(ROOT).as_posix(), len(path.read_text("utf-8").splitlines()))
        for path in PACKAGE.rglob("*.py")
    ]
    too_long = beyond(MAX_FILE_LINES, lengths)
    assert not too_long, too_long


def test_functions_do_one_thing_each() -> None:
    lengths = [
        (f"{path}::{node.name}", function_lines(node))
        for path, tree in sources(PACKAGE)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    too_long = beyond(MAX_FUNCTION_LINES, lengths)
    assert not too_long, too_long


def test_what_may_be_longer_exists() -> None:
    assert all((ROOT / name.partition("::")[0]).is_file() for name in LONGER_FOR_A_REASON)
    assert all(LONGER_FOR_A_REASON.values())


def beyond(limit: int, lengths: list[tuple[str, int]]) -> str:
    """One line for each that is longer than `limit` without a reason."""
    return "\n".join(
        f"{name}: {length} lines, at most {limit}"
        for name, length in lengths
        if length > limit and name not in LONGER_FOR_A_REASON
    )


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the last line, the docstring left out."""
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return length
    docstring = node.body[0]
    return length - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def test_every_module_says_what_it_is() -> None:
    silent = [path for path, tree in sources(PACKAGE) if tree.body and not ast.get_docstring(tree)]
    assert not silent


# Safety


def test_nothing_is_unpickled_evaluated_or_trusted() -> None:
    found = [
        f"{path}:{getattr(node, 'lineno', 0)}"
        for path, tree in sources(PACKAGE)
        for node in ast.walk(tree)
        if is_unsafe(node)
    ]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "eval('1')",
        "torch.load('x')",
        "numpy.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_the_search_for_unsafe_code_finds_it(line: str) -> None:
    assert any(map(is_unsafe, ast.walk(ast.parse(line))))


def is_unsafe(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any(name.partition(".")[0] in UNSAFE_MODULES for name in imported_modules(node))
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_BUILTINS:
        return True
    keywords = {
        keyword.arg
        for keyword in node.keywords
        if not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
    }
    return ast.unparse(node.func) in UNSAFE_CALLS or bool(keywords & UNSAFE_KEYWORDS)


# Links and wheel


@pytest.mark.parametrize("name", LINKED)
def test_the_links_at_the_top_point_into_the_package(name: str) -> None:
    link = ROOT / name
    if link.is_symlink():
        assert os.readlink(link) == f"sdcontrol/{name}"
    else:  # a checkout that cannot have links holds their targets as text
        assert link.read_text("utf-8") == f"sdcontrol/{name}"
    assert (PACKAGE / name / "__init__.py").is_file()


def test_nothing_imports_through_the_links() -> None:
    folders = (PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "experiments")
    bare = [
        f"{path}: import {module}"
        for path, tree in sources(*folders)
        for module in imported_modules(tree)
        if module.partition(".")[0] in LINKED
    ]
    assert not bare


def test_the_wheel_holds_the_package_and_nothing_else(run: Run, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copytree(PACKAGE, tree / "sdcontrol", ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, tree)
    for name in LINKED:
        (tree / name).symlink_to(f"sdcontrol/{name}")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "--no-index", "--wheel-dir", str(tmp_path), "."], tree)
    (wheel,) = tmp_path.glob("sdcontrol-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
        assert "sdcontrol = sdcontrol.__main__:main" in archive.read(entry_points).decode()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"sdcontrol", f"sdcontrol-{sdcontrol.__version__}.dist-info"}
    shipped = {".py", ".typed", ".json", ".md", ".safetensors", ".parquet", ".skops"}
    shipped |= {".html", ".css", ".js"}
    in_tree = {p.relative_to(tree).as_posix() for p in (tree / "sdcontrol").rglob("*.*")}
    assert {name for name in in_tree if Path(name).suffix in shipped} <= names
    assert "sdcontrol/py.typed" in names
    assert any(re.match(r"sdcontrol/engine/bundled/.+\.safetensors", name) for name in names)


def test_another_interpreter_than_the_environments_is_not_passed_over(tmp_path: Path) -> None:
    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--dry-run", f"VENV={tmp_path}", *arguments]
        mine = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        return subprocess.run(
            command, cwd=ROOT, env=mine, capture_output=True, text=True, check=False
        )

    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho 3.99.0\n")
    other.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert make("lint").returncode == make("lint", f"PYTHON={sys.executable}").returncode == 0
    refused = make("lint", f"PYTHON={other}")
    assert refused.returncode == 2
    assert f"{other} is 3.99.0: name another folder" in refused.stderr
    assert make("clean", f"PYTHON={other}").returncode == 0
