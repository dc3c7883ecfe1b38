"""What the documents say is so: code and commands run as printed, links lead somewhere."""

import importlib.util
import re
import sys
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import dedent

import pytest

import sdcontrol
from benchmarks.figures import DOCUMENTS, filled

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[[list[str], Path], str]

BLOCK = re.compile(
    r"(?P<marker>^<!-- not run: (?P<reason>[^>]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)(?: (?P<file>[\w./-]+))?\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
SHELLS = {"console", "sh", "bash", "shell"}
HISTORY = {"CHANGELOG.md", "log.md"}  # may name what is gone
IN_ONE_PROCESS = """
import runpy, shlex, sys
from sdcontrol.cli import main
for given in sys.argv[1:]:
    print("$", given, flush=True)
    if given.endswith(".py"):
        runpy.run_path(given, run_name="__main__")
    elif code := main(shlex.split(given)[1:]):
        sys.exit(code)
"""
"""A document's program and our own commands: a process for each would mostly import torch."""

PROGRAM = "blocks_of_document.py"
GETS_THE_REPOSITORY = ("git clone ", "cd ")
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
RUN = ["README.md", "CONTRIBUTING.md", *PAGES]


def blocks(document: str) -> list[re.Match[str]]:
    """Every code block of `document` that is to be run or written."""
    text = (ROOT / document).read_text("utf-8")
    return [match for match in BLOCK.finditer(text) if not match["marker"]]


def program_of(document: str) -> str:
    """Its python blocks, from top to bottom, each on the lines where the document has it."""
    program = ""
    for match in blocks(document):
        if match["language"] == "python":
            line = match.string.count("\n", 0, match.start("text"))
            program += "\n" * (line - program.count("\n")) + dedent(match["text"])
    return program


def commands(document: str) -> list[str]:
    """Every command of `document`."""
    shown = [match for match in blocks(document) if match["language"] in SHELLS]
    return [line for match in shown for line in commands_of(dedent(match["text"]))]


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


def is_plainly_ours(command: str) -> bool:
    """The program or one of our commands, and nothing that only a shell can do."""
    return command.startswith(("sdcontrol ", PROGRAM)) and not set(command) & set("|<>&;$`")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", [name for name in RUN if blocks(name)])
def test_what_a_document_shows_runs_as_printed(run: Run, desk: Path, document: str) -> None:
    """Files are written, python blocks run as one program, then the commands.

    `make` is asked what it would do: .ci/run runs the README's own make commands.
    """
    for match in blocks(document):
        if match["file"]:
            (desk / match["file"]).write_text(dedent(match["text"]), "utf-8")
    shown = commands(document)
    if program_of(document).strip():
        (desk / PROGRAM).write_text(program_of(document), "utf-8")
        shown = [PROGRAM, *shown]
    for is_ours, together in groupby(shown, is_plainly_ours):
        if is_ours:
            run([sys.executable, "-c", IN_ONE_PROCESS, *together], desk)
            continue
        for command in together:
            if command.startswith("make "):
                run(["make", "--dry-run", *command.split()[1:]], ROOT)
            elif not command.startswith(GETS_THE_REPOSITORY):
                run(["bash", "-euc", command], desk)


def test_the_documents_show_what_they_are_for() -> None:
    """The README how to try it and use it, the others how to do it."""
    assert {"make demo", "make test"} <= set(commands("README.md"))
    shown = {name for name in RUN if program_of(name).strip() or commands(name)}
    tasks = {name for name in RUN if name.startswith("docs/how-to/")}
    assert shown >= {"README.md", "CONTRIBUTING.md", "docs/tutorial.md", *tasks}


@pytest.mark.parametrize("document", RUN)
def test_a_comparison_shown_again_is_resumed_or_begun_anew(document: str) -> None:
    """Its folder is there by then, with the settings of the run before. What is not run counts too."""
    every = BLOCK.finditer((ROOT / document).read_text("utf-8"))
    shown = [line for match in every for line in commands_of(dedent(match["text"]))]
    before: dict[str, list[str]] = {}
    for file, *options in (line.split()[2:] for line in shown if line.startswith("sdcontrol ab ")):
        settings = [word for word in options if word not in ("--resume", "--overwrite")]
        if file in before and "--overwrite" not in options:
            assert "--resume" in options, file
            assert settings == before[file]
        before[file] = settings


def test_pages_that_are_followed_one_after_the_other_record_into_folders_of_their_own() -> None:
    """A trace is recorded into a new folder: whoever did what another page says has its folder already."""
    into = re.compile(r"""(?:record=|Recorder\(.*, |record .*--output )"?([\w./-]+)""")
    folders = {name: set(into.findall(text)) for name, text in map(_shown, RUN)}
    every = sorted(folder for own in folders.values() for folder in own)
    assert {"runs/monday", "runs/recorded", "runs/judged"} <= set(every)
    assert every == sorted(set(every))


def _shown(document: str) -> tuple[str, str]:
    """Its name; its program and commands."""
    return document, "\n".join([program_of(document), *commands(document)])


def test_what_is_not_run_says_why_and_is_rare() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in RUN]
    skipped = [
        match["reason"] for text in texts for match in BLOCK.finditer(text) if match["marker"]
    ]
    assert all(len(reason.split()) > 2 for reason in skipped)
    assert len(skipped) == sum(text.count("<!-- not run") for text in texts)
    assert len(skipped) <= 6


def test_the_reference_is_what_its_script_makes(run: Run, tmp_path: Path) -> None:
    """The committed pages, all of them and no others."""
    run([sys.executable, str(ROOT / "docs" / "make_reference.py"), str(tmp_path)], ROOT)
    made = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "reference").iterdir()}
    assert kept == made, "run: python docs/make_reference.py"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.parent.name)
def test_the_figures_of_a_document_are_those_of_the_results(document: Path) -> None:
    text = document.read_text("utf-8")
    assert "<!-- figures: " in text
    assert filled(text) == text, "run: python -m benchmarks.figures"


def test_a_command_goes_on_after_a_backslash_and_ends_at_a_comment() -> None:
    assert commands_of("$ ls \\\n-l  # all\noutput\n") == ["ls  -l"]
    assert commands_of("make demo\n# not this\nmake test\n") == ["make demo", "make test"]


def test_documents_link_to_what_exists() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text("utf-8")):
            exists = "://" in target or (document.parent / target).exists()
            assert exists, f"{document.name} links to {target}"


def test_documents_name_files_that_exist() -> None:
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        named = re.findall(r"`((?:sdcontrol|tests|benchmarks)/[\w/]+\.\w+)`", document.read_text())
        missing = [path for path in named if not (ROOT / path).exists()]
        assert document.name in HISTORY or not missing, f"{document.name} names {missing}"


def test_documents_name_modules_that_exist() -> None:
    for name in RUN:
        for module in re.findall(r"`(sdcontrol(?:\.\w+)+)`", (ROOT / name).read_text("utf-8")):
            parent, _, last = module.rpartition(".")
            there = importlib.import_module(parent)
            assert hasattr(there, last) or importlib.util.find_spec(module), f"{name}: {module}"


def test_releases_stand_in_the_changelog_newest_first() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\]", text, re.MULTILINE)
    numbers = [tuple(map(int, version)) for version in versions]
    assert all(newer > older for newer, older in pairwise(numbers))
    assert sdcontrol.__version__ in text
