"""What surrounds a model while it is decoded: other threads, autocast, `torch.compile`."""

import copy
import threading
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdcontrol import SpeculativeDecoder
from sdcontrol.engine.attention import ATTENTION_NAME, _routes, attention_configs
from tests.engine_support import RandomPlanner, interrupt_at, random_prompt, tiny_model

OPTIONS: Mapping[str, object] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


def inputs() -> dict[str, Tensor]:
    """Two prompts, one of them padded: `generate` needs a mask for it."""
    long, short = random_prompt(30, seed=1), random_prompt(9, seed=2)
    rows = [long, [0] * 21 + short]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor([[1] * 30, [0] * 21 + [1] * 9]),
    }


def make_decoder(model: PreTrainedModel, **settings: object) -> SpeculativeDecoder:
    planner = RandomPlanner(seed=1)
    return SpeculativeDecoder(
        model, drafters="ngram", policy=planner, kv_tokens=2048, prefix_sharing=False, **settings
    )


def elsewhere(work: Callable[[], Tensor]) -> list[Tensor | Exception]:
    """What `work` gives, or raises, in a thread of its own."""
    results: list[Tensor | Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results


def amid(model: PreTrainedModel, outer: Callable[[], Tensor], inner: Callable[[], Tensor]) -> None:
    """Both say the same, where `inner` runs in another thread inside every forward of `outer`."""
    expected = outer()
    seen: list[Tensor | Exception] = []
    here = threading.get_ident()

    def interrupt(*_: object) -> None:
        if threading.get_ident() == here:
            seen.extend(elsewhere(inner))

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    try:
        assert torch.equal(outer(), expected)
    finally:
        hook.remove()
    assert seen
    for result in seen:
        assert isinstance(result, Tensor), result
        assert torch.equal(result, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_plain_generate_in_another_thread_sees_nothing_of_a_decoder(attention: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    with make_decoder(model) as decoder:
        ours = lambda: model.generate(**inputs(), **OPTIONS, custom_generate=decoder)  # noqa: E731
        plain = lambda: model.generate(**inputs(), **OPTIONS)  # noqa: E731
        assert torch.equal(ours(), plain())
        amid(model, ours, plain)
        amid(model, plain, ours)
    assert model.config._attn_implementation == attention


def test_a_decoder_can_be_made_beside_plain_generate() -> None:
    model = tiny_model()
    plain = model.generate(**inputs(), **OPTIONS)

    def work() -> Tensor:
        with make_decoder(model) as decoder:
            return model.generate(**inputs(), **OPTIONS, custom_generate=decoder)

    amid(model, lambda: model.generate(**inputs(), **OPTIONS), work)
    assert torch.equal(work(), plain)


def test_models_of_one_config_are_decoded_beside_each_other() -> None:
    first = tiny_model()
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    assert attention_configs(first) == attention_configs(second)
    with make_decoder(first) as one, make_decoder(second) as other:
        amid(
            first,
            lambda: first.generate(**inputs(), **OPTIONS, custom_generate=one),
            lambda: second.generate(**inputs(), **OPTIONS, custom_generate=other),
        )
    assert first.config._attn_implementation == "sdpa"


def test_configs_are_copied_and_written_as_before() -> None:
    config = tiny_model().config
    assert "_attn_implementation_internal" in vars(copy.deepcopy(config))
    assert ATTENTION_NAME not in str(config.to_dict())
    config._attn_implementation = "eager"
    assert config._attn_implementation == vars(config)["_attn_implementation_internal"] == "eager"


# ---- interrupts


def test_configs_name_what_they_named_wherever_an_interrupt_comes() -> None:
    """To whoever reads them at once; as it is kept, once the same thread has been inside again."""
    configs = [tiny_model().config, tiny_model("Qwen2").config]

    def forward(place: int) -> int:
        with interrupt_at(place) as counted:
            try:
                _routes.enter(configs)
            finally:
                _routes.leave(configs)
        return counted[0]

    for place in range(1, forward(0) + 1):
        with pytest.raises(KeyboardInterrupt):
            forward(place)
        assert [config._attn_implementation for config in configs] == ["sdpa", "sdpa"]
        forward(0)
        kept = [vars(config)["_attn_implementation_internal"] for config in configs]
        assert kept == ["sdpa", "sdpa"]


# ---- autocast


@pytest.mark.parametrize("is_around_making", [False, True])
def test_autocast_around_a_call_is_no_obstacle(is_around_making: bool) -> None:
    model = tiny_model()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_around_making):
        decoder = make_decoder(model)
    with decoder, torch.autocast("cpu", torch.bfloat16, enabled=not is_around_making):
        out = model.generate(**inputs(), **OPTIONS, custom_generate=decoder)
        plain = model.generate(**inputs(), **OPTIONS)
    assert out.shape == plain.shape
    assert torch.equal(out[:, :31], plain[:, :31])


# ---- torch.compile


def compile_model(model: PreTrainedModel) -> None:
    model.compile(backend="eager")


def compile_forward(model: PreTrainedModel) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def compile_layers(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


@pytest.mark.parametrize("compile_it", [compile_model, compile_forward, compile_layers])
@pytest.mark.parametrize("is_made_first", [False, True])
def test_a_compiled_model_is_decoded(
    compile_it: Callable[[PreTrainedModel], None], is_made_first: bool
) -> None:
    model = tiny_model()
    plain = model.generate(**inputs(), **OPTIONS)
    if not is_made_first:
        compile_it(model)
    with make_decoder(model) as decoder:
        if is_made_first:
            compile_it(model)
        out = model.generate(**inputs(), **OPTIONS, custom_generate=decoder)
    assert torch.equal(out, plain)
