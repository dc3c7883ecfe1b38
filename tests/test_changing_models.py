"""A model that changes between calls: the text is that of the model as it is now."""

import warnings
from collections.abc import Mapping

import peft
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdcontrol import SpeculativeDecoder
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.weights import model_state
from sdcontrol.errors import ConfigError, UnsupportedGeneration
from tests.engine_support import ROOMY, random_prompt, tiny_model
from tests.graph_support import use_fake_graphs

NEW = 12
OPTIONS: Mapping[str, object] = {"max_new_tokens": NEW, "do_sample": False}


def inputs(num_rows: int = 1, length: int = 40) -> dict[str, Tensor]:
    ids = torch.tensor([random_prompt(length, seed) for seed in range(num_rows)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_decoder(model: object) -> SpeculativeDecoder:
    return SpeculativeDecoder(model, policy="off", kv_tokens=2048)


def check_text(model: PreTrainedModel, decoder: SpeculativeDecoder) -> list[int]:
    """The decoder's text, which is the model's own."""
    plain = model.generate(**inputs(), **OPTIONS)
    assert torch.equal(model.generate(**inputs(), **OPTIONS, custom_generate=decoder), plain)
    return plain[0].tolist()


def with_adapters() -> peft.PeftModel:
    """Two adapters, `default` and `second`."""
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj"], init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(tiny_model(), settings)
        model.add_adapter("second", settings)
    return model.eval()


def add_noise(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_each_adapter_writes_its_own_text() -> None:
    model = with_adapters()
    with make_decoder(model) as decoder:
        first = check_text(model, decoder)
        model.set_adapter("second")
        second = check_text(model, decoder)
        with model.disable_adapter():
            neither = check_text(model, decoder)
        model.set_adapter("default")
        assert check_text(model, decoder) == first
        model.merge_adapter()
        assert check_text(model, decoder) == first
    assert len({tuple(text) for text in (first, second, neither)}) == 3


def test_changed_weights_write_their_own_text() -> None:
    model = tiny_model()
    with make_decoder(model) as decoder:
        before = check_text(model, decoder)
        add_noise(model)
        assert check_text(model, decoder) != before


def test_hooks_and_replaced_forwards_write_their_own_text() -> None:
    """As those that steer a model by what they add to a layer's output."""
    model = tiny_model(num_hidden_layers=3)
    first, second = model.model.layers[:2]
    with make_decoder(model) as decoder:
        texts = [check_text(model, decoder)]
        hook = first.register_forward_hook(lambda _, given, out: out.flip(-1))
        texts.append(check_text(model, decoder))
        hook.remove()
        assert check_text(model, decoder) == texts[0]
        hook = second.register_forward_pre_hook(lambda _, given: (given[0].roll(1, -1), *given[1:]))
        texts.append(check_text(model, decoder))
        hook.remove()
        forward = first.mlp.forward
        first.mlp.forward = lambda given: 3 * forward(given)
        texts.append(check_text(model, decoder))
    assert len(set(map(tuple, texts))) == len(texts)


@pytest.mark.parametrize("seed", [6, 16, 28])
def test_prompts_computed_under_autocast_are_not_the_models_own(seed: int) -> None:
    model, prompt = tiny_model(seed=seed), inputs(length=300)
    with make_decoder(model) as decoder:
        plain = decoder.engine.model_content()
        with torch.autocast("cpu", torch.bfloat16):
            assert decoder.engine.model_content() != plain
            model.generate(**prompt, **OPTIONS, custom_generate=decoder)
        assert decoder.engine.model_content() == plain
        out = model.generate(**prompt, **OPTIONS, custom_generate=decoder)
    assert torch.equal(out, model.generate(**prompt, **OPTIONS))


def test_hooks_that_record_outputs_do_not_belong_to_a_models_state() -> None:
    """transformers adds them when hidden states are first asked for, and never takes them away."""
    model = tiny_model()
    before = model_state(model)
    model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert model_state(model) == before


def test_weights_written_unseen_count_once_that_is_said() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    with make_decoder(model) as decoder:
        before = check_text(model, decoder)
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data.copy_(new.data)
        decoder.forget()
        assert check_text(model, decoder) != before


def test_prompts_are_shared_while_the_model_stays_as_it_is() -> None:
    with Engine(tiny_model(), config=EngineConfig(**ROOMY)) as engine:
        prompt = random_prompt(40, seed=0)

        def prefilled() -> int:
            engine.submit(prompt, max_new_tokens=3, do_sample=False)
            prefilled = engine.step().view.prefill_tokens
            engine.run()
            return prefilled

        assert prefilled() == 40
        assert prefilled() < 10
        engine.forget()
        assert prefilled() == 40


def test_rotary_buffers_do_not_belong_to_a_models_state() -> None:
    model = tiny_model()
    before = model_state(model)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    assert model_state(model) == before
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert model_state(model).layout != before.layout


def test_weights_of_inference_mode_have_a_state() -> None:
    with torch.inference_mode():
        model = tiny_model()
    assert model_state(model) == model_state(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("num_rows", [1, 2])
def test_adapters_for_each_row_are_refused_by_name(num_rows: int) -> None:
    model = with_adapters()
    names = ["second"] * num_rows
    with make_decoder(model) as decoder:
        with pytest.raises(UnsupportedGeneration, match=r"adapter_names.*set_adapter"):
            model.generate(
                **inputs(num_rows), **OPTIONS, adapter_names=names, custom_generate=decoder
            )
        assert not decoder.engine.has_work
        check_text(model, decoder)


def test_training_mode_is_refused_whenever_it_begins() -> None:
    model = tiny_model()
    with make_decoder(model) as decoder:
        model.train()
        with pytest.raises(ConfigError, match=r"training mode; call model.eval\(\)"):
            model.generate(**inputs(), **OPTIONS, custom_generate=decoder)
        with pytest.raises(ConfigError, match="training mode"):
            decoder.engine.submit([1, 2, 3], **OPTIONS)
        model.eval()
        check_text(model, decoder)


def test_another_dtype_than_the_caches_is_refused() -> None:
    model = tiny_model()
    with make_decoder(model) as decoder:
        model.to(torch.bfloat16)
        with pytest.raises(ConfigError, match=r"from torch.float32 to torch.bfloat16.*new decoder"):
            model.generate(**inputs(), **OPTIONS, custom_generate=decoder)
        model.to(torch.float32)
        check_text(model, decoder)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_graphs_of_another_adapter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_graphs(monkeypatch)
    model = with_adapters()
    with make_decoder(model) as decoder:
        check_text(model, decoder)
        model.set_adapter("second")
        with pytest.raises(ConfigError, match=r"adapters changed.*cuda_graphs=False"):
            model.generate(**inputs(), **OPTIONS, custom_generate=decoder)
        model.set_adapter("default")
        check_text(model, decoder)
        hook = model.base_model.model.lm_head.register_forward_hook(lambda *_: None)
        with pytest.raises(ConfigError, match="hooks"):
            model.generate(**inputs(), **OPTIONS, custom_generate=decoder)
        hook.remove()
        check_text(model, decoder)
    with SpeculativeDecoder(model, policy="off", kv_tokens=2048, cuda_graphs=False) as decoder:
        model.set_adapter("second")
        check_text(model, decoder)
