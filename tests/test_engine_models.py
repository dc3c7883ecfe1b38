"""Which models an engine drives, which it refuses by name, and how it leaves them."""

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.model_checks import most_tokens
from sdcontrol.errors import ConfigError, EngineClosed, RequestRefused, UnsupportedModel
from tests.engine_support import (
    ARCHITECTURES,
    COMPARISON,
    RandomPlanner,
    generate_alone,
    noised,
    random_prompt,
    run_checked,
    submit_all,
    tiny_model,
)

RECENT = "sparse_kv:32"
SMALL = EngineConfig(block_size=8, max_batch_size=4, max_prefill_tokens=64, kv_tokens=1024)


@cache
def target() -> PreTrainedModel:
    return tiny_model("Llama", seed=31)


def of_class(name: str, config: str, **settings: object) -> PreTrainedModel:
    model: PreTrainedModel = getattr(transformers, name)(getattr(transformers, config)(**settings))
    return model.eval()


def in_training() -> PreTrainedModel:
    return copy.deepcopy(target()).train()


def spread_over_devices() -> PreTrainedModel:
    model = copy.deepcopy(target())
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    return model


def with_prompt_tuning() -> object:
    import peft

    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(copy.deepcopy(target()), settings)


_SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}

REFUSED: Mapping[str, tuple[Callable[[], object], str]] = {
    "soft-capping": (
        lambda: tiny_model("Gemma2", head_dim=16, attn_logit_softcapping=50.0),
        "attention logit soft-capping",
    ),
    "sinks": (
        lambda: tiny_model("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        "attention sinks",
    ),
    "encoder-decoder": (
        lambda: of_class(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=61,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=1,
            num_heads=4,
        ),
        "encoder-decoder",
    ),
    "recurrent": (
        lambda: of_class(
            "MambaForCausalLM", "MambaConfig", vocab_size=61, hidden_size=32, num_hidden_layers=1
        ),
        "Mamba",
    ),
    "hybrid": (
        lambda: tiny_model(
            "Qwen3Next",
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
        "hybrid",
    ),
    "ALiBi": (
        lambda: of_class(
            "BloomForCausalLM", "BloomConfig", vocab_size=61, hidden_size=32, n_layer=1, n_head=4
        ),
        "Bloom",
    ),
    "an encoder": (
        lambda: of_class("BertLMHeadModel", "BertConfig", intermediate_size=32, **_SMALL),
        "not causal|AttentionInterface|forward",
    ),
    "windows that only the mask has": (
        lambda: tiny_model(
            "Qwen2Moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=2,
        ),
        "layer 0 is sliding_attention by its config, and was told a window of any",
    ),
    "the same without kinds of layers": (
        lambda: tiny_model("Phimoe", num_local_experts=4, head_dim=8, sliding_window=16),
        "layer 0 is sliding_attention",
    ),
    "chunks": (
        lambda: of_class(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            intermediate_size=64,
            intermediate_size_mlp=64,
            num_key_value_heads=2,
            num_local_experts=4,
            head_dim=8,
            **_SMALL,
        ),
        "chunked_attention",
    ),
    "a mask of its own": (
        lambda: of_class("DogeForCausalLM", "DogeConfig", intermediate_size=64, **_SMALL),
        "a mask of the model's own",
    ),
    "attention of its own": (
        lambda: of_class("FalconForCausalLM", "FalconConfig", **_SMALL),
        "AttentionInterface; decode this model with plain generate",
    ),
    "a forward that wants more": (
        lambda: of_class(
            "XmodForCausalLM", "XmodConfig", is_decoder=True, intermediate_size=32, **_SMALL
        ),
        "XmodForCausalLM: a forward without a mask and cache failed.*language",
    ),
    "no language model": (
        lambda: transformers.LlamaModel(target().config).eval(),
        "language-modelling head|output embeddings",
    ),
    "several devices": (spread_over_devices, "device_map"),
    "prompt learning": (with_prompt_tuning, "PROMPT_TUNING"),
    "no model": (lambda: torch.nn.Linear(2, 2), "Linear is no transformers PreTrainedModel"),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_what_the_attention_path_cannot_honour_is_refused_by_name(feature: str) -> None:
    make, message = REFUSED[feature]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some configs warn of how small they are
        model = make()
    with pytest.raises(UnsupportedModel, match=message):
        Engine(model, config=SMALL)


def test_a_refused_model_is_left_as_it_was_found() -> None:
    model = tiny_model("Gemma2", head_dim=16, attn_logit_softcapping=50.0)
    before = traces_of(model)
    with pytest.raises(UnsupportedModel):
        Engine(model)
    assert traces_of(model) == before


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"call model\.eval\(\) first"):
        Engine(in_training())


def test_a_draft_model_is_held_to_the_same() -> None:
    softcapped = tiny_model("Gemma2", head_dim=16, attn_logit_softcapping=50.0)
    with pytest.raises(UnsupportedModel, match="soft-capping"):
        Engine(target(), drafters=[softcapped], config=SMALL)


def check_text(model: object, reference_model: PreTrainedModel, num_new: int = 16) -> None:
    """A few prompts with all drafters give what `reference_model.generate` says."""
    prompts = [random_prompt(length, seed=length) for length in (5, 34, 60)]
    planner = RandomPlanner(seed=4)
    drafters = ["ngram", RECENT, noised(target())]
    with Engine(model, drafters=drafters, planner=planner, config=SMALL) as engine:
        ids = submit_all(engine, prompts, max_new_tokens=num_new)
        finished = run_checked(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        reference = generate_alone(reference_model, prompt, max_new_tokens=num_new, do_sample=False)
        assert finished[request_id].output == reference.tokens
    proposed, accepted = planner.totals()
    assert 0 < accepted < proposed
    assert planner.faults() == []


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
def test_lora_adapters_count() -> None:
    import peft

    torch.manual_seed(0)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    base = copy.deepcopy(target())
    prompt = random_prompt(34, seed=34)
    without = generate_alone(base, prompt, max_new_tokens=16, do_sample=False)
    model = peft.get_peft_model(base, settings).eval()
    assert generate_alone(model, prompt, max_new_tokens=16, do_sample=False) != without
    check_text(model, model)


def test_a_device_map_of_one_device_is_fine() -> None:
    model = copy.deepcopy(target())
    model.hf_device_map = {"": "cpu"}
    check_text(model, target())


def test_quantised_weights_are_used_as_they_were_loaded(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    target().save_pretrained(tmp_path)
    settings = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings
    ).eval()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert type(weight) is not torch.nn.Parameter
    check_text(model, model)


GROWING_ROPE: Mapping[str, Mapping[str, object]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [4.0, 4.0, 4.0, 4.0],
    },
}


@pytest.mark.parametrize("kind", GROWING_ROPE)
def test_rope_that_grows_with_the_longest_request_is_refused_beyond_its_original_length(
    kind: str,
) -> None:
    rope = dict(GROWING_ROPE[kind])
    if kind == "dynamic":
        model = tiny_model("Llama", seed=31, max_position_embeddings=80, rope_parameters=rope)
    else:
        lengths = {"max_position_embeddings": 160, "original_max_position_embeddings": 80}
        model = tiny_model("Phi3", seed=31, rope_parameters=rope, **lengths)
    with Engine(model, config=SMALL) as engine, pytest.raises(RequestRefused, match="only to 80"):
        engine.submit(random_prompt(70, seed=1), max_new_tokens=11, do_sample=False)
    check_text(model, model)


def with_table(num_positions: int = 64) -> PreTrainedModel:
    """Looks its positions up."""
    return of_class(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=61,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=num_positions,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


def test_a_request_beyond_a_models_table_of_positions_is_refused_alone() -> None:
    model, prompt = with_table(), random_prompt(55, seed=1)
    reference = generate_alone(model, prompt, max_new_tokens=10, do_sample=False)
    drafters = ["ngram", "sparse_kv:32"]
    with Engine(model, drafters=drafters, planner=RandomPlanner(6), config=SMALL) as engine:
        fits = submit_all(engine, [prompt], max_new_tokens=10)
        with pytest.raises(RequestRefused, match=r"to 66 tokens.*only to 65.*table"):
            engine.submit(prompt, max_new_tokens=11, do_sample=False)
        assert run_checked(engine)[fits[0]].output == reference.tokens


def test_tables_with_rows_beside_those_of_positions_end_where_the_config_says() -> None:
    model = of_class(
        "OPTForCausalLM",
        "OPTConfig",
        ffn_dim=32,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        **_SMALL,
    )
    assert most_tokens(model) == 65
    assert most_tokens(target()) is None


def test_a_draft_model_is_not_offered_beyond_its_table() -> None:
    planner = RandomPlanner(7)
    drafters = {"short": with_table(128)}
    prompts = [random_prompt(length, seed=length) for length in (30, 60)]
    with Engine(target(), drafters=drafters, planner=planner, config=SMALL) as engine:
        ids = submit_all(engine, prompts, max_new_tokens=90)
        finished = run_checked(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        reference = generate_alone(target(), prompt, max_new_tokens=90, do_sample=False)
        assert finished[request_id].output == reference.tokens
    assert planner.totals()[0] > 0
    assert planner.faults() == []


# ---- how it leaves them


def traces_of(model: PreTrainedModel) -> dict[str, object]:
    """All that an engine could have left behind in a model."""
    modules = dict(model.named_modules())
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation_config": model.generation_config.to_dict(),
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "forward": {name: module.forward.__func__ for name, module in modules.items()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules.values()],
        "training": [module.training for module in modules.values()],
        "weights": {name: p.data_ptr() for name, p in model.named_parameters()},
        "sums": {name: float(p.detach().double().sum()) for name, p in model.named_parameters()},
    }


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen3Moe"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_is_left_as_it_was_found(architecture: str, attention: str) -> None:
    assert architecture in ARCHITECTURES
    model = tiny_model(architecture, seed=31)
    model.set_attn_implementation(attention)
    before = traces_of(model)
    drafters = ["ngram", RECENT, noised(model)]
    with Engine(model, drafters=drafters, planner=RandomPlanner(1), config=SMALL) as engine:
        submit_all(engine, [random_prompt(40, seed=1)], max_new_tokens=8)
        engine.step()
        engine.step()
        assert traces_of(model) == before  # between steps, too
        run_checked(engine)
    assert traces_of(model) == before


def test_generate_works_beside_an_open_engine() -> None:
    model, prompt = target(), random_prompt(40, seed=2)
    inputs = torch.tensor([prompt])
    before = model.generate(inputs, max_new_tokens=12, do_sample=False)
    with Engine(model, drafters=["ngram"], planner=RandomPlanner(2), config=SMALL) as engine:
        ids = submit_all(engine, [prompt], max_new_tokens=12)
        while engine.has_work:
            live = dict(engine.requests)
            engine.step()
            assert torch.equal(model.generate(inputs, max_new_tokens=12, do_sample=False), before)
    assert live[ids[0]].output == before[0, len(prompt) :].tolist()


def test_two_engines_on_one_model_take_turns() -> None:
    model = target()
    prompts = [random_prompt(length, seed=length) for length in (12, 40)]
    first = Engine(model, drafters=["ngram", RECENT], planner=RandomPlanner(3), config=SMALL)
    second = Engine(model, drafters=[noised(model)], planner=RandomPlanner(4))
    with first, second:
        requests = []
        for engine in (first, second):
            ids = submit_all(engine, prompts, max_new_tokens=14)
            requests.append([engine.requests[request_id] for request_id in ids])
        while first.has_work or second.has_work:
            for engine in (first, second):
                engine.step()
        first.close()
        second.take_events()
        again = submit_all(second, prompts, max_new_tokens=14)
        requests.append([second.requests[request_id] for request_id in again])
        run_checked(second)
    for row, prompt in enumerate(prompts):
        reference = generate_alone(model, prompt, max_new_tokens=14, do_sample=False)
        assert [group[row].output for group in requests] == [reference.tokens] * 3


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Afmoe", {"num_experts": 4, "moe_intermediate_size": 16, "sliding_window": 12}),
        ("JetMoe", {"num_local_experts": 4, "kv_channels": 8}),
    ],
)
def test_models_that_take_views_of_attention_are_decoded(
    architecture: str, settings: Mapping[str, object]
) -> None:
    """As of transformers' own functions, whose results lie in memory without gaps."""
    model = tiny_model(architecture, num_experts_per_tok=2, head_dim=8, **settings)
    prompts = [random_prompt(length, seed=length) for length in (3, 30, 80)]
    with Engine(model, drafters=["ngram"], planner=RandomPlanner(5), config=SMALL) as engine:
        names = submit_all(engine, prompts, max_new_tokens=12)
        finished = run_checked(engine)
    for name, prompt in zip(names, prompts, strict=True):
        reference = generate_alone(model, prompt, max_new_tokens=12, do_sample=False)
        COMPARISON.check(reference, finished[name].output, architecture)


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    planner = RandomPlanner(5, shorten=0.0)
    with Engine(target(), drafters=[target()], planner=planner, config=SMALL) as engine:
        submit_all(engine, [random_prompt(20, seed=1)], max_new_tokens=30)
        run_checked(engine)
    proposed, accepted = planner.totals()
    assert proposed == accepted > 0


def test_a_closed_engine_holds_no_cache_and_takes_nothing() -> None:
    engine = Engine(target(), drafters=[noised(target())], config=SMALL)
    engine.submit([1, 2, 3], max_new_tokens=4, do_sample=False)
    engine.close()
    assert engine.runner.cache is None
    assert not engine.has_work
    with pytest.raises(EngineClosed):
        engine.step()
    with pytest.raises(EngineClosed):
        engine.submit([1, 2, 3], max_new_tokens=4)
    engine.close()  # twice is fine
