"""Pages that are chosen by score: for all requests of a step together."""

from collections.abc import Sequence

import numpy as np
import pytest
from torch import Tensor

from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.pages import PageScorer, WantedPages
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.packing import IntArray
from tests.engine_support import ForcedPlanner, random_prompt, run_checked, submit_all, tiny_model

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
