"""What the documents say is so: code and commands run as printed, links lead somewhere."""

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest

import sdcontrol

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[[list[str], Path], str]

BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
SHELLS = {"console", "sh", "bash", "shell"}
HISTORY = {"CHANGELOG.md", "log.md"}  # may name what is gone
GETS_THE_REPOSITORY = ("git clone ", "cd ")


def blocks(document: str, languages: set[str]) -> list[tuple[int, str]]:
    """Line and text of every code block of `document` in one of `languages`."""
    text = (ROOT / document).read_text("utf-8")
    return [
        (text.count("\n", 0, match.start("text")), dedent(match["text"]))
        for match in BLOCK.finditer(text)
        if match["language"] in languages
    ]


def program_of(document: str) -> str:
    """Its python blocks, from top to bottom, each on the lines where the document has it."""
    program = ""
    for line, text in blocks(document, {"python"}):
        program += "\n" * (line - program.count("\n")) + text
    return program


def commands() -> list[str]:
    """Every command of the README."""
    return [line for _, block in blocks("README.md", SHELLS) for line in commands_of(block)]


def commands_of(block: str) -> list[str]:
    """Where a block shows prompts its other lines are output, else every line is a command."""
    lines = [line.partition("  #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder that looks like the repository; what is written there stays there."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in {"runs", "build", "dist"}:
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_the_python_of_a_document_runs_as_printed(run: Run, desk: Path, document: str) -> None:
    """Its blocks are one program, whose line numbers are the document's."""
    program = program_of(document)
    assert program.strip(), f"{document} has no python block"
    script = desk / "blocks_of_document.py"
    script.write_text(program, "utf-8")
    run([sys.executable, script.name], desk)


def test_the_readme_commands_run_as_printed(run: Run, desk: Path) -> None:
    """`make` is asked what it would do: .ci/run runs the README's own make commands."""
    given = commands()
    assert {"make demo", "make test"} <= set(given)
    for command in given:
        if command.startswith("make "):
            run(["make", "--dry-run", *command.split()[1:]], ROOT)
        elif not command.startswith(GETS_THE_REPOSITORY):
            run(["bash", "-euc", command], desk)


def test_a_command_goes_on_after_a_backslash_and_ends_at_a_comment() -> None:
    assert commands_of("$ ls \\\n-l  # all\noutput\n") == ["ls  -l"]
    assert commands_of("make demo\n# not this\nmake test\n") == ["make demo", "make test"]


def test_documents_link_to_what_exists() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text("utf-8")):
            exists = "://" in target or (document.parent / target).exists()
            assert exists, f"{document.name} links to {target}"


def test_documents_name_files_that_exist() -> None:
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        named = re.findall(r"`((?:sdcontrol|tests|benchmarks)/[\w/]+\.\w+)`", document.read_text())
        missing = [path for path in named if not (ROOT / path).exists()]
        assert document.name in HISTORY or not missing, f"{document.name} names {missing}"


def test_releases_stand_in_the_changelog_newest_first() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\]", text, re.MULTILINE)
    numbers = [tuple(map(int, version)) for version in versions]
    assert all(newer > older for newer, older in pairwise(numbers))
    assert sdcontrol.__version__ in text
