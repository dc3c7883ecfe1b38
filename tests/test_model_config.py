"""What shapes are read from published configs: counts, windows, stored sizes; and what is refused."""

from collections.abc import Mapping

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sdcontrol.errors import ConfigError
from sdcontrol.estimators import hardware
from sdcontrol.estimators.roofline import Forward
from sdcontrol.estimators.shapes import from_config

Config = dict[str, object]


def sized(kind: str, sizes: tuple[int, int, int, int, int, int], **more: object) -> Config:
    """Hidden, layers, heads, KV heads, intermediate, vocabulary.

    Without what a published config leaves out: no `layer_types`, no tied embeddings.
    """
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    return {"model_type": kind, **dict(zip(names, sizes, strict=True)), **more}


LLAMA = sized("llama", (4096, 32, 32, 8, 14336, 128256), tie_word_embeddings=False)
GPT_OSS = sized("gpt_oss", (2880, 24, 64, 8, 2880, 201088), head_dim=64, num_local_experts=32,
    num_experts_per_tok=4, sliding_window=128, tie_word_embeddings=False,
    quantization_config={
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
    },
)  # fmt: skip
GEMMA_3 = sized("gemma3_text", (1152, 26, 4, 1, 6912, 262144), head_dim=256, sliding_window=512,
    sliding_window_pattern=6,
)  # fmt: skip
COMMAND_R7B = sized("cohere2", (4096, 32, 32, 8, 14336, 256000), head_dim=128, sliding_window=4096,
    sliding_window_pattern=4,
)  # fmt: skip
GEMMA_2 = sized("gemma2", (3584, 42, 16, 8, 14336, 256000), head_dim=256, sliding_window=4096)
QWEN_2 = sized("qwen2", (3584, 28, 28, 4, 18944, 152064), sliding_window=32768)
ERNIE = sized("ernie4_5_moe", (2560, 28, 20, 4, 12288, 103424), moe_num_experts=64, moe_k=6,
    moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1,
)  # fmt: skip
STARCODER: Config = {
    "model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576,
    "vocab_size": 49152, "multi_query": True,
}  # fmt: skip
DBRX: Config = {
    "model_type": "dbrx", "d_model": 6144, "n_layers": 40, "n_heads": 48, "vocab_size": 100352,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    "tie_word_embeddings": False,
}  # fmt: skip
HUNYUAN = sized("hunyuan", (4096, 32, 32, 8, 3072, 128167), num_experts=64, moe_topk=[8] * 32,
    moe_intermediate_size=[3072] * 32, num_shared_expert=[1] * 32, tie_word_embeddings=True,
)  # fmt: skip
QWEN_3_MOE = sized("qwen3_moe", (2048, 48, 32, 4, 6144, 151936), num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768,
)  # fmt: skip
MINITRON = sized(
    "nemotron", (4096, 32, 48, 8, 16384, 256000), head_dim=128, tie_word_embeddings=False
)


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (STARCODER, 15.5),
        (MINITRON, 8.27),
        (COMMAND_R7B, 8.03),
        (GEMMA_2, 9.24),
        (GEMMA_3, 1.0),
        (ERNIE, 21.8),
        (GPT_OSS, 20.9),
        (DBRX, 131.6),
        (HUNYUAN, 80.4),
        (sized("cohere", (8192, 40, 64, 64, 22528, 256000)), 35.0),
        (sized("smollm3", (2048, 36, 16, 4, 11008, 128256)), 3.08),
    ],
)
def test_the_parameters_are_those_of_the_published_model(config: Config, billions: float) -> None:
    assert from_config(config).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    "kind",
    ["apertus", "arcee", "biogpt", "codegen", "ctrl", "gpt_bigcode", "gpt_neox_japanese", "nanochat",
     "persimmon", "cohere", "cohere2", "ernie4_5", "gpt_neo", "mpt", "smollm3", "aria_text",
     "ernie4_5_moe"],
)  # fmt: skip
def test_as_many_parameters_are_counted_as_transformers_makes(kind: str) -> None:
    """Of a config that leaves the tied embeddings to the default, as published ones do."""
    config = CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    made = sum(weight.numel() for weight in model.parameters())
    written = {k: v for k, v in config.to_dict().items() if k != "tie_word_embeddings"}
    assert from_config(written).num_parameters == pytest.approx(made, rel=0.02)


# ---- windows


@pytest.mark.parametrize(
    ("config", "windowed"),
    [
        (COMMAND_R7B, 24),
        ({**COMMAND_R7B, "sliding_window_pattern": None}, 24),
        (GEMMA_3, 22),
        (GEMMA_2, 21),
        (GPT_OSS, 12),
        ({**QWEN_2, "use_sliding_window": True, "max_window_layers": 21}, 7),
        ({**QWEN_2, "use_sliding_window": True, "max_window_layers": 28}, 0),
        ({**QWEN_2, "use_sliding_window": False}, 0),
        (QWEN_2, 0),
        ({**LLAMA, "sliding_window": 4096}, 32),
        ({**LLAMA, "sliding_window": 4096, "sliding_window_pattern": "LLLG"}, 24),
        ({**GEMMA_2, "layer_types": ["sliding_attention"] * 30 + ["full_attention"] * 12}, 30),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 60, "sliding_window": 512}, 32),
        ({**LLAMA, "sliding_window": -1}, 0),
        ({**GEMMA_3, "sliding_window_pattern": -6}, 26),
    ],
)
def test_layers_have_the_window_that_their_model_gives_them(config: Config, windowed: int) -> None:
    shape = from_config(config)
    assert shape.num_sliding_layers == windowed
    assert shape.sliding_window == (config["sliding_window"] if windowed else None)


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        ({"mlp_only_layers": [0, 1]}, 2),
        ({"mlp_only_layers": [0, 60]}, 1),  # of a model that was cut
        ({"mlp_only_layers": [0, 1], "decoder_sparse_step": 2}, 25),
        ({"mlp_layer_types": ["dense"] * 60}, 48),
        ({"first_k_dense_replace": -1}, 0),
    ],
)
def test_layers_without_experts_are_those_of_the_model(settings: Config, dense: int) -> None:
    """As `Qwen3MoeDecoderLayer` has it: listed, or not at a step."""
    assert from_config({**QWEN_3_MOE, **settings}).num_dense_layers == dense


# ---- what a shape cannot stand for

TYPES = ["full_attention"] * 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, "attn_layer_period"),
        ({"attn_layer_indices": [9, 18]}, "attn_layer_indices"),
        ({"attn_type_list": [0] * 7 + [1]}, "attn_type_list"),
        ({"mamba_d_state": 256}, "mamba_d_state"),
        ({"ssm_state_size": 128}, "ssm_state_size"),
        ({"block_types": ["recurrent", "attention"]}, "block_types"),
        ({"full_attention_interval": 4}, "full_attention_interval"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"model_type": "falcon_h1", "layer_types": TYPES}, "layers beside attention"),
        ({"model_type": "mamba2"}, "layers beside attention"),
        ({"model_type": "jetmoe", "num_local_experts": 8}, "experts in attention"),
        ({"hidden_size_per_layer_input": 256, "layer_types": TYPES}, "embeddings of every layer"),
        ({"ffn_config": {"ffn_type": "torch_dmoe"}}, "torch_dmoe"),
        ({"num_mystery_experts": 64}, "num_mystery_experts"),
        ({"moe_num_experts": [64, 32]}, "moe_num_experts 32 to 64"),
        ({"intermediate_size": [8192, 16384]}, "intermediate_size 8192 to 16384"),
        ({"block_configs": [{}]}, "layers of several sizes"),
        ({"model_type": "gemma4_text"}, "layers of several sizes"),
        ({"model_type": "hrm_text"}, "layers that a token passes several times"),
        ({"num_global_key_value_heads": 4, "global_head_dim": 512}, "layers of several sizes"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "layers of several sizes"),
        ({"attention_other_setting": {"num_attention_heads": 96}}, "layers of several sizes"),
        ({"num_attention_heads_per_layer": [48, 64] * 16}, "layers of several sizes"),
        ({"num_kv_shared_layers": 20}, "layers that share keys and values"),
        ({"head_dim": 192, "v_head_dim": 128}, "values of another size"),
    ],
)
def test_other_layouts_are_refused_with_a_remedy(
    settings: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        from_config({**LLAMA, **settings})
    assert "config.json" in str(refused.value) or "in a copy of it" in str(refused.value)


def test_settings_of_layers_that_a_model_does_not_have_do_no_harm() -> None:
    """Granite 4 micro: a hybrid's config, but all its layers are attention."""
    hybrid = {"mamba_d_state": 128, "mamba_expand": 2, "layer_types": ["attention"] * 32}
    assert from_config({**LLAMA, **hybrid}) == from_config(LLAMA)


# ---- as stored


@pytest.mark.parametrize(
    ("quantisation", "weight_bytes"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 0.5 + 2.5 / 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5 / 8),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, 0.5),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8DynamicActivationInt4WeightConfig"}},
            },
            0.5,
        ),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, 0.5),
        ({"quant_method": "quark", "bits": 4}, 0.5),  # what the refusal asks for
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}
                },
            },
            0.5 + 2.0 / 128,
        ),
    ],
)
def test_weights_take_their_bits_and_their_scales(
    quantisation: Mapping[str, object], weight_bytes: float
) -> None:
    shape = from_config({**LLAMA, "quantization_config": quantisation})
    assert shape.weight_bytes == pytest.approx(weight_bytes)
    assert (shape.head_bytes, shape.kv_bytes) == (2.0, 2.0)


def test_weights_of_no_known_size_are_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r'quark are of no known size; say it .* "bits": 4'):
        from_config({**LLAMA, "quantization_config": {"quant_method": "quark"}})


@pytest.mark.parametrize(
    "kept", [{"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_quant_algo": "FP8"}]
)
def test_keys_and_values_are_as_small_as_they_are_stored(kept: Mapping[str, object]) -> None:
    quantisation = {"quant_method": "modelopt", "quant_algo": "FP8", **kept}
    shape = from_config({**LLAMA, "quantization_config": quantisation})
    assert (shape.weight_bytes, shape.kv_bytes) == (1.0, 1.0)


def test_modules_that_are_not_quantised_are_priced_as_they_are() -> None:
    """gpt-oss-20b keeps its attention in bf16: 1.27 GB beside experts of 4.25 bits."""
    shape = from_config(GPT_OSS)
    attention = shape.num_layers * shape.attention_parameters
    experts = shape.num_layers * shape.num_experts * shape.expert_parameters
    router = shape.num_layers * shape.num_experts * shape.hidden_size
    assert 2.0 * attention == pytest.approx(1.27e9, rel=0.01)
    forward = Forward(shape, hardware.by_name("H100")).profile(10000, 10000, 1)
    read = next(part.bytes for part in forward.parts if part.name == "weights")
    assert read == pytest.approx(2.0 * attention + 4.25 / 8 * (experts + router))


@pytest.mark.parametrize(
    ("kept", "attention_bytes"),
    [
        ({"ignore": ["re:.*self_attn.*", "lm_head"]}, 2.0),
        (
            {"ignore": [f"model.layers.{i}.self_attn.{p}_proj" for i in range(32) for p in "qkvo"]},
            2.0,
        ),
        ({"exclude_modules": ["model.layers.0.self_attn*", "lm_head"]}, 1.0 + 1.0 / 32),
        ({"modules_to_not_convert": ["vision_tower.layers.0.self_attn", "lm_head"]}, None),
    ],
)
def test_modules_are_named_in_many_ways(
    kept: Mapping[str, object], attention_bytes: float | None
) -> None:
    quantisation = {"quant_method": "fp8", **kept}
    shape = from_config({**LLAMA, "quantization_config": quantisation})
    assert shape.attention_bytes == attention_bytes
    assert shape.weight_bytes == 1.0


def test_a_module_pattern_that_is_none_is_refused() -> None:
    quantisation = {"quant_method": "fp8", "ignore": ["re:("]}
    with pytest.raises(ConfigError, match="no regular expression"):
        from_config({**LLAMA, "quantization_config": quantisation})
