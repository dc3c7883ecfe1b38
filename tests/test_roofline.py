"""Facts about what forwards compute, move and take."""

import csv
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sdcontrol.core import Cost
from sdcontrol.errors import ConfigError, UnknownName
from sdcontrol.estimators import hardware, shapes
from sdcontrol.estimators.advice import DrafterSpec, Option, Situation, advise
from sdcontrol.estimators.calibration import PlainStep, fit, read_plain_steps
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.estimators.roofline import Calibration, Forward, RooflineCost

LLAMA = shapes.by_name("llama-3.1-8b")
H100 = hardware.by_name("H100")
LLAMA_70B = shapes.by_name("llama-3.1-70b")
A100 = hardware.by_name("A100")

DATA = Path(os.environ.get("SDCONTROL_DATA", Path(__file__).parents[2] / "shared" / "data"))


def anchor(name: str) -> Path:
    path = DATA / "anchors" / name
    if not path.exists():
        pytest.skip(f"{path} is absent; set SDCONTROL_DATA to the folder of public data")
    return path


def test_the_parameters_of_common_models_are_what_their_names_say() -> None:
    billions = {
        "tinyllama-1.1b": 1.1,
        "llama-2-7b": 6.74,
        "llama-3.1-8b": 8.03,
        "llama-3.1-70b": 70.6,
        "llama-3.2-1b": 1.24,
        "mistral-7b": 7.25,
        "mixtral-8x7b": 46.7,
        "qwen2.5-7b": 7.62,
        "qwen3-8b": 8.19,
        "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235.1,
    }
    counted = {name: shapes.SHAPES[name].num_parameters / 1e9 for name in billions}
    assert counted == pytest.approx(billions, rel=0.01)


def test_keys_and_values_are_stored_per_kv_head() -> None:
    assert LLAMA.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert shapes.by_name("llama-2-7b").kv_bytes_per_token == 4 * LLAMA.kv_bytes_per_token


LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_a_config_gives_the_shape_of_its_model() -> None:
    assert shapes.from_config(LLAMA_CONFIG, "llama-3.1-8b") == LLAMA
    halved = shapes.from_config({**LLAMA_CONFIG, "dtype": "float32", "head_dim": 64})
    assert (halved.head_dim, halved.weight_bytes, halved.kv_bytes) == (64, 4.0, 4.0)


def test_quantised_weights_are_priced_as_stored() -> None:
    quantised = {**LLAMA_CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    shape = shapes.from_config(quantised)
    assert (shape.weight_bytes, shape.head_bytes) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("quantisation", "weight_bytes"),
    [
        ({"quant_method": "gptq", "bits": 4}, 0.5),
        ({"quant_method": "fbgemm_fp8"}, 1.0),
        ({"quant_method": "mxfp4"}, 4.25 / 8),
        ({"quant_method": "QuantizationMethod.MXFP4"}, 4.25 / 8),  # as a loaded model says it
        ({"quant_method": "nvfp4"}, 4.5 / 8),
        ({"load_in_8bit": True, "quant_method": "bitsandbytes"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5 / 8),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            0.5,
        ),
    ],
)
def test_weights_are_as_large_as_their_quantisation_says(
    quantisation: dict[str, object], weight_bytes: float
) -> None:
    config = {**LLAMA_CONFIG, "quantization_config": quantisation}
    assert shapes.from_config(config).weight_bytes == weight_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization_config": {"quant_method": "secret"}}, "secret"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"interleave_moe_layer_step": 1}, "experts"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
    ],
)
def test_what_would_be_priced_as_something_else_is_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shapes.from_config({**LLAMA_CONFIG, **settings})


def test_a_mixture_of_experts_is_read_from_its_config() -> None:
    config = {
        **LLAMA_CONFIG,
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    shape = shapes.from_config(config)
    assert (shape.num_experts, shape.experts_per_token, shape.expert_size) == (128, 8, 768)
    assert shape.num_expert_layers == 32


def test_an_old_style_config_is_read_too() -> None:
    shape = shapes.from_config(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    )
    assert shape.is_head_tied
    assert not shape.is_mlp_gated
    assert shape.num_parameters == pytest.approx(124e6, rel=0.01)


def test_a_config_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        shapes.from_config({"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10})


OF_THE_HUB = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "tinyllama-1.1b",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.2": "mistral-7b",
    "mistralai/Mistral-7B-v0.3": "mistral-7b",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo-12b",
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistral-small-24b",
    "mistralai/Mistral-Large-Instruct-2407": "mistral-large-123b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "Qwen/Qwen2-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-Coder-32B-Instruct": "qwen2.5-32b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "Qwen/Qwen3-4B-Thinking-2507": "qwen3-4b",
    "Qwen/Qwen3-8B-Base": "qwen3-8b",
}


def test_names_are_forgiving_and_unknown_ones_are_refused() -> None:
    assert shapes.by_name("meta-llama/Llama-3.1-8B-Instruct") is shapes.SHAPES["llama-3.1-8b"]
    for name, known in OF_THE_HUB.items():
        assert shapes.by_name(name) is shapes.SHAPES[known]
    assert hardware.by_name("NVIDIA H100 80GB HBM3") is hardware.HARDWARE["H100-SXM"]
    assert hardware.by_name("rtx 4090") is hardware.HARDWARE["RTX-4090"]
    with pytest.raises(UnknownName, match="A100-80GB"):
        hardware.by_name("abacus")
    for name in ("my-model", "Qwen/Qwen3-8B-AWQ", "mistral-large-2512", "mistral-small-2409"):
        with pytest.raises(UnknownName, match="tinyllama"):
            shapes.by_name(name)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("a100", "A100-80GB"),
        ("A100 SXM 80GB", "A100-80GB"),
        ("a100-40gb-pcie", "A100-40GB-PCIe"),
        ("A100 PCIe", "A100-80GB-PCIe"),
        ("H100 SXM5 80GB", "H100-SXM"),
        ("h100-80gb", "H100-SXM"),
        ("H100 NVL", "H100-NVL"),
    ],
)
def test_devices_are_known_by_what_people_type(typed: str, name: str) -> None:
    assert hardware.by_name(typed).name == name


def test_a_card_in_a_pcie_slot_is_slower_and_joined_by_less() -> None:
    for size in ("40GB", "80GB"):
        module, card = (hardware.by_name(f"A100-{size}{form}") for form in ("", "-PCIe"))
        assert card.memory_bytes == module.memory_bytes
        assert card.link_bytes_per_second < module.link_bytes_per_second / 8
        assert card.hop_seconds > module.hop_seconds
    assert hardware.by_name("A100-80GB-PCIe").bytes_per_second == 1.935e12


def test_a_ceiling_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="positive and finite"):
        hardware.Hardware("box", math.inf, 1e11, 64e9)


def test_a_plain_step_is_memory_bound_and_a_large_one_compute_bound() -> None:
    forward = Forward(LLAMA, H100)
    assert forward.profile(1, 1000, 1).bound == "memory"
    assert forward.profile(4096, 4096, 8).bound == "compute"


def test_intensity_crosses_the_ridge_where_two_tokens_per_byte_reach_it() -> None:
    """A weight of 2 bytes does 2 FLOPs per token: intensity of the weights is about the tokens."""
    forward = Forward(LLAMA, H100)
    ridge = forward.profile(1, 0, 1).ridge_flops_per_byte
    assert ridge == pytest.approx(989e12 / 3.35e12)
    weights = {n: forward.profile(n, 0, 1).parts[0].intensity_flops_per_byte for n in (1, 64, 512)}
    assert weights == pytest.approx({1: 1, 64: 64, 512: 512})


def test_tokens_grow_intensity_of_weights_but_not_of_grouped_keys_and_values() -> None:
    """Decoding one token per request, KV intensity is query heads per KV head, at any batch."""
    for batch in (1, 64):
        kv = Forward(LLAMA, H100).profile(batch, 4096 * batch, batch).parts[1]
        assert kv.intensity_flops_per_byte == pytest.approx(4.0, rel=0.01)


def test_a_batch_touches_more_experts_up_to_all() -> None:
    mixtral = shapes.by_name("mixtral-8x7b")
    touched = mixtral.experts_touched(np.array([1.0, 2.0, 8.0, 1000.0])).tolist()
    assert touched[0] == pytest.approx(2.0)
    assert touched == sorted(touched)
    assert touched[-1] == pytest.approx(8.0)
    forward = Forward(mixtral, H100)
    one, eight = (forward.profile(n, 0, n).parts[0].bytes for n in (1, 8))
    assert 2.0 < eight / one < 4.0


def test_a_token_is_written_in_every_expert_that_it_visits() -> None:
    """Mixtral is Llama with two MLPs a token: 4 x 2 bytes of each element between kernels."""
    dense, mixed = shapes.by_name("mistral-7b"), shapes.by_name("mixtral-8x7b")
    one, two = (Forward(shape, H100).profile(1, 0, 1).parts[2] for shape in (dense, mixed))
    assert one.name == two.name == "activations"
    assert one.bytes == 8.0 * 32 * (4096 + 4096 + 14336)
    assert two.bytes == 8.0 * 32 * (4096 + 4096 + 2 * 14336)
    layers = replace(mixed, num_dense_layers=2, shared_expert_size=1000)
    assert layers.mlp_width_per_token == 2 * 14336 + 30 * (2 * 14336 + 1000)


def test_tensor_parallelism_divides_the_work_and_adds_all_reduces() -> None:
    alone = Forward(LLAMA, H100).profile(64, 64_000, 64)
    split = Forward(LLAMA, H100, tensor_parallel=4).profile(64, 64_000, 64)
    assert split.parts[0].bytes == pytest.approx(alone.parts[0].bytes / 4)
    assert split.all_reduce_seconds > alone.all_reduce_seconds == 0.0
    assert split.seconds < alone.seconds


def test_kv_heads_are_not_split_further_than_one_per_device() -> None:
    tiny = shapes.by_name("tinyllama-1.1b")
    four, eight = (Forward(tiny, A100, devices).profile(1, 1e6, 1) for devices in (4, 8))
    assert four.parts[1].bytes == eight.parts[1].bytes


def test_tensor_parallelism_needs_a_link() -> None:
    cpu = hardware.Hardware("cpu", 1e12, 1e11, 16e9)
    with pytest.raises(ConfigError, match="link"):
        Forward(LLAMA, cpu, tensor_parallel=2).seconds(1, 0, 1)


def test_parts_and_overheads_add_up_to_the_forward() -> None:
    forward = Forward(LLAMA, H100, tensor_parallel=2)
    profile = forward.profile(32, 32_000, 32)
    assert profile.seconds == pytest.approx(float(forward.seconds(32, 32_000, 32)))


def test_a_sliding_window_caps_what_is_read() -> None:
    windowed = replace(LLAMA, sliding_window=1024, num_sliding_layers=32)
    full, capped = (Forward(shape, H100).profile(1, 8192, 1) for shape in (LLAMA, windowed))
    assert capped.parts[1].bytes == pytest.approx(full.parts[1].bytes / 8, rel=0.01)


def test_the_roofline_is_a_cost_that_knows_its_drafters() -> None:
    draft = Forward(shapes.by_name("llama-3.2-1b"), H100)
    cost = RooflineCost(Forward(LLAMA, H100), {"draft_model": draft})
    assert isinstance(cost, Cost)
    assert float(cost.draft_seconds("ngram", 8, 0)) == 0.0
    sparse, full = cost.draft_seconds("sparse_kv", 8, np.array([4096.0, 800_000.0]))
    assert sparse < full == cost.verify_seconds(8, 800_000, 8)
    assert float(cost.draft_seconds("draft_model", 8, 4096)) < 0.5 * sparse
    assert cost.catch_up_seconds("draft_model", 512) > cost.catch_up_seconds("draft_model", 1) > 0


def test_measurement_finds_ceilings_from_times() -> None:
    found = hardware.measure(
        "test", copy_seconds=lambda count: count / 1e11, multiply_seconds=lambda n: 2 * n**3 / 5e12
    )
    assert found.bytes_per_second == pytest.approx(2e11)  # a copy reads and writes
    assert found.flops_per_second == pytest.approx(5e12)


def test_a_machine_is_measured_by_copies_between_the_same_buffers() -> None:
    """New ones would be touched for the first time. Any machine here copies from 100 MB/s to 100 TB/s."""
    found = hardware.measure()
    assert found.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1e8 < found.bytes_per_second < 1e14
    assert 1e8 < found.flops_per_second < 1e17
    copy = hardware._NumpyCopy()
    assert copy.seconds(1 << 20) > 0.0
    buffers = copy._source, copy._target
    assert copy.seconds(1 << 20) > 0.0
    assert copy._source is buffers[0]
    assert copy._target is buffers[1]
    assert np.array_equal(copy._target, copy._source)


def test_a_fit_recovers_the_calibration_that_made_the_steps() -> None:
    truth = Calibration(0.88, 0.7, 9e-5, 4e-7, kv_efficiency=0.71)
    forward = Forward(LLAMA, H100, calibration=truth)
    steps = [
        PlainStep(batch, context, float(forward.seconds(batch, batch * context, batch)))
        for batch in (1, 16, 64)
        for context in (512, 4096, 16384)
    ]
    found = fit(Forward(LLAMA, H100), steps)
    assert found.kv_efficiency == pytest.approx(0.71, abs=0.011)
    assert found.bandwidth_efficiency == pytest.approx(0.88, abs=0.02)  # as is usual
    assert found.layer_overhead_seconds == pytest.approx(9e-5, rel=0.05)
    assert found.token_overhead_seconds == found.request_overhead_seconds
    assert 2 * found.token_overhead_seconds == pytest.approx(4e-7, rel=0.1)


@pytest.mark.parametrize(
    ("weights", "kv", "reduced"),
    [(0.7, 0.7, 1.0), (0.92, 0.4, 1.0), (0.85, 0.8, 0.4), (0.8, 0.9, 2.5)],
)
def test_a_fit_prices_other_models_and_verification_too(
    weights: float, kv: float, reduced: float
) -> None:
    """Attention that is slower than matrix products, and all-reduces that take what no table says."""
    truth = Calibration(
        weights, 0.7, 2e-5, 1e-7, 0.0, 1e-7, kv_efficiency=kv, all_reduce_scale=reduced
    )
    forward, small = (Forward(shape, H100, 4, truth) for shape in (LLAMA_70B, LLAMA))
    sizes = [(batch, context) for batch in (1, 8, 32, 64) for context in (1024, 4096, 16384)]
    steps = [PlainStep(b, c, float(forward.seconds(b, b * c, b))) for b, c in sizes]
    found = fit(Forward(LLAMA_70B, H100, 4), steps)
    another = (small, 0.15) if weights > 0.8 else (forward, 0.02)  # what is unusual is not seen
    for batch, context in sizes:
        for tokens, (made_by, within) in (
            (1, (forward, 0.015)),
            (4, (forward, 0.06)),
            (1, another),
        ):
            load = tokens * batch, batch * context, batch
            there = float(made_by.seconds(*load))
            assert float(replace(made_by, calibration=found).seconds(*load)) == pytest.approx(
                there, rel=within
            )


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("reached", [0.3, 0.45, 0.6])
def test_a_fit_finds_how_fast_experts_are_read(name: str, reached: float) -> None:
    """More tokens read more of them: steps tell their bandwidth from a layer's overhead, however unusual."""
    truth = Calibration(reached, 0.7, 2e-5, 1e-7, 0.0, 1e-7)
    forward = Forward(shapes.by_name(name), H100, calibration=truth)
    sizes = [(batch, context) for batch in (1, 4, 16, 64) for context in (512, 4096, 16384)]
    found = fit(
        Forward(forward.shape, H100),
        [PlainStep(b, c, float(forward.seconds(b, b * c, b))) for b, c in sizes],
    )
    assert found.bandwidth_efficiency == pytest.approx(reached, abs=0.02)
    for batch, context in sizes:
        load = 5 * batch, batch * context, batch
        there = float(forward.seconds(*load))
        assert float(replace(forward, calibration=found).seconds(*load)) == pytest.approx(
            there, rel=0.1
        )


@pytest.mark.parametrize("batch", [1, 32])
def test_steps_of_one_batch_size_say_nothing_of_what_a_request_adds(batch: int) -> None:
    """What they leave over belongs to layers: verification at another size is priced alike."""
    truth = Calibration(0.88, 0.7, layer_overhead_seconds=9e-5)
    forward = Forward(LLAMA, H100, calibration=truth)
    steps = [
        PlainStep(batch, context, float(forward.seconds(batch, batch * context, batch)))
        for context in (512, 4096, 16384, 32768)
    ]
    found = fit(Forward(LLAMA, H100), steps)
    assert found.token_overhead_seconds == truth.token_overhead_seconds
    assert found.layer_overhead_seconds == pytest.approx(9e-5, rel=0.05)
    fitted = Forward(LLAMA, H100, calibration=found)
    for tokens in (1, 5 * batch, 256):
        there = float(forward.seconds(tokens, 4096 * batch, batch))
        assert float(fitted.seconds(tokens, 4096 * batch, batch)) == pytest.approx(there, rel=0.03)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,2,3", "line 3: batch_size is '0'"),
        ("1,2.5,3", "line 3: context_tokens is '2.5'"),
        ("1,,3", "line 3: context_tokens is ''"),
        ("1,2", "line 3: ms is None"),
        ("1,2,inf", "line 3: ms is 'inf'"),
        ("1,2,-3", "line 3: ms is '-3'"),
        ("one,2,3", "line 3: batch_size is 'one'"),
    ],
)
def test_a_row_that_is_no_step_is_named(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(f"batch_size,context_tokens,ms\n1,2,3\n{row}\n")
    with pytest.raises(ConfigError, match=message):
        read_plain_steps(path)


def test_what_spreadsheets_write_is_read(tmp_path: Path) -> None:
    """A mark of the byte order, whole numbers with a point, cells beyond the last column."""
    path = tmp_path / "steps.csv"
    path.write_text("\ufeffbatch_size,context_tokens,ms\n4.0,128.0,3.5,\n4,128,3.5\n", "utf-8")
    assert read_plain_steps(path) == [PlainStep(4, 128, pytest.approx(3.5e-3))]


def test_spaces_in_the_heading_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("batch_size, context_tokens, ms\n4, 128, 3.5\n")
    assert read_plain_steps(path) == [PlainStep(4, 128, pytest.approx(3.5e-3))]


def test_a_file_without_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("batch_size,context_tokens\n1,2\n")
    with pytest.raises(ConfigError, match="plain_seconds"):
        read_plain_steps(path)


def test_advice_ranks_by_speedup_and_counts_the_bonus_token() -> None:
    target = Forward(LLAMA, H100)
    drafters = [DrafterSpec("ngram", 0.3), DrafterSpec("sparse_kv:512", 0.9)]
    advice = advise(target, Situation(32, 16_000), drafters, lengths=(1, 2, 3))
    speedups = [option.speedup for option in advice.options]
    assert speedups == sorted(speedups, reverse=True)
    assert advice.best is not None
    assert advice.best.arm == "sparse_kv:512"
    two = next(o for o in advice.options if (o.arm, o.num_draft_tokens) == ("ngram", 2))
    assert two.tokens_per_step == pytest.approx(1 + 0.3 + 0.09)
    assert two.draft_round_seconds == 0.0


def test_no_drafter_is_advised_where_decoding_is_compute_bound() -> None:
    drafters = [DrafterSpec("ngram", 0.5), DrafterSpec("sparse_kv:512", 0.8)]
    assert advise(Forward(LLAMA, H100), Situation(2048, 128), drafters).best is None


# Against measurements by others


def test_linear_layers_on_an_a100_take_what_was_measured() -> None:
    """Median error over 1 to 4096 tokens at most 10 %, after fitting nothing but one efficiency."""
    measured = json.loads(anchor("vidur_linear_layers.json").read_text())
    for name, shape in (("llama_2_7b_a100", "llama-2-7b"), ("llama_3_8b_a100", "llama-3-8b")):
        calibration = Calibration(layer_overhead_seconds=0.0, token_overhead_seconds=0.0)
        forward = Forward(shapes.by_name(shape), A100, calibration=calibration)
        errors = [
            forward.profile(tokens, 0, 1).parts[0].seconds * 1e3 / milliseconds - 1.0
            for tokens, milliseconds in zip(measured["tokens"], measured[name], strict=True)
        ]
        assert np.median(np.abs(errors)) < 0.1, errors


Anchor = dict[str, str]


def advised(row: Anchor, target: Forward) -> tuple[float, Option]:
    """(plain seconds, the option measured in `row`) as advised."""
    situation = Situation(int(row["batch_size"]), int(row["context_tokens"]))
    length, budget = int(row["num_draft_tokens"]), int(row["draft_kv_budget_tokens"])
    acceptance = (math.sqrt(4.0 * float(row["tokens_per_step"]) - 3.0) - 1.0) / 2.0  # 1 + a + a^2
    if row["pair"].startswith("a_"):
        # TinyLlama has four KV heads: it drafts on four of the eight devices
        draft = Forward(shapes.by_name("tinyllama-1.1b"), A100, 4, target.calibration)
        drafter = DrafterSpec("draft_model", acceptance, draft, budget)
    else:
        drafter = DrafterSpec(f"sparse_kv:{budget}", acceptance)
    advice = advise(target, situation, [drafter], [length])
    return advice.plain_seconds, advice.options[0]


def test_advice_agrees_with_the_measurements_on_eight_a100() -> None:
    """MagicDec, table 3; calibrated on its plain steps alone."""
    path = anchor("magicdec_table3_llama2.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    target = Forward(shapes.by_name("llama-2-7b"), A100, tensor_parallel=8)
    target = replace(target, calibration=fit(target, read_plain_steps(path)))
    errors: dict[str, list[float]] = {"plain": [], "verify": [], "draft": [], "speedup": []}
    cells: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        plain, option = advised(row, target)
        drafting = option.num_draft_tokens * option.draft_round_seconds
        errors["plain"].append(plain * 1e3 / float(row["plain_ms_per_token"]) - 1.0)
        errors["verify"].append(option.verify_seconds * 1e3 / float(row["verify_ms"]) - 1.0)
        errors["draft"].append(drafting * 1e3 / float(row["draft_ms"]) - 1.0)
        errors["speedup"].append(option.speedup / float(row["speedup"]) - 1.0)
        cell = cells.setdefault((row["batch_size"], row["context_tokens"]), [])
        cell.append((option.speedup, float(row["speedup"])))
    medians = {name: float(np.median(np.abs(values))) for name, values in errors.items()}
    assert medians["plain"] <= 0.07
    assert medians["verify"] <= 0.12
    assert medians["draft"] <= 0.15
    assert medians["speedup"] <= 0.10
    contested = [pairs for pairs in cells.values() if len(pairs) == 2]
    assert len(contested) == 13
    for pairs in contested:
        assert max(pairs)[1] >= 0.97 * max(measured for _, measured in pairs)


def test_forwards_of_any_batch_are_priced_in_one_array() -> None:
    """Tokens, KV tokens and requests broadcast."""
    tokens, kv, requests = np.array([[4], [9], [40]]), np.array([1e3, 2e3, 2e3, 1e3]), [1, 2, 4, 4]
    roofline = RooflineCost(Forward(LLAMA, H100))
    for cost in (roofline, OnlineCost(), OnlineCost(roofline, (8, 16))):
        found = cost.verify_seconds(tokens, kv, np.array(requests))
        assert found.tolist() == [
            [float(cost.verify_seconds(n, k, r)) for k, r in zip(kv, requests, strict=True)]
            for n in (4, 9, 40)
        ]


def test_catch_ups_are_priced_one_by_one_or_in_an_array() -> None:
    """A cost takes arrays everywhere."""
    tokens = np.array([[0, 1, 7], [512, 2048, 7]])
    small = Forward(shapes.by_name("llama-3.2-1b"), H100)
    roofline = RooflineCost(Forward(LLAMA, H100), {"draft_model": small})
    for cost in (roofline, OnlineCost(), OnlineCost(roofline)):
        found = np.asarray(cost.catch_up_seconds("draft_model", tokens))
        one_by_one = [cost.catch_up_seconds("draft_model", int(n)) for n in tokens.ravel()]
        assert found.shape == tokens.shape
        assert found.ravel().tolist() == one_by_one
        assert 0.0 == found[0, 0] < found[0, 1] < found[0, 2] < found[1, 1]


def test_a_catch_up_is_computed_once_for_each_model_and_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A controller asks for the same ones after every lesson, and each takes two forwards to price."""
    small = Forward(shapes.by_name("llama-3.2-1b"), H100)
    cost = RooflineCost(Forward(LLAMA, H100), {"draft_model": small})
    expected = {
        tokens: float(small.seconds(1.0 + tokens, 0.0, 1.0) - small.seconds(1.0, 0.0, 1.0))
        for tokens in (1, 7, 2048)
    }
    priced: list[float] = []
    seconds = Forward.seconds

    def counting(self: Forward, tokens: float, *rest: float) -> object:
        priced.append(tokens)
        return seconds(self, tokens, *rest)

    monkeypatch.setattr(Forward, "seconds", counting)
    for _ in range(3):
        assert {n: cost.catch_up_seconds("draft_model", n) for n in expected} == expected
    assert len(priced) == 2 * len(expected)
    cost.draft_models["draft_model"] = Forward(LLAMA, H100)  # another model has another price
    assert cost.catch_up_seconds("draft_model", 7) > expected[7]
