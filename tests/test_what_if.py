"""What a what-if replay may be asked of a recording, and what it refuses to guess."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from sdcontrol.controller import Controller
from sdcontrol.core import Observation
from sdcontrol.errors import CounterfactualError
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.policies.learned_model import save, train
from sdcontrol.traces.acceptance_table import TABLE_NAME, AcceptanceTableWriter, TableHeader
from sdcontrol.traces.facts import facts_of
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.schema import RequestRecord, TraceFacts
from sdcontrol.traces.what_if import what_if
from sdcontrol.traces.writer import TraceWriter, add_file
from tests.simulate_support import TIMES
from tests.trace_support import ARMS, decode, plain_step

OUTPUT_TOKENS = 6


def _outcomes() -> Mapping[str, ArmOutcomes]:
    return {"ngram": ArmOutcomes(np.full(OUTPUT_TOKENS, 2, dtype=np.uint8))}


def _record(
    folder: Path,
    ids: Sequence[str],
    *,
    answered: Mapping[str, Mapping[str, ArmOutcomes]] | None = None,
    facts: TraceFacts | None = None,
    keep: Mapping[str, Path] | None = None,
    temperature: float = 0.0,
) -> Trace:
    """A recording of a request for each of `ids`; its table answers for `answered`, or all of them."""
    facts = facts or TraceFacts(verification="coupled", drafters=("ngram",))
    with TraceWriter(folder, facts, keep=keep) as writer:
        for number in range(10):
            writer.append(plain_step(number))
        for name in ids:
            writer.add_request(RequestRecord(name, 0.0, 5, OUTPUT_TOKENS, temperature))
    header = TableHeader(arms=("ngram",), verification="coupled")
    with AcceptanceTableWriter(folder / TABLE_NAME, header) as table:
        for name, outcomes in (
            {name: _outcomes() for name in ids} if answered is None else answered
        ).items():
            table.add(name, outcomes)
    add_file(folder, TABLE_NAME)
    return Trace(folder)


def test_a_recording_whose_requests_share_an_id_cannot_say_what_if(tmp_path: Path) -> None:
    """Nobody could tell whose drafts were whose."""
    assert what_if(_record(tmp_path / "own", ["a", "b"]), "off", times=TIMES).num_requests == 2
    with pytest.raises(CounterfactualError, match=r"'chat' 2 times, .* an id of its own"):
        what_if(_record(tmp_path / "shared", ["chat", "b", "chat"]), "off", times=TIMES)


def test_a_policy_that_was_recorded_with_its_model_is_judged_from_the_trace_alone(
    tmp_path: Path,
) -> None:
    """The header names the model by where it is kept; the file that it was loaded from may be gone."""
    observations: list[Observation] = []
    for arm in ARMS:
        with Recorder(Controller(f"static:{arm}:4"), tmp_path / arm) as recorder:
            observations += decode(recorder, 40, batch=3)
    own = tmp_path / "policy.skops"
    save(train(observations), own)
    facts, kept = facts_of(Controller(f"learned:{own}"))
    facts = facts.model_copy(update={"verification": "coupled", "drafters": ("ngram",)})
    trace = _record(tmp_path / "t", ["a"], facts=facts, keep=kept)
    own.unlink()
    assert trace.header.policy is not None
    result = what_if(trace, trace.header.policy, times=TIMES)
    assert (result.policy, result.output_tokens) == ("learned", OUTPUT_TOKENS)


def test_a_request_that_the_table_lacks_is_not_taken_to_have_opted_out(tmp_path: Path) -> None:
    """Who opted out is listed."""
    answered = {"a": _outcomes(), "b": {}}
    assert what_if(_record(tmp_path / "all", "ab", answered=answered), "off", times=TIMES)
    trace = _record(tmp_path / "fewer", "abc", answered=answered)
    with pytest.raises(CounterfactualError, match="lacks 1 of 3 recorded requests, 'c' first"):
        what_if(trace, "off", times=TIMES)


@pytest.mark.parametrize(
    ("verification", "temperature", "is_refused"),
    [
        ("coupled", 0.8, False),
        ("rejection", 0.0, False),
        ("rejection", 0.8, True),
        ("synthetic", 0.0, True),
        ("", 0.0, True),
    ],
)
def test_a_recording_whose_text_hangs_on_its_drafts_cannot_say_what_if(
    tmp_path: Path, verification: str, temperature: float, is_refused: bool
) -> None:
    """Rejection is such only where a request is sampled."""
    facts = TraceFacts(verification=verification, drafters=("ngram",))
    trace = _record(tmp_path / "t", ["a"], facts=facts, temperature=temperature)
    if not is_refused:
        assert what_if(trace, "static:ngram:2", times=TIMES).num_requests == 1
        return
    with pytest.raises(CounterfactualError, match=f"under '{verification}' verification"):
        what_if(trace, "off", times=TIMES)
