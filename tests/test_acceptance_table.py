"""The acceptance table: what it says is what live runs accept, and what is written is what is read."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcontrol import SpeculativeDecoder
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Confidence, Observation, Plan
from sdcontrol.engine.acceptance_rollouts import acceptance_outcomes
from sdcontrol.engine.bundled import held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from sdcontrol.engine.synthetic import SyntheticVerifier
from sdcontrol.errors import ConfigError, CounterfactualError, SdcontrolError, TraceError
from sdcontrol.integrations.acceptance import add_acceptance_table
from sdcontrol.integrations.recording import facts_of_run
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.traces.acceptance_table import (
    TABLE_NAME,
    AcceptanceTable,
    AcceptanceTableWriter,
    TableHeader,
)
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorded_times import RecordedTimes
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.simulate import SimulationSettings
from sdcontrol.traces.what_if import what_if
from sdcontrol.traces.writer import add_file
from tests.simulate_support import TIMES

ARMS = ("ngram", "draft_model", "sparse_kv:64", "sparse_kv:96:scored")
NEW_TOKENS = 20


class _Fixed:
    """The same arm and length for all who may; keeps the observations."""

    def __init__(self, arm: str, num_draft_tokens: int) -> None:
        self.arm, self.num_draft_tokens = arm, num_draft_tokens
        self.observations: list[Observation] = []

    def plan(self, view: BatchView) -> Plan:
        return Plan.uniform(view, self.arm, self.num_draft_tokens)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        return plan

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)


class _Bundled:
    """Short texts of the bundled pair, in float32, and what the engine makes of them."""

    def __init__(self) -> None:
        self.target = load_bundled("target", dtype=torch.float32)
        self.draft = load_bundled("draft", dtype=torch.float32)
        tokenizer = load_bundled_tokenizer()
        texts = [
            *held_out_prompts("edit", 2, min_tokens=100),
            *held_out_prompts("prose", 1, min_tokens=100),
        ]
        self.prompts = [list(tokenizer(text)["input_ids"])[:150] for text in texts]
        self.config = EngineConfig(kv_tokens=4096)

    @property
    def drafters(self) -> list[object]:
        return ["ngram", self.draft, "sparse_kv:64", "sparse_kv:96:scored"]

    @cached_property
    def greedy(self) -> list[Request]:
        """What the engine says without chance."""
        return self.run(_Fixed("ngram", 0), do_sample=False)

    @cached_property
    def greedy_table(self) -> dict[str, dict[str, ArmOutcomes]]:
        """The acceptance table of `greedy`, which is that of every greedy run."""
        return self.table(self.greedy)

    def table(self, requests: Sequence[Request]) -> dict[str, dict[str, ArmOutcomes]]:
        return dict(acceptance_outcomes(self.target, self.drafters, requests, config=self.config))

    def run(self, planner: _Fixed, *, do_sample: bool) -> list[Request]:
        with Engine(
            self.target, drafters=self.drafters, planner=planner, config=self.config
        ) as engine:
            options = {"temperature": 0.8} if do_sample else {}
            for number, prompt in enumerate(self.prompts):
                engine.submit(
                    prompt,
                    request_id=f"r{number}",
                    seed=number,
                    max_new_tokens=NEW_TOKENS,
                    do_sample=do_sample,
                    **options,
                )
            finished = engine.run()
        return [finished[f"r{number}"] for number in range(len(self.prompts))]


@pytest.fixture(scope="module")
def bundled() -> _Bundled:
    return _Bundled()


def _disagreements(
    observations: Sequence[Observation], table: dict[str, dict[str, ArmOutcomes]], arm: str
) -> tuple[int, list[str]]:
    """Drafts compared, and those where the table says otherwise."""
    compared, wrong = 0, []
    for observation in observations:
        for row, view in enumerate(observation.view.requests):
            drafted, got = observation.proposed[row], observation.accepted[row]
            if not drafted:
                continue
            outcomes, position = table[view.id][arm], view.generated_tokens
            if outcomes.path is not None:
                path = int(outcomes.path[position]) & ((1 << drafted) - 1)
                told = path.bit_count()
            else:
                told = min(int(outcomes.accepted[position]), drafted)
            compared += 1
            if told != got:
                wrong.append(f"{view.id} at {position}: {drafted} drafted, {got}, table {told}")
    return compared, wrong


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
def test_the_table_says_what_live_runs_of_every_arm_accept(
    bundled: _Bundled, do_sample: bool
) -> None:
    """At every position that a static policy visits, for chains and for the n-gram's trees."""
    if do_sample:
        requests = bundled.run(_Fixed("ngram", 0), do_sample=True)
        table = bundled.table(requests)
    else:
        requests, table = bundled.greedy, bundled.greedy_table
    assert any(outcomes["ngram"].path is not None for outcomes in table.values())
    for arm, length in zip(ARMS, (6, 3, 5, 4), strict=True):
        planner = _Fixed(arm, length)
        again = bundled.run(planner, do_sample=do_sample)
        assert [r.tokens for r in again] == [r.tokens for r in requests]
        compared, wrong = _disagreements(planner.observations, table, arm)
        assert compared > 10
        assert wrong == []


@pytest.mark.parametrize(
    ("policy", "drafters"),
    [
        ("static:ngram:4", ARMS),
        ("static:draft_model:3", ARMS),
        ("goodput", ARMS[:1]),
        ("goodput", ARMS),
    ],
)
def test_a_what_if_replay_of_the_recorded_policy_takes_the_recorded_steps(
    bundled: _Bundled, tmp_path: Path, policy: str, drafters: tuple[str, ...]
) -> None:
    """Where a step that is the same takes the same time, the replay is the recording.

    Every step computes and reads what the recorded one did, so that all time is the recorded time:
    the step times are the recording's, not a fit, and so no noise of the machine is in it. That
    holds for `goodput`, too, which plans by what its steps took and drops tokens by how sure a
    drafter was of them, beyond a wrong one too.
    """
    trace = _recorded(bundled, policy, tmp_path / "trace", drafters)
    observations = list(trace.observations())
    times = RecordedTimes.of(trace)
    result = what_if(trace, policy, times=times)
    assert times.num_repeated == result.num_steps == len(observations)
    seconds = sum(observation.timing.total_seconds for observation in observations)
    assert result.busy_seconds == pytest.approx(seconds, rel=1e-9)
    lengths = {record.id: record.output_tokens for record in trace.requests()}
    assert dict(zip(result.times.ids, result.times["output_tokens"], strict=True)) == lengths
    drafted = sum(sum(observation.drafted) for observation in observations)
    accepted = sum(sum(observation.accepted) for observation in observations)
    assert result.wasted_draft_tokens == drafted - accepted


def test_a_what_if_replay_knows_to_what_the_recorded_engine_padded_its_forwards(
    bundled: _Bundled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of `goodput` hang on it: the replay is the recording only if it is told."""
    padded = tuple(range(6, 66, 6))
    monkeypatch.setattr("sdcontrol.engine.parts.eager_token_edges", lambda *_: padded)
    trace = _recorded(bundled, "goodput", tmp_path / "trace")
    assert trace.token_edges == padded
    times = RecordedTimes.of(trace)
    result = what_if(trace, "goodput", times=times)
    assert times.num_repeated == result.num_steps == trace.num_steps


@pytest.mark.parametrize("policy", ["static:ngram:4", "static:draft_model:3"])
def test_a_what_if_replay_with_fitted_times_keeps_the_recorded_throughput(
    bundled: _Bundled, tmp_path: Path, policy: str
) -> None:
    """Within 3 %, whatever noise the fit was given: the plans do not hang on the clock, and a fit
    keeps the total time. Of `goodput` nothing is asserted, whose plans would differ by the noise.
    """
    trace = _recorded(bundled, policy, tmp_path / "trace")
    result = what_if(trace, policy)
    seconds = sum(seen.timing.total_seconds for seen in trace.observations())
    tokens = sum(record.output_tokens for record in trace.requests())
    assert result.tokens_per_busy_second == pytest.approx(tokens / seconds, rel=0.03)


def _recorded(bundled: _Bundled, policy: str, folder: Path, arms: tuple[str, ...] = ARMS) -> Trace:
    """A run of the engine with the drafters of `arms`, the first ones, and its acceptance table."""
    drafters = bundled.drafters[: len(arms)]
    recorder = Recorder(
        Controller(policy, clock=None), folder
    )  # no plan is given up on for its time
    with Engine(
        bundled.target, drafters=drafters, planner=recorder, config=bundled.config
    ) as engine:
        recorder.describe(facts_of_run(engine, drafters))
        for number, prompt in enumerate(bundled.prompts):
            engine.submit(prompt, request_id=f"r{number}", max_new_tokens=NEW_TOKENS)
        engine.run()
    recorder.close()
    header = TableHeader(arms=ARMS, verification="coupled")
    with AcceptanceTableWriter(folder / TABLE_NAME, header) as table:
        for name, outcomes in bundled.greedy_table.items():
            table.add(name, outcomes)
    add_file(folder, TABLE_NAME)
    return Trace(folder)


def test_a_trace_without_a_table_cannot_say_what_if(tmp_path: Path) -> None:
    """The error says how to get one."""
    Recorder(Controller("off"), tmp_path / "trace").close()
    with pytest.raises(CounterfactualError, match="sdcontrol record --acceptance-table"):
        what_if(Trace(tmp_path / "trace"), "off")
    _written(tmp_path / "trace", seed=0, num_requests=1)  # of whatever run
    with pytest.raises(CounterfactualError, match="does not count"):
        what_if(Trace(tmp_path / "trace"), "off")


def _drawn(generator: np.random.Generator, length: int) -> ArmOutcomes:
    """Any outcomes of one arm."""

    def counts() -> np.ndarray:
        return generator.integers(0, 17, length).astype(np.uint8)

    is_tree = bool(generator.integers(2))
    return ArmOutcomes(
        accepted=counts(),
        match_tokens=counts() if generator.integers(2) else None,
        max_draft_tokens=counts() if generator.integers(2) else None,
        confidence=generator.random(length).astype(np.float32) if generator.integers(2) else None,
        path=generator.integers(0, 1 << 16, length).astype(np.uint32) if is_tree else None,
        chain_nodes=counts() if is_tree else None,
    )


def _written(folder: Path, seed: int, num_requests: int) -> dict[str, dict[str, ArmOutcomes]]:
    """A table in `folder`, and what is in it."""
    generator = np.random.default_rng(seed)
    requests: dict[str, dict[str, ArmOutcomes]] = {}
    for number in range(num_requests):
        arms = [arm for arm in ARMS if generator.integers(3)]
        length = int(generator.integers(1, 30))
        requests[f"r{number}"] = {arm: _drawn(generator, length) for arm in arms}
    with AcceptanceTableWriter(
        folder / TABLE_NAME, TableHeader(arms=ARMS, verification="coupled")
    ) as table:
        for name, outcomes in requests.items():
            table.add(name, outcomes)
    return requests


def _same(left: ArmOutcomes, right: ArmOutcomes) -> bool:
    names = ("accepted", "match_tokens", "max_draft_tokens", "confidence", "path", "chain_nodes")
    pairs = [(getattr(left, name), getattr(right, name)) for name in names]
    return all(
        (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))
        for a, b in pairs
    )


@given(st.integers(0, 10_000), st.integers(0, 150))
@settings(max_examples=20)
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_requests: int
) -> None:
    """In order, and one by one."""
    folder = tmp_path_factory.mktemp("table")
    requests = {name: arms for name, arms in _written(folder, seed, num_requests).items() if arms}
    table = AcceptanceTable(folder / TABLE_NAME)
    assert [name for name, _ in table] == list(requests)
    for name in reversed(requests):
        found = table.of(name)
        assert found.keys() == requests[name].keys()
        assert all(_same(found[arm], requests[name][arm]) for arm in found)
    assert table.of("nobody") == {}


def test_a_damaged_table_is_an_error_or_the_same_table(tmp_path: Path) -> None:
    """Any byte flipped, any end cut off: checksums see it, or it is where nothing is said."""
    _written(tmp_path, 5, 40)
    path = tmp_path / TABLE_NAME
    sound = path.read_bytes()
    whole = _read_all(path)
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(sound), 150).tolist():
        flipped = sound[place] ^ (1 << int(generator.integers(8)))
        for damaged in (sound[:place] + bytes([flipped]) + sound[place + 1 :], sound[:place]):
            path.write_bytes(damaged)
            try:
                found = _read_all(path)
            except SdcontrolError:
                continue
            assert found.keys() == whole.keys()
            assert all(
                _same(found[name][arm], whole[name][arm]) for name in whole for arm in whole[name]
            )


def _read_all(path: Path) -> dict[str, dict[str, ArmOutcomes]]:
    return {name: dict(outcomes) for name, outcomes in AcceptanceTable(path)}


def test_a_table_of_the_future_or_of_something_else_is_refused(tmp_path: Path) -> None:
    """With what to do about it."""
    path = tmp_path / TABLE_NAME
    _written(tmp_path, 1, 3)
    known = pq.read_table(path)
    header = {b"sdcontrol.acceptance": b'{"schema_version": 2, "arms": [], "more": 1}'}
    pq.write_table(known.replace_schema_metadata(header), path)
    with pytest.raises(TraceError, match="has version 2, this sdcontrol reads 1; upgrade"):
        AcceptanceTable(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(TraceError, match="columns of an acceptance table"):
        AcceptanceTable(path)
    path.write_text("request,arm\n")
    with pytest.raises(TraceError, match="is no acceptance table"):
        AcceptanceTable(path)
    with pytest.raises(TraceError, match="is no acceptance table"):
        AcceptanceTable(tmp_path / "nothing.parquet")


def test_a_table_that_was_not_finished_leaves_no_file(tmp_path: Path) -> None:
    """Nobody can mistake a half for a whole."""
    header = TableHeader(arms=ARMS, verification="coupled")
    with pytest.raises(TraceError, match="name every arm"):  # noqa: SIM117
        with AcceptanceTableWriter(tmp_path / TABLE_NAME, header) as table:
            table.add("a", {"other": _drawn(np.random.default_rng(0), 3)})
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_finds_no_space_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    header = TableHeader(arms=ARMS, verification="coupled")
    with pytest.raises(TraceError, match="no space"):  # noqa: SIM117
        with AcceptanceTableWriter(tmp_path / TABLE_NAME, header) as table:
            table.add("a", {ARMS[0]: _drawn(np.random.default_rng(0), 3)})
    assert list(tmp_path.iterdir()) == []


class _Run:
    """A recording of two requests, without a table; the second one opted out."""

    def __init__(
        self,
        bundled: _Bundled,
        folder: Path,
        *,
        keep: bool = True,
        ids: Sequence[str] = "ab",
        start: int = 5,
    ) -> None:
        self.folder, self.target = folder, bundled.target
        recorder = Recorder(Controller("static:ngram:4"), folder, keep_token_ids=keep)
        with recorder, Engine(self.target, drafters=ARMS[::2], planner=recorder) as engine:
            recorder.describe(facts_of_run(engine, ARMS[::2]))
            self.requests = []
            for number, name in enumerate(ids):
                prompt = bundled.prompts[number][start : start + 60]
                options = {"request_id": name, "speculation": not number}
                engine.submit(prompt, max_new_tokens=8, do_sample=False, **options)
                self.requests.append(engine.requests[name])
                engine.run()

    def add(
        self, requests: Sequence[Request] | None = None, drafters: Sequence[str] = ARMS[::2]
    ) -> None:
        """The table; of all requests by default."""
        given = self.requests if requests is None else requests
        add_acceptance_table(self.folder, self.target, drafters, given)


def test_a_table_lists_who_opted_out_and_goes_with_its_recording(
    bundled: _Bundled, tmp_path: Path
) -> None:
    run = _Run(bundled, tmp_path / "t")
    run.add(run.requests[::-1])
    table = AcceptanceTable(run.folder / TABLE_NAME)
    assert table.header.arms == ARMS[::2]
    assert [table.knows(name) for name in "abc"] == [True, True, False]
    assert (set(table.of("a")), set(table.of("b"))) == (set(ARMS[::2]), set())
    trace = Trace(run.folder)
    times = RecordedTimes.of(trace)
    assert what_if(trace, "static:ngram:4", times=times).num_steps == times.num_repeated


def test_a_greedy_run_under_rejection_has_a_table_of_chains(
    bundled: _Bundled, tmp_path: Path
) -> None:
    """As it drafted: no trees. Its replay takes the recorded steps."""
    drafters, folder = ["ngram"], tmp_path / "t"
    recorder = Recorder(Controller("static:ngram:6", clock=None), folder)
    with (
        recorder,
        Engine(
            bundled.target, drafters=drafters, planner=recorder, verification="rejection"
        ) as engine,
    ):
        recorder.describe(facts_of_run(engine, drafters))
        for number, prompt in enumerate(bundled.prompts):
            engine.submit(prompt, request_id=f"r{number}", max_new_tokens=NEW_TOKENS)
        requests = list(engine.run().values())
    add_acceptance_table(folder, bundled.target, drafters, requests)
    table = dict(AcceptanceTable(folder / TABLE_NAME))
    assert all(outcomes["ngram"].path is None for outcomes in table.values())
    trace = Trace(folder)
    times = RecordedTimes.of(trace)
    assert what_if(trace, "static:ngram:6", times=times).num_steps == trace.num_steps
    assert times.num_repeated == trace.num_steps


def test_a_table_of_fewer_drafters_answers_for_those(bundled: _Bundled, tmp_path: Path) -> None:
    """A drafter that it lacks is said to be lacking, not taken to have nothing accepted."""
    run = _Run(bundled, tmp_path / "t")
    run.add(drafters=["ngram"])
    with pytest.raises(CounterfactualError, match=r"no acceptance for \['sparse_kv:64'\]"):
        what_if(Trace(run.folder), "off", times=TIMES)
    only = SimulationSettings(drafters=("ngram",))
    assert what_if(Trace(run.folder), "off", times=TIMES, settings=only).num_requests == 2


def test_a_table_of_other_requests_than_the_recorded_ones_is_refused(
    bundled: _Bundled, tmp_path: Path
) -> None:
    """Before anything is computed; the trace is as it was."""
    run, other = _Run(bundled, tmp_path / "t"), _Run(bundled, tmp_path / "other", start=9)
    with pytest.raises(
        TraceError, match=r"1 of 2 requests recorded in .* are missing, 'b' for one"
    ):
        run.add(run.requests[:1])
    with pytest.raises(TraceError, match="2 of 2 requests are not those recorded"):
        run.add(other.requests)
    assert not (run.folder / TABLE_NAME).exists()
    run.add()
    before = (run.folder / TABLE_NAME).read_bytes()
    with pytest.raises(TraceError, match="has an acceptance table already"):
        run.add()
    assert (run.folder / TABLE_NAME).read_bytes() == before
    twice = _Run(bundled, tmp_path / "twice", ids="aa", keep=False)
    with pytest.raises(TraceError, match="has 2 requests under 1 ids"):
        twice.add(twice.requests[1:])


def test_a_decoder_adds_the_table_of_its_run_when_it_is_closed(
    bundled: _Bundled, tmp_path: Path
) -> None:
    """Of streams, some left early, and of `generate`; closing again changes nothing."""
    folder = tmp_path / "t"
    decoder = SpeculativeDecoder(
        bundled.target,
        drafters=["ngram", bundled.draft],
        policy="static:draft_model:3",
        record=folder,
        keep_token_ids=True,
        acceptance_table=True,
    )
    prompts = [prompt[:60] for prompt in bundled.prompts]
    options = {"max_new_tokens": 12, "do_sample": False}
    list(decoder.stream(prompts[:2], speculation=[True, False], **options))
    bundled.target.generate(torch.tensor([prompts[2]]), custom_generate=decoder, **options)
    left = decoder.stream(prompts[:1], ids=["left"], **options)
    next(left)
    left.close()
    decoder.close()
    before = (folder / TABLE_NAME).read_bytes()
    decoder.close()
    assert (folder / TABLE_NAME).read_bytes() == before
    trace = Trace(folder)
    assert [request.output_tokens for request in trace.requests()][:3] == [12, 12, 12]
    assert trace.requests()[0].prompt_ids == tuple(prompts[0])
    accepted = sum(sum(seen.accepted) for seen in trace.observations())
    result = what_if(trace, "static:draft_model:3", times=TIMES)
    assert result.num_requests == trace.num_requests == 4
    assert 0 < accepted <= result.arms["draft_model"].accepted


def test_a_table_goes_as_deep_as_its_recording_may_draft(bundled: _Bundled, tmp_path: Path) -> None:
    """Else the policy that was recorded could not be replayed."""
    decoder = SpeculativeDecoder(
        bundled.target,
        drafters=["ngram"],
        policy="static:ngram:24",
        max_draft_tokens=24,
        record=tmp_path / "t",
        acceptance_table=True,
    )
    with decoder:
        list(decoder.stream([bundled.prompts[0]], max_new_tokens=40, do_sample=False))
    trace = Trace(tmp_path / "t")
    assert max(max(seen.proposed, default=0) for seen in trace.observations()) > 16
    times = RecordedTimes.of(trace)
    assert what_if(trace, "static:ngram:24", times=times).num_steps == trace.num_steps
    assert times.num_repeated == trace.num_steps


def test_a_table_or_token_ids_without_a_recording_or_of_another_verification_are_refused(
    bundled: _Bundled, tmp_path: Path
) -> None:
    """Before anything is recorded."""
    with pytest.raises(ConfigError, match="acceptance_table is part of a recording"):
        SpeculativeDecoder(bundled.target, acceptance_table=True)
    with pytest.raises(ConfigError, match="keep_token_ids is part of a recording"):
        SpeculativeDecoder(bundled.target, keep_token_ids=True)
    for verification in ("rejection", SyntheticVerifier({"ngram": [0.5]})):
        options = {"record": tmp_path / "t", "acceptance_table": True}
        with pytest.raises(ConfigError, match="leave verification at coupled"):
            SpeculativeDecoder(bundled.target, verification=verification, **options)
    assert not (tmp_path / "t").exists()


def test_a_table_needs_a_recording_that_is_closed(bundled: _Bundled, tmp_path: Path) -> None:
    recorder = Recorder(Controller("off"), tmp_path / "t")
    with pytest.raises(TraceError, match="was not closed; close the recorder"):
        add_acceptance_table(tmp_path / "t", bundled.target, ["ngram"], [])
    recorder.close()
    add_acceptance_table(tmp_path / "t", bundled.target, ["ngram"], [])


def test_a_list_of_who_opted_out_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """A table from before there was one knows everybody."""
    path = tmp_path / TABLE_NAME
    _written(tmp_path, 1, 3)
    known, header = pq.read_table(path), pq.read_metadata(path).metadata
    for told in (b"[1", b"[1]", None):
        more = {b"sdcontrol.acceptance": header[b"sdcontrol.acceptance"]}
        pq.write_table(
            known.replace_schema_metadata(more | ({b"sdcontrol.opted_out": told} if told else {})),
            path,
        )
        if told is None:
            assert AcceptanceTable(path).knows("anybody")
            continue
        with pytest.raises(TraceError, match="its header cannot be read"):
            AcceptanceTable(path)


def test_two_requests_of_one_id_have_no_table(bundled: _Bundled) -> None:
    """Their outcomes would be taken for each other's."""
    requests = bundled.greedy
    with pytest.raises(ConfigError, match="'r0' 2 times"):
        bundled.table([*requests, requests[0]])
