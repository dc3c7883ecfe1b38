"""The command `sdcontrol`: what it prints, where, and with which exit code it ends."""

import copy
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import sdcontrol
from sdcontrol.cli import _parser, main
from sdcontrol.cli.files import check_writable
from sdcontrol.cli.progress import progress
from sdcontrol.cli.prompts import Prompt, read_prompts
from sdcontrol.cli.results import InOrder, JsonLinesWriter, TextWriter
from sdcontrol.core import BatchView, Choice, Observation, Plan, RequestView, Timing
from sdcontrol.engine.stats import EngineStats, Tally
from sdcontrol.errors import ConfigError
from sdcontrol.integrations.streaming import StreamEvent
from sdcontrol.integrations.summary import request_lines, summary_lines, summary_record
from sdcontrol.integrations.transformers import SpeculativeDecoder
from tests.engine_support import noised, tiny_model
from tests.tokenizer_support import byte_tokenizer

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[[list[str], Path], str]
NEW = "12"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `model` and `draft`, small random models that write bytes."""
    place = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    for name, each in (("model", model), ("draft", noised(model))):
        each.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    return place


@pytest.fixture
def generate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `generate` with the small model; gives exit code, output, errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        given = ["--model", str(folder / "model"), "--max-new-tokens", NEW, *map(str, arguments)]
        code = main(["generate", *given])
        out, err = capsys.readouterr()
        return code, out, err

    return run


Generate = Callable[..., tuple[int, str, str]]


def written(prompt: str, new_tokens: int = int(NEW)) -> str:
    """What plain `generate` writes."""
    tokenizer = byte_tokenizer()
    model: PreTrainedModel = tiny_model(vocab_size=len(tokenizer))
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


# ---- the program


def test_the_version_is_printed_and_nothing_heavy_is_loaded(run: Run) -> None:
    program = (
        "import sys, sdcontrol.cli\n"
        "try: sdcontrol.cli.main(['--version'])\n"
        "finally: print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    printed = run([sys.executable, "-c", program], ROOT).splitlines()
    assert printed == [f"sdcontrol {sdcontrol.__version__}", "[]"]


def test_the_package_runs_as_a_program(run: Run) -> None:
    assert "generate" in run([sys.executable, "-m", "sdcontrol", "--help"], ROOT)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("inspect bundled:off > /dev/full", 1),
        ("inspect bundled:off 2> /dev/full > /dev/full", 1),
        ("inspect /nowhere 2> /dev/full", 2),
    ],
)
def test_output_that_does_not_fit_is_told_once(run: Run, command: str, code: int) -> None:
    """Where it can be; Python's own attempt at the end would say more, and end with 120."""
    printed = run(
        ["bash", "-c", f'{sys.executable} -m sdcontrol {command}; echo "ended with $?"'], ROOT
    )
    *told, end = printed.splitlines()
    assert end == f"ended with {code}"
    assert told == [] or told == ["sdcontrol: error: [Errno 28] No space left on device"]


def test_an_interrupt_while_the_commands_are_loaded_ends_with_130(run: Run) -> None:
    program = (
        "import builtins, sdcontrol.__main__\n"
        "load = builtins.__import__\n"
        "def interrupted(name, *more):\n"
        "    if name == 'sdcontrol.cli.replay': raise KeyboardInterrupt\n"
        "    return load(name, *more)\n"
        "builtins.__import__ = interrupted\n"
        "print(sdcontrol.__main__.main())"
    )
    assert run([sys.executable, "-c", program], ROOT) == "sdcontrol: interrupted\n130\n"


def test_every_option_of_every_command_says_what_it_does() -> None:
    (commands,) = _parser()._subparsers._group_actions  # type: ignore[union-attr]
    silent = [
        f"{name} {action.option_strings or action.dest}"
        for name, command in commands.choices.items()  # type: ignore[union-attr]
        for action in command._actions
        if not action.help
    ]
    assert not silent


# ---- output


def test_one_prompt_gives_its_text_alone(generate: Generate) -> None:
    assert generate("Say it.") == (0, written("Say it.") + "\n", "")


def test_several_prompts_stand_under_their_names_in_order(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole.txt").write_text("two\nlines\n", "utf-8")
    (tmp_path / "lines.jsonl").write_text('{"prompt": "c", "id": 7}\n\n{"prompt": "d"}\n')
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    monkeypatch.chdir(tmp_path)
    files = ("--file", "whole.txt", "--file", "lines.jsonl")
    code, out, err = generate(*files, "--batch-size", 2, "a", "-")
    expected = {
        "prompt-1": "a",
        "prompt-2": "from a pipe",
        "whole.txt": "two\nlines\n",
        "7": "c",
        "lines.jsonl:3": "d",
    }
    assert (code, err) == (0, "")
    assert out == "".join(f"==> {name} <==\n{written(p)}\n" for name, p in expected.items())


def test_json_lines_say_what_every_drafter_did(generate: Generate, folder: Path) -> None:
    options = ("--format", "jsonl", "--draft-model", folder / "draft", "--drafter", "none")
    code, out, _ = generate(*options, "--policy", "static:draft_model:3", "one", "two")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    for record, prompt in zip(records, ("one", "two"), strict=True):
        drafts = record.pop("drafters")["draft_model"]
        assert 0 <= drafts["accepted"] <= drafts["proposed"]
        assert drafts["proposed"] > 0
        assert record.pop("id").startswith("prompt-")
        assert record == {
            "prompt": prompt,
            "output": written(prompt),
            "finish_reason": "length",
            "tokens": int(NEW),
        }


def test_the_policy_and_the_verification_change_no_text(generate: Generate) -> None:
    texts = {
        generate("--policy", policy, "--verification", verification, "a a a a")[1]
        for policy, verification in (("off", "coupled"), ("static:ngram:4", "rejection"))
    }
    assert texts == {written("a a a a") + "\n"}


def test_output_goes_to_a_file_and_the_result_to_another(
    generate: Generate, tmp_path: Path
) -> None:
    text, result = tmp_path / "text", tmp_path / "result.json"
    code, out, _ = generate("--output", text, "--json", result, "--policy", "off", "abc")
    assert (code, out) == (0, "")
    assert text.read_text("utf-8") == written("abc") + "\n"
    told = json.loads(result.read_text("utf-8"))
    assert told["requests"][0]["output"] == written("abc")
    assert told["statistics"]["emitted_tokens"] == int(NEW) - 1
    assert told["policy"] == "off"
    assert told["version"] == sdcontrol.__version__


def test_a_report_is_for_people_and_goes_to_standard_error(generate: Generate) -> None:
    code, out, err = generate("--report", "--policy", "static:ngram:3", "a b a b a b")
    assert (code, out) == (0, written("a b a b a b") + "\n")
    assert f"{int(NEW) - 1} tokens in" in err
    assert "verify" in err


def test_generation_ends_with_a_stop_text(generate: Generate) -> None:
    text = written("stop")
    stop = text[4]
    _, out, _ = generate("--stop", stop, "stop")
    assert out == text[: text.index(stop) + 1] + "\n"


def test_a_run_begins_with_what_the_last_one_taught(generate: Generate, tmp_path: Path) -> None:
    given = "ab", "--warm-start", tmp_path / "learnt"
    cold = generate(*given)
    (path,) = (tmp_path / "learnt").iterdir()
    size = path.stat().st_size
    assert generate(*given) == cold == generate("ab")
    assert path.stat().st_size > size  # the steps of both
    (tmp_path / "file").write_text("")
    code, out, err = generate("ab", "--warm-start", tmp_path / "file")
    assert (code, out) == (2, "")
    assert "give a folder that can be written to" in err


def test_sampled_text_depends_on_the_seed_alone(generate: Generate) -> None:
    def sampled(*options: object) -> str:
        given = ("--format", "jsonl", "--temperature", 1.5, "--top-k", 30, *options)
        records = [json.loads(line) for line in generate(*given, "x", "x")[1].splitlines()]
        return [record["output"] for record in records]

    first, second = sampled("--seed", 4)
    assert first != second
    assert sampled("--seed", 4, "--policy", "off", "--batch-size", 1) == [first, second]
    assert sampled("--seed", 5)[0] == second


def test_the_bundled_models_need_no_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    prompt = "import os\nimport sys\nimport os\nimport sys\nimport os\n"
    assert main(["generate", "--max-new-tokens", "24", "--json", str(result), prompt]) == 0
    told = json.loads(result.read_text("utf-8"))
    assert capsys.readouterr().out == told["requests"][0]["output"] + "\n"
    assert 1 <= told["requests"][0]["tokens"] <= 24
    assert set(told["statistics"]["drafters"]) <= {"ngram", "draft_model"}


# ---- errors


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("sdcontrol: ")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["generat"], "invalid choice: 'generat'"),
        (["generate"], "no prompt"),
        (["generate", "a", "--polic", "off"], "--polic"),
        (["generate", "a", "--policy", "goodputt"], "did you mean 'goodput'"),
        (["generate", "a", "--policy", "static:sparse_kv:64:4"], "'sparse_kv:64'"),
        (["generate", "a", "--policy", "static:ngram"], "static:DRAFTER:TOKENS"),
        (["generate", "a", "--file", "gone.txt"], "gone.txt cannot be read: No such file"),
        (["generate", "a", "--file", "bad.jsonl"], "bad.jsonl:2: no JSON"),
        (["generate", "a", "--file", "digits.jsonl"], "digits.jsonl:1: no JSON: Exceeds"),
        (["generate", "a", "--file", "deep.jsonl"], "deep.jsonl:1: no JSON: "),
        (["generate", "-", "-"], "- stands there twice"),
        (["generate", "a", "--file", "keys.jsonl"], "keys.jsonl:1: no prompt"),
        (["generate", "a", "--file", "twice.jsonl"], "two prompts have the id 'x'"),
        (["generate", "a", "--file", "latin.txt"], "latin.txt is no UTF-8 text"),
        (["generate", "a", "--output", "gone/text"], "gone/text cannot be written"),
        (["generate", "a", "--json", "."], ". cannot be written"),
        (["generate", "a", "--json", "-"], "give ./- for one of that name"),
        (["generate", "a", "--output", "x", "--json", "./x"], "./x cannot be written: it would"),
        (["generate", "--file", "good.txt", "--output", "good.txt"], "would replace what is read"),
        (["record", "--file", "good.txt", "--json", "good.txt", "--output", "t"], "would replace"),
        (["record", "a", "--json", "t", "--output", "t"], "t cannot be written: it would replace"),
        (["advise", "--hardware", "good.txt", "--json", "good.txt"], "would replace what is read"),
        (["ab", "ab.yaml", "--json", "ab.yaml"], "ab.yaml cannot be written: it would replace"),
        (["ab", "ab.yaml", "--json", "good.txt"], "good.txt cannot be written: it would replace"),
        (["generate", "a", "--top-k", "3", "--temperature", "0"], "--temperature above 0"),
        (["generate", "a", "--temperature", "-1"], "--temperature is -1.0"),
        (["generate", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["generate", "a", "--stop", ""], "at least one character"),
        (["generate", "a", "--drafter", "none", "--drafter", "ngram"], "stands alone"),
        (["generate", "a", "--model", "./gone"], "no model folder './gone'"),
        (["generate", "a", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["generate", "a", "--dtype", "int4"], "invalid choice: 'int4'"),
    ],
)
def test_what_cannot_be_asked_ends_with_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (tmp_path / "digits.jsonl").write_text(f'{{"prompt": "a", "id": {"9" * 5000}}}\n')
    (tmp_path / "deep.jsonl").write_text('{"prompt": ' + "[" * 100_000 + "\n")
    (tmp_path / "good.txt").write_text("a")
    (tmp_path / "ab.yaml").write_text(
        "{name: x, arms: [{name: a, policy: off}], workload: {files: [good.txt]}}"
    )
    (tmp_path / "keys.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "twice.jsonl").write_text('{"prompt": "a", "id": "x"}\n' * 2)
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sdcontrol: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_what_is_no_plain_file_takes_several_outputs() -> None:
    check_writable(os.devnull, os.devnull, None, inputs=[os.devnull])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "ngrams"], "no drafter is called 'ngrams'"),
        (["--drafter", "sparse_kv:lots"], "sparse_kv"),
        (["--batch-size", "0"], "max_batch_size=0"),
        (["--draft-model", "EMPTY"], "EMPTY' cannot be loaded"),
    ],
)
def test_what_the_engine_refuses_ends_with_one_line_and_code_2(
    generate: Generate, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "EMPTY").mkdir()
    given = [str(tmp_path / a) if a == "EMPTY" else a for a in arguments]
    code, out, err = generate(*given, "a")
    assert (code, out) == (2, "")
    assert lines_of(err) == err.splitlines()
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_refused_prompt_is_named_and_the_others_run(generate: Generate, tmp_path: Path) -> None:
    lines = tmp_path / "p.jsonl"
    entries = [("empty", ""), ("good", "a"), ("endless", "b" * 300_000)]
    lines.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in entries))
    code, out, err = generate("--format", "jsonl", "--file", lines)
    records = {record["id"]: record for record in map(json.loads, out.splitlines())}
    assert code == 1
    assert list(records) == ["empty", "good", "endless"]
    assert records["good"]["output"] == written("a")
    assert [records[name]["finish_reason"] for name in ("empty", "endless")] == ["refused"] * 2
    for name, line in zip(("empty", "endless"), lines_of(err), strict=True):
        assert line.startswith(f"sdcontrol: refused: request '{name}'")
    assert "KV cache holds" in records["endless"]["error"]


def test_an_interrupt_keeps_what_there_is(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_stream_after(monkeypatch, 6, KeyboardInterrupt())
    code, out, err = generate("--format", "jsonl", "--policy", "off", "a", "b")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 130
    assert [record["finish_reason"] for record in records] == ["cancelled"] * 2
    assert sum(record["tokens"] for record in records) == 6
    assert [record["drafters"] for record in records] == [None, None]
    assert err == "sdcontrol: interrupted\n"


@pytest.mark.parametrize("is_debugging", [False, True])
def test_a_failure_ends_with_code_1_and_shows_its_place_only_when_asked(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, is_debugging: bool
) -> None:
    stop_stream_after(monkeypatch, 3, RuntimeError("the device is gone\nmore"))
    code, _, err = generate(*["--debug"] * is_debugging, "a")
    assert code == 1
    assert lines_of(err)[-1].startswith("sdcontrol: error: RuntimeError: the device is gone")
    assert ("Traceback" in err) == is_debugging


def test_a_failure_keeps_what_had_ended(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what was held back for its turn."""

    def failing(self: SpeculativeDecoder, *_: object, **__: object) -> Iterator[StreamEvent]:
        yield StreamEvent("2", 1, (5, 6), "whole", "length")
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(SpeculativeDecoder, "stream", failing)
    code, out, _ = generate("--format", "jsonl", "a", "b")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [record["finish_reason"] for record in records] == ["cancelled", "length"]
    assert [record["output"] for record in records] == ["", "whole"]


def stop_stream_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """The stream raises `error` in place of its event number `count`."""
    stream = SpeculativeDecoder.stream

    def short(self: SpeculativeDecoder, *args: object, **options: object) -> Iterator[StreamEvent]:
        for index, event in enumerate(stream(self, *args, **options)):
            if index == count:
                raise error
            yield event

    monkeypatch.setattr(SpeculativeDecoder, "stream", short)


def test_a_reader_who_leaves_ends_it_quietly(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        code = generate("a")[0]
    assert code == 1


# ---- the parts


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter where LC_ALL is C
def test_what_an_encoding_lacks_is_written_as_an_escape(
    monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["advise", "--hardware", "h100", "--model", "no model \u00d7"]) == 2
    print("2 \u00d7", flush=True)
    assert written.getvalue() == b"2 \\xd7\n"


def test_closed_standard_streams_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["inspect", "bundled:mixed"]) == 0
    sys.stdout.close()
    with pytest.raises(ConfigError, match="standard input is closed"):
        read_prompts(["-"], [], None)


def test_prompts_keep_their_ids_and_every_character(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text(" ü\n", "utf-8")
    lines.write_text('{"id": 3, "prompt": "x", "more": 1}\n{"id": "k", "prompt": "\\u2028"}\n')
    assert read_prompts(["-"], [str(text), str(lines)], io.StringIO("in\n")) == [
        Prompt("prompt-1", "in\n"),
        Prompt(str(text), " ü\n"),
        Prompt(3, "x"),
        Prompt("k", "\u2028"),
    ]


def test_files_are_read_as_they_are_whoever_wrote_them(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.JSONL"
    text.write_bytes("\ufeffa\r\nb\r\n".encode())
    lines.write_bytes('\ufeff{"prompt": "x", "id": 1}\r\n{"prompt": "y", "id": 2}\r\n'.encode())
    assert read_prompts([], [str(text), str(lines)], None) == [
        Prompt(str(text), "a\r\nb\r\n"),
        Prompt(1, "x"),
        Prompt(2, "y"),
    ]


@pytest.mark.parametrize("name", [True, 1.5, None, ["a"]])
def test_an_id_is_a_string_or_a_whole_number(tmp_path: Path, name: object) -> None:
    lines = tmp_path / "b.jsonl"
    lines.write_text(json.dumps({"id": name, "prompt": "x"}))
    with pytest.raises(ConfigError, match=r"b\.jsonl:1: id="):
        read_prompts([], [str(lines)], io.StringIO())


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prompt-1"):
        read_prompts(["\ud800"], [], io.StringIO())
    (tmp_path / "b.jsonl").write_text('{"id": "\\ud800", "prompt": "x"}')
    with pytest.raises(ConfigError, match=r"id of .* is no text"):
        read_prompts([], [str(tmp_path / "b.jsonl")], None)


def test_standard_input_is_read_as_files_are() -> None:
    """Whatever the stream's own encoding and line ends."""
    for text in ("a\r\n\u00fc\n", "\ufeffa\r\n\u00fc\n"):
        stream = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="ascii")
        assert read_prompts(["-"], [], stream) == [Prompt("prompt-1", "a\r\n\u00fc\n")]
    broken = io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="latin-1")
    with pytest.raises(ConfigError, match="standard input is no UTF-8 text"):
        read_prompts(["-"], [], broken)


def test_a_file_whose_name_is_no_text_has_a_name_that_is(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text("x")
    (prompt,) = read_prompts([], [str(path)], None)
    assert str(prompt.id).endswith(r"caf\udce9.txt")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_results_come_in_the_order_of_the_prompts(order: Sequence[int]) -> None:
    texts, lines = io.StringIO(), io.StringIO()
    prompts = [Prompt(index, "") for index in range(3)]
    for ordered in (
        InOrder(prompts, TextWriter(texts, has_headers=True)),
        InOrder(prompts, JsonLinesWriter(lines)),
    ):
        for part in ("x", "y"):
            for index in order:
                ordered.add(index, f"{part}{index}", 1)
        for index in order:
            ordered.end(index, "eos")
    assert texts.getvalue() == "".join(f"==> {i} <==\nx{i}y{i}\n" for i in range(3))
    assert [json.loads(line)["output"] for line in lines.getvalue().splitlines()] == [
        "x0y0",
        "x1y1",
        "x2y2",
    ]


def test_what_never_began_leaves_no_text_when_interrupted() -> None:
    file = io.StringIO()
    ordered = InOrder([Prompt(i, "") for i in range(3)], TextWriter(file, has_headers=True))
    ordered.add(1, "begun", 1)
    ordered.interrupt()
    assert file.getvalue() == "==> 1 <==\nbegun\n"


def test_the_text_whose_turn_it_is_is_printed_at_once() -> None:
    file = io.StringIO()
    ordered = InOrder([Prompt(0, ""), Prompt(1, "")], TextWriter(file, has_headers=False))
    ordered.add(1, "later", 1)
    ordered.add(0, "now", 1)
    assert file.getvalue() == "now"
    ordered.end(0, "eos")
    assert file.getvalue() == "now\nlater"


def test_progress_is_shown_only_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    for is_shown in (False, True):
        with progress(2, is_shown=is_shown) as shown:
            shown.advance(5, has_ended=True)
            shown.advance(3, has_ended=True)
        assert capsys.readouterr().out == ""


def stats() -> EngineStats:
    """Two steps of two requests: 4 of 6 draft tokens accepted by one of them."""
    requests = tuple(RequestView(name, 9, 1, 50, drafters=("ngram",)) for name in "ab")
    made = EngineStats()
    for accepted in (3, 1):
        view = BatchView(0, requests, 99)
        made.add(
            Observation(
                view=view,
                plan=Plan((Choice.of("ngram", 3), Choice.off())),
                drafted=(3, 0),
                proposed=(3, 0),
                accepted=(accepted, 0),
                emitted=(accepted + 1, 1),
                timing=Timing({"ngram": 0.1}, 0.7, 0.1, 0.1),
            )
        )
    return made


def test_a_summary_says_speed_acceptance_and_where_time_went() -> None:
    first, _, ngram, off, time = summary_lines(stats())
    assert "8 tokens in 2 steps and 2.00 s: 4.0 tokens/s, 2.00 tokens per request" in first
    assert ngram.split() == ["ngram", "2", "6", "4", "67%", "3.00"]
    assert off.split() == ["off", "2"]
    assert time.startswith("time: verify 70%, ")


def test_a_draft_of_which_nothing_was_submitted_is_no_verification() -> None:
    """Else the report's tokens per draft would be others than those of metrics and comparisons."""
    made = stats()
    view = BatchView(2, (RequestView("a", 9, 1, 50, drafters=("ngram",)),), 99)
    trimmed = Observation(view, Plan((Choice.of("ngram", 3),)), (3,), (0,), (0,), (1,), Timing())
    made.add(trimmed)
    ngram = made.drafters["ngram"]
    assert (ngram.steps, ngram.drafted, ngram.proposed) == (2, 9, 6)
    assert ngram.acceptance_length == 3.0


def test_a_report_is_whole_while_another_thread_counts_steps() -> None:
    """As that of a server is, which a thread of its own asks for."""
    tally, is_done, before = Tally(), threading.Event(), sys.getswitchinterval()

    def count() -> None:
        for step in range(3000):
            view = BatchView(step, (RequestView(f"r{step}", 9, 5, 50),), 99)
            plan = Plan((Choice.of("ngram", 1 + step % 16),))
            tally.add(Observation(view, plan, (1,), (1,), (1,), (2,), Timing()))
        is_done.set()

    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=count)
    try:
        thread.start()
        while not is_done.is_set():
            report = tally.copy()
            assert sum(report.lengths.values()) == report.steps == report.decoded_requests
            assert report.emitted == 2 * report.steps
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert tally.copy().steps == 3000


def test_of_many_faults_the_first_are_kept_and_all_are_counted() -> None:
    """A planner may fail in every step, for as long as a server runs."""
    made, view = EngineStats(), BatchView(0, (), 99)
    for step in range(1500):
        faults = (f"planner failed to plan: {step}", "planner failed to observe: it")
        made.add(Observation(view, Plan(()), (), (), (), (), Timing(), faults=faults))
    assert len(made.faults) == 1000
    assert summary_lines(made)[-1] == "faults: 3000, the first: planner failed to plan: 0"
    assert summary_record(made)["num_faults"] == 3000


def test_the_record_of_a_summary_is_json_with_the_same_numbers() -> None:
    record: Mapping[str, object] = json.loads(json.dumps(summary_record(stats())))
    assert record["tokens_per_second"] == pytest.approx(4.0)
    assert record["drafters"] == {
        "ngram": {
            "steps": 2,
            "drafted": 6,
            "proposed": 6,
            "accepted": 4,
            "acceptance_rate": pytest.approx(4 / 6),
            "acceptance_length": pytest.approx(3.0),
        }
    }


def test_the_report_of_a_request_says_what_was_chosen_since_when_and_why() -> None:
    """One change of choice at the second step; the steps of each choice add up to all steps."""
    request = RequestView("a", 9, 5, 50, drafters=("ngram",))
    made = EngineStats()
    for plan in (
        Plan((Choice.off(),), "no match"),
        Plan((Choice("ngram", 2),), "a match of 9 tokens"),
        Plan((Choice.of("ngram", 2),), "a match of 10 tokens"),
    ):
        drafted = (plan.choices[0].num_draft_tokens,)
        view = BatchView(0, (request,), 99)
        made.add(Observation(view, plan, drafted, drafted, (0,), (1,), Timing()))
    totals, acceptance, off, ngram = request_lines(made)
    assert totals == "a: 3 tokens in 3 steps; ngram:2 67%, off 33%"
    assert acceptance == "  ngram: 0 of 4 draft tokens accepted"
    assert off == "  from token 5 on off: no match"
    assert ngram == "  from token 5 on ngram:2: a match of 9 tokens"
    (record,) = json.loads(json.dumps(summary_record(made)))["requests"]
    assert sum(choice["steps"] for choice in record["choices"]) == record["steps"] == 3
    assert [change["drafter"] for change in record["changes"]] == ["off", "ngram"]


def test_histories_are_kept_of_the_latest_requests_only() -> None:
    made = EngineStats()
    for index in range(1100):
        view = BatchView(index, (RequestView(str(index), 9, 5, 50),), 99)
        made.add(Observation(view, Plan.off(view), (0,), (0,), (0,), (1,), Timing()))
    assert len(made.requests) == 1024
    assert "1099" in made.requests
    assert "75" not in made.requests


def test_a_request_that_goes_on_keeps_its_history_however_many_come_after_it() -> None:
    made, long = EngineStats(), RequestView("long", 9, 5, 5000)
    for index in range(1100):
        view = BatchView(index, (long, RequestView(str(index), 9, 5, 50)), 99)
        made.add(Observation(view, Plan.off(view), (0,) * 2, (0,) * 2, (0,) * 2, (1, 1), Timing()))
    assert len(made.requests) == 1024
    assert made.requests["long"].steps == made.requests["long"].emitted == 1100


def test_a_copied_history_stays_as_it_was() -> None:
    made, request = EngineStats(), RequestView("a", 9, 5, 50, drafters=("ngram",))
    said: list[list[str]] = []
    copied: list[EngineStats] = []
    for length in (2, 2, 0, 3, 3):
        view, plan = BatchView(0, (request,), 99), Plan((Choice.of("ngram", length),))
        made.add(Observation(view, plan, (length,), (length,), (0,), (1,), Timing()))
        said.append(request_lines(made))
        copied.append(copy.deepcopy(made))
    assert [request_lines(one) for one in copied] == said
    assert len({str(lines) for lines in said}) == len(said)
    shared, owned = copied[-1].requests["a"].changes, made.requests["a"].changes
    assert all(mine is theirs for mine, theirs in zip(shared, owned, strict=True))  # not 23,000 new
    assert shared is not owned


def test_an_engine_that_did_nothing_has_a_summary_too() -> None:
    assert summary_lines(EngineStats())[1:] == ["no drafts"]
    assert summary_record(EngineStats())["tokens_per_second"] == 0.0
