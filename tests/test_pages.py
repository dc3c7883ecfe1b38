"""Pages that are chosen by score: for all requests of a step together."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from sdcontrol.engine import copies
from sdcontrol.engine.batch import Moves
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.host import DraftHost
from sdcontrol.engine.drafters.pages import PageScorer, WantedPages
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.packing import IntArray
from tests.engine_support import (
    ForcedPlanner,
    TextDrafter,
    random_prompt,
    run_checked,
    submit_all,
    tiny_model,
)
from tests.graph_support import Waits

ARM = "sparse_kv:40:scored"
PROMPTS = [random_prompt(length, seed=length) for length in (70, 90, 133, 64)]
CONFIG = EngineConfig(kv_tokens=2048, max_batch_size=4, block_size=8, max_prefill_tokens=512)


def test_pages_are_chosen_for_all_requests_by_one_copy_and_as_for_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[int] = []
    several: list[int] = []
    to_host, choose = Tensor.cpu, PageScorer.choose

    def counting(tensor: Tensor) -> Tensor:
        copies.append(tensor.numel())
        return to_host(tensor)

    def checked(scorer: PageScorer, wanted: Sequence[WantedPages]) -> list[IntArray]:
        kept, before = dict(scorer._chosen), len(copies)
        together = choose(scorer, wanted)
        assert len(copies) - before <= 1
        several.append(sum(scorer._chosen[id] is not kept.get(id) for id in scorer._chosen))
        after = dict(scorer._chosen)
        for want, pages in zip(wanted, together, strict=True):
            scorer._chosen.pop(want.request.id)
            np.testing.assert_array_equal(choose(scorer, [want])[0], pages)
        scorer._chosen = after
        assert choose(scorer, wanted) == together  # until the next page is full
        return together

    monkeypatch.setattr(Tensor, "cpu", counting)
    monkeypatch.setattr(PageScorer, "choose", checked)
    planner = ForcedPlanner(arm=ARM, num_draft_tokens=3)
    with Engine(tiny_model(), drafters=[ARM], planner=planner, config=CONFIG) as engine:
        submit_all(engine, PROMPTS, max_new_tokens=30, do_sample=False)
        run_checked(engine)
        assert engine.stats.faults == []
    assert max(several) == len(PROMPTS)
    assert min(several) == 0


class Sends(Waits):
    """Lists that torch makes tensors of are sent to a device by a copy that waits."""

    NAMES = (*Waits.NAMES, "lift_fresh")


def decode(
    *, num_draft_tokens: int, drafters: Sequence[object]
) -> dict[tuple[int, ...], list[int]]:
    """The texts of all prompts; with draft tokens, those of the arm `text`."""
    planner = ForcedPlanner(arm="text", num_draft_tokens=num_draft_tokens)
    with Engine(tiny_model(), drafters=drafters, planner=planner, config=CONFIG) as engine:  # type: ignore[arg-type]
        submit_all(engine, PROMPTS, max_new_tokens=30, do_sample=False)
        finished = run_checked(engine).values()
        assert engine.stats.faults == []
    return {tuple(request.tokens[: request.prompt_tokens]): request.output for request in finished}


def test_an_accepted_path_moves_with_its_queries_and_nobody_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = decode(num_draft_tokens=0, drafters=[TextDrafter({})])
    waits, move, moved = Sends(), DraftHost.move, []

    def upload(values: IntArray, device: torch.device) -> Tensor:
        before = len(waits.seen)
        sent = copies.upload(values, device)
        del waits.seen[before:]
        return sent

    def watched(host: DraftHost, moves: Moves) -> None:
        assert host.scorer is not None
        expected = host.scorer._store().clone()
        for request, sources, targets in moves:
            base, ring = host.scorer._row(request) * host.scorer._ring, host.scorer._ring
            origin = [base + position % ring for position in sources]
            expected[:, :, [base + position % ring for position in targets]] = expected[
                :, :, origin
            ]
        with waits:
            move(host, moves)
        assert torch.equal(host.scorer._store(), expected)
        moved.extend(moves)

    monkeypatch.setattr("sdcontrol.engine.drafters.pages.upload", upload)
    monkeypatch.setattr("sdcontrol.engine.runner.upload", upload)
    monkeypatch.setattr(DraftHost, "move", watched)
    trees = TextDrafter(told, wrong_every=5, as_tree=True)
    assert decode(num_draft_tokens=8, drafters=[trees, ARM]) == told
    assert len(moved) > 10
    assert waits.seen == []
