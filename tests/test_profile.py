"""`sdcontrol profile`: what it measures, and the file that it leaves."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor
from transformers import PreTrainedModel

import sdcontrol
from sdcontrol.cli import main
from sdcontrol.engine import ceilings, profiling
from sdcontrol.engine.ceilings import ceilings_of, measure_ceilings, to_measure
from sdcontrol.engine.packing import pack
from sdcontrol.engine.profiling import (
    StepShape,
    describe_machine,
    measure_steps,
    step_shapes,
)
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.errors import ConfigError
from sdcontrol.estimators import machine_profile, shapes
from sdcontrol.estimators.hardware import Hardware
from sdcontrol.estimators.machine_profile import (
    MachineProfile,
    ModelTimes,
    StepTime,
    calibrate,
    read_profile,
    relative_errors,
)
from sdcontrol.estimators.roofline import Calibration, Forward
from tests.engine_support import tiny_model
from tests.tokenizer_support import byte_tokenizer

CPU = torch.device("cpu")
GRID = ("--batch", "1,3", "--tokens", "1,4", "--context", "20,60", "--rounds", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's ceilings are known already: that saves a second."""
    known = ceilings.Ceilings(1e12, 5e10, 32e9)
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda device, dtype: known)


# ---- what is measured


def test_a_machine_multiplies_and_copies_at_plausible_rates() -> None:
    """Any machine that runs these tests copies between 100 MB/s and 100 TB/s."""
    found = measure_ceilings(CPU, torch.float32)
    assert 1e8 < found.bytes_per_second < 1e14
    assert 1e8 < found.flops_per_second < 1e17
    assert found.memory_bytes > 1e8
    assert describe_machine(CPU)["torch"] == torch.__version__


def test_ceilings_are_timed_by_the_devices_own_clock_where_it_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the host's, a launch and a wait would be in them: some percent of a GPU's copy."""
    seen: list[str] = []

    class Marks:
        def add(self) -> None:
            seen.append("mark")

        def seconds(self) -> float:
            return 0.5

    monkeypatch.setattr(ceilings, "marks_of", lambda device: Marks())
    monkeypatch.setattr(torch, "mm", lambda *_, out: seen.append("product"))
    found = measure_ceilings(CPU, torch.float32)
    assert found.flops_per_second == 2.0 * 1024**3 / 0.5
    assert found.bytes_per_second == 2.0 * 2**27 / 0.5
    assert seen[-4:] == ["product", "mark", "product", "mark"]  # busy when the clock starts


def test_an_engine_measures_once_and_takes_a_quarter_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    plain = Tensor.copy_

    def copying(target: Tensor, source: Tensor) -> Tensor:
        sizes.append(source.nbytes)
        return plain(target, source)

    monkeypatch.setattr(Tensor, "copy_", copying)
    ceilings_of.cache_clear()
    found = ceilings_of(CPU, torch.float32)
    assert set(sizes) == {1 << 25}
    assert 1e8 < found.flops_per_second < 1e17
    assert ceilings_of(CPU, torch.float32) is found


def test_only_a_gpus_ceilings_are_what_its_steps_start_from() -> None:
    assert to_measure(CPU, torch.float32) is None
    assert to_measure(torch.device("cuda:1"), torch.bfloat16) is not None  # nothing is measured yet


def test_what_is_copied_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may be faster with bytes that are all the same."""
    copied: list[Tensor] = []
    plain = Tensor.copy_

    def copying(target: Tensor, source: Tensor) -> Tensor:
        copied.append(source)
        return plain(target, source)

    monkeypatch.setattr(Tensor, "copy_", copying)
    measure_ceilings(CPU, torch.float32)
    assert len(copied[0][: 1 << 16].unique()) == 256


def test_a_forward_of_every_shape_is_timed_equally_often() -> None:
    model = tiny_model()
    wanted = step_shapes(
        model, batch_sizes=(1, 2), tokens_per_request=(1, 3), context_tokens=(10, 33)
    )
    ticks: list[int] = []
    measured = measure_steps(model, wanted, rounds=3, on_measured=lambda: ticks.append(1))
    assert [step.shape for step in measured] == wanted
    assert len(wanted) == 8
    assert len(ticks) == 8 * 4
    assert all(step.seconds > 0.0 for step in measured)


def test_no_round_begins_after_the_time_is_up_but_one_is_counted() -> None:
    ticks: list[int] = []
    measured = measure_steps(
        tiny_model(),
        [StepShape(1, 1, 20), StepShape(1, 2, 20)],
        rounds=50,
        most_seconds=0.0,
        on_measured=lambda: ticks.append(1),
    )
    assert len(ticks) == 4
    assert all(step.seconds > 0.0 for step in measured)


def test_forwards_are_asked_for_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the thread's current device, whatever tensors it is given."""
    scopes: list[torch.device] = []

    @contextmanager
    def scope(device: torch.device) -> Iterator[None]:
        scopes.append(device)
        yield
        scopes.pop()

    forward = ModelRunner.forward

    def checked(self: ModelRunner, *args: object) -> object:
        assert scopes == [self.device]
        return forward(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(profiling, "device_scope", scope)
    monkeypatch.setattr(ModelRunner, "forward", checked)
    assert measure_steps(tiny_model(), [StepShape(1, 1, 20)], rounds=1)


def test_every_request_writes_to_slots_of_its_own_and_none_to_the_null_block() -> None:
    shape = StepShape(batch_size=3, tokens_per_request=5, context_tokens=14)
    segments = [profiling._segment(shape, row) for row in range(3)]
    slots = [slot for segment in segments for slot in segment.slots]
    assert len(set(slots)) == 15
    assert min(slots) >= 16
    blocks = [set(segment.table.blocks.tolist()) for segment in segments]
    assert all(not a & b for i, a in enumerate(blocks) for b in blocks[:i])
    assert max(slots) // 16 == max(max(each) for each in blocks)
    assert segments[0].start == 13  # sees 14 keys, its own included


def test_a_forward_attends_to_the_whole_context() -> None:
    shape = StepShape(batch_size=4, tokens_per_request=3, context_tokens=1000)
    packed = pack([profiling._segment(shape, row) for row in range(4)], 16, CPU)
    assert [group.num_keys for group in packed.groups] == [1002]
    assert packed.positions[0].tolist() == [999, 1000, 1001] * 4
    assert len(packed.logit_rows) == 12


def test_keys_and_values_are_written_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written reads from one page of zeros, too fast."""
    written: list[float] = []
    runner_class = profiling.ModelRunner

    def release(runner: profiling.ModelRunner) -> None:
        assert runner.cache is not None
        written.extend(float(keys[:, 16:].std()) for keys in runner.cache.keys)
        runner.cache = None

    monkeypatch.setattr(runner_class, "release", release)
    measure_steps(tiny_model(), [StepShape(2, 1, 200)], rounds=1)
    assert all(0.03 < spread < 0.2 for spread in written)
    assert written


def test_steps_beyond_the_positions_of_a_model_are_left_out() -> None:
    model = tiny_model(max_position_embeddings=128)
    given = {"batch_sizes": (1,), "tokens_per_request": (1, 8)}
    fitting = step_shapes(model, **given, context_tokens=(120, 127, 500))
    assert {(s.context_tokens, s.tokens_per_request) for s in fitting} == {
        (120, 1),
        (120, 8),
        (127, 1),
    }
    with pytest.raises(ConfigError, match="128 positions"):
        step_shapes(model, **given, context_tokens=(500,))


def test_the_model_stays_as_it_was() -> None:
    model: PreTrainedModel = tiny_model()
    ids = torch.tensor([[1, 2, 3, 4]])
    before = model(ids).logits
    measure_steps(model, [StepShape(1, 2, 30)], rounds=1)
    assert torch.equal(model(ids).logits, before)


# ---- the command


def test_a_profile_says_machine_date_and_every_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fast: None
) -> None:
    path = tmp_path / "p.json"
    code = main(["profile", "--model", str(folder), "--output", str(path), "--name", "box", *GRID])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    profile = read_profile(path)
    assert profile.hardware == Hardware("box", 1e12, 5e10, 32e9)
    assert profile.sdcontrol_version == sdcontrol.__version__
    assert profile.machine["torch"] == torch.__version__
    assert profile.date.endswith("+00:00")
    model = profile.times("target")
    assert model is not None
    assert model.dtype == profile.dtype == "float32"
    assert model.shape.kv_bytes == 4.0
    assert {(s.batch_size, s.tokens_per_request, s.context_tokens) for s in model.steps} == {
        (batch, tokens, context) for batch in (1, 3) for tokens in (1, 4) for context in (20, 60)
    }
    assert "box: 50 GB/s, 1000 GFLOP/s in float32, ridge 20 FLOP/byte" in out
    assert f"written to {path}" in out


def test_advice_reads_the_profile(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fast: None
) -> None:
    path, copy = tmp_path / "p.json", tmp_path / "copy.json"
    given = ["--model", str(folder), "--draft-model", str(folder)]
    grid = [*GRID[:-3], "20,60,100", *GRID[-2:]]
    assert main(["profile", *given, "--output", str(path), "--json", str(copy), *grid]) == 0
    assert copy.read_text() == path.read_text()
    assert [model.role for model in read_profile(path).models] == ["target", "draft"]
    advice = tmp_path / "advice.json"
    options = ["--draft-model", str(folder), "--batch", "2", "--context", "50"]
    assert main(["advise", "--hardware", str(path), *options, "--json", str(advice)]) == 0
    told = json.loads(advice.read_text())
    assert told["calibrated_on"] == str(path)
    assert told["plain_seconds"] > 0
    assert "12 measured steps, median error" in capsys.readouterr().out


def test_the_machine_alone_can_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile"]) == 0
    profile = read_profile(tmp_path / "profile.json")
    assert profile.models == ()
    assert profile.dtype == "bfloat16"


def test_a_name_that_is_no_text_is_written_with_escapes(tmp_path: Path, fast: None) -> None:
    path = tmp_path / "p.json"
    assert main(["profile", "--name", "b\udcff", "--output", str(path)]) == 0
    assert read_profile(path).hardware.name == "b\\udcff"


def test_the_bundled_pair_is_profiled_and_advised_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    both = ["--model", "bundled", "--draft-model", "bundled"]
    assert main(["profile", *both, "--output", str(path), *GRID, "--batch", "1,2,3"]) == 0
    assert "target bundled, bfloat16" in capsys.readouterr().out
    assert main(["advise", "--hardware", str(path), *both, "--context", "60"]) == 0
    assert f"calibrated on {path}: 12 measured steps" in capsys.readouterr().out


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "invalid list of counts value: '0'"),
        (["--context", "1,x"], "invalid list of counts value: '1,x'"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--output", "gone/p.json"], "gone/p.json cannot be written"),
        (["--json", "-"], "give ./- for one of that name"),
        (["--output", "p.json", "--json", "./p.json"], "another output"),
        (["--json", "."], ". cannot be written"),
        (["--model", "./gone"], "no model folder './gone'"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--dtype", "int4"], "invalid choice: 'int4'"),
        (["--model", "bundled", "--context", "99999"], "give a smaller batch or a shorter context"),
    ],
)
def test_what_cannot_be_asked_ends_with_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith("sdcontrol: error: ")
    assert line.count("\n") == 1
    assert message in line


def test_what_is_left_out_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fast: None
) -> None:
    given = ["--model", str(folder), "--output", str(tmp_path / "p.json")]
    grid = ["--batch", "1", "--tokens", "1", "--context", "20,999999", "--rounds", "1"]
    assert main(["profile", *given, *grid]) == 0
    err = capsys.readouterr().err
    assert "1 of 2 steps left out" in err
    assert "1 of the 3 steps that advise needs to calibrate on" in err


# ---- the file


def profile_of() -> MachineProfile:
    return MachineProfile(
        sdcontrol_version="0.1.0",
        date="2026-01-01T00:00:00+00:00",
        machine={"threads": 2},
        dtype="float32",
        hardware=Hardware("box", 1e12, 1e11, 32e9),
    )


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile_of().write(path)
    assert read_profile(path) == read_profile(str(path)) == profile_of()
    assert json.loads(path.read_text())["schema_version"] == 1


def test_a_profile_prices_the_steps_that_it_measured() -> None:
    machine = profile_of().hardware
    measured = []
    for role, name in (("target", "llama-3.2-3b"), ("draft", "llama-3.2-1b")):
        shape = shapes.by_name(name)
        forward = Forward(shape, machine, calibration=Calibration(0.5, 0.3))
        steps = tuple(steps_of(forward, (1, 4)))
        times = ModelTimes(role=role, name=name, dtype="bfloat16", shape=shape, steps=steps)
        measured.append(times)
    cost = profile_of().model_copy(update={"models": tuple(measured)}).cost()
    for step in measured[0].steps:
        tokens = step.batch_size * step.tokens_per_request
        kv_tokens = step.batch_size * step.context_tokens
        seconds = float(cost.verify_seconds(tokens, kv_tokens, step.batch_size))
        assert seconds == pytest.approx(step.seconds, rel=0.1)
    for step in (step for step in measured[1].steps if step.tokens_per_request == 1):
        kv_tokens = step.batch_size * step.context_tokens
        seconds = float(cost.draft_seconds("draft_model", step.batch_size, kv_tokens))
        assert seconds == pytest.approx(step.seconds, rel=0.1)
    with pytest.raises(ConfigError, match="has no model"):
        profile_of().cost()
    few = [model.model_copy(update={"steps": model.steps[:2]}) for model in measured]
    with pytest.raises(ConfigError, match=r"2 steps of llama-3.2-3b, .* more of --batch"):
        profile_of().model_copy(update={"models": tuple(few)}).cost()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"colour": "red"}, "colour"),
        ({"hardware": {"name": "box"}}, "hardware"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(json.loads(profile_of().model_dump_json()) | change))
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


def steps_of(forward: Forward, tokens: Sequence[int]) -> list[StepTime]:
    return [
        StepTime(
            batch_size=batch,
            tokens_per_request=count,
            context_tokens=context,
            seconds=float(forward.seconds(batch * count, batch * context, batch)),
        )
        for batch in (1, 8, 64)
        for count in tokens
        for context in (256, 4096)
    ]


def test_calibration_finds_efficiencies_and_overheads() -> None:
    machine = Hardware("box", 1e12, 1e11, 64e9)
    truth = Calibration(0.7, 0.2, layer_overhead_seconds=2e-4, token_overhead_seconds=1e-6)
    forward = Forward(shapes.by_name("llama-3.2-1b"), machine, calibration=truth)
    steps = steps_of(forward, (1, 4, 8))
    found = calibrate(Forward(forward.shape, machine), steps)
    errors = relative_errors(Forward(forward.shape, machine, calibration=found), steps)
    assert max(map(abs, errors)) < 0.05
    assert found.compute_efficiency == pytest.approx(0.2, rel=0.2)


def test_calibration_tells_tokens_from_requests() -> None:
    """Every request costs 1 ms and every token nothing: longer drafts are not to look costlier."""
    machine = Hardware("box", 1e15, 1e11, 64e9)
    bare = Calibration(1.0, 1.0, layer_overhead_seconds=0.0, token_overhead_seconds=0.0)
    forward = Forward(shapes.by_name("llama-3.2-1b"), machine, calibration=bare)
    steps = [
        step.model_copy(update={"seconds": step.seconds + 1e-3 * step.batch_size})
        for step in steps_of(forward, (1, 2, 8))
    ]
    found = calibrate(forward, steps)
    long = [step for step in steps if step.tokens_per_request == 8]
    errors = relative_errors(Forward(forward.shape, machine, calibration=found), long)
    assert max(errors) < 0.25


def test_calibration_needs_three_steps() -> None:
    forward = Forward(shapes.by_name("llama-3.2-1b"), Hardware("box", 1e12, 1e11, 64e9))
    with pytest.raises(ConfigError, match="2 measured steps"):
        calibrate(forward, steps_of(forward, (4,))[:2])


@given(
    st.lists(st.tuples(*[st.floats(0.01, 10.0)] * 2, st.floats(-5.0, 5.0)), min_size=3, max_size=9)
)
def test_the_fitted_overheads_are_the_best_that_are_not_negative(
    rows: list[tuple[float, float, float]],
) -> None:
    first, second, target = (np.array(column) for column in zip(*rows, strict=True))
    found = machine_profile._non_negative_pair(np.stack([first, second]), target)
    best = nnls(np.stack([first, second], axis=1), target)[1]
    assert min(found) >= 0.0
    error = np.linalg.norm(found[0] * first + found[1] * second - target)
    assert error <= best + 1e-6 * (1.0 + np.linalg.norm(target))


def test_reading_a_profile_needs_no_torch(run: Callable[[list[str], Path], str]) -> None:
    program = (
        "import sys, sdcontrol.estimators.machine_profile\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parent.parent
    assert run([sys.executable, "-c", program], root).strip() == "[]"
