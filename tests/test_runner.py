"""Facts about forwards over packed segments."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.packing import PageTable, Segment
from sdcontrol.engine.padding import eager_token_edges
from sdcontrol.engine.runner import ModelRunner
from tests.engine_support import ForcedPlanner, tiny_model

NUM_BLOCKS, BLOCK_SIZE = 16, 8


def prefill(num_tokens: int, num_logits: int | None = None) -> Segment:
    """The first tokens of a request whose blocks follow the null block; all logits by default."""
    tokens = [3 + 5 * place % 40 for place in range(num_tokens)]
    pages = torch.arange(1, NUM_BLOCKS).numpy()
    slots = range(BLOCK_SIZE, BLOCK_SIZE + num_tokens)
    return Segment(tokens, 0, PageTable(pages), slots, num_logits=num_logits or num_tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sizes_for_which_products_are_compiled_are_few_and_change_nothing(
    dtype: torch.dtype,
) -> None:
    """Reduced precision on a CPU; float32 is not padded."""
    model = tiny_model().to(dtype)
    sizes: list[int] = []
    hooked = next(module for module in model.modules() if isinstance(module, nn.Linear))
    hooked.register_forward_pre_hook(lambda module, given: sizes.append(given[0].shape[-2]))
    runner = ModelRunner(model, "torch")
    runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
    assert runner.cache is not None
    computed: set[int] = set()
    for num_tokens in range(1, 70):
        sizes.clear()
        runner.cache.keys[0].zero_()
        logits, _ = runner.forward([prefill(num_tokens)])
        computed.update(sizes)
        assert logits.shape[0] == num_tokens
        written = runner.cache.keys[0].abs().sum(dim=(0, 2)).nonzero().flatten().tolist()
        assert written == list(range(BLOCK_SIZE, BLOCK_SIZE + num_tokens))
        plainly = model(input_ids=torch.tensor([prefill(num_tokens).tokens])).logits[0]
        torch.testing.assert_close(logits, plainly, rtol=0.05, atol=0.05)
    assert eager_token_edges(model, 69) == (
        tuple(sorted(computed)) if dtype == torch.bfloat16 else ()
    )
    padded = {*range(1, 17), 24, 32, 40, 48, 56, 64, 72}
    assert computed == (padded if dtype == torch.bfloat16 else set(range(1, 70)))


def test_a_step_does_not_look_for_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers goes through an 8B model's modules for ten microseconds each time that it is asked."""
    asked: list[object] = []
    model = tiny_model()
    planner, config = ForcedPlanner(arm="draft_model"), EngineConfig(kv_tokens=256)
    engine = Engine(model, drafters=[tiny_model(seed=1)], planner=planner, config=config)
    engine.submit([5, 6, 7], max_new_tokens=6)
    device = type(model).device
    monkeypatch.setattr(type(model), "device", property(lambda own: asked.append(own) or device))
    with engine:
        engine.run()
        assert engine.runner.device == torch.device("cpu")
    assert engine.stats.drafters["draft_model"].drafted
    assert not asked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_logits_are_padded_as_tokens_are(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    sizes: list[int] = []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, given: sizes.append(given[0].shape[-2]))
    runner = ModelRunner(model, "torch")
    runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
    whole, _ = runner.forward([prefill(60)])
    sizes.clear()
    for wanted in range(17, 25):
        logits, first = runner.forward([prefill(60, wanted)])
        assert first == [0]
        assert torch.equal(logits, whole[-wanted:])
    assert set(sizes) == ({24} if dtype == torch.bfloat16 else set(range(17, 25)))


def test_queries_that_a_model_leaves_in_float32_are_attended_in_the_type_of_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No product takes both; nor do the kept queries that pages are scored with."""
    runner = ModelRunner(tiny_model("Llama", dtype=torch.bfloat16), "torch")
    runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
    expected, _ = runner.forward([prefill(20)])
    rotate, kept = modeling_llama.apply_rotary_pos_emb, Kept()

    def rotated(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, key = rotate(*tensors)
        return query.float(), key

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
    logits, _ = runner.forward([prefill(20)], kept)
    assert torch.equal(logits, expected)
    assert kept.dtypes == {torch.bfloat16}


class Kept:
    """A sink that remembers in which type queries come."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def arrange(self, order: Sequence[int]) -> None:
        """Whatever it is."""

    def store(self, layer: int, query: Tensor) -> None:
        self.dtypes.add(query.dtype)

    def slots(self, num_tokens: int) -> list[int]:
        return [0] * num_tokens

    def at(self, slots: Tensor) -> "Kept":
        return self
