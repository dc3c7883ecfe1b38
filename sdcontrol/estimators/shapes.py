"""Model shapes by name: `SHAPES` holds common models, from their published `config.json`.

Knows names; `ModelShape` says what a shape is, and `from_config` reads that of any other model.
"""

import re

from sdcontrol.errors import UnknownName
from sdcontrol.estimators.model_config import from_config
from sdcontrol.estimators.model_shape import ModelShape

__all__ = ["SHAPES", "ModelShape", "by_name", "from_config"]


def _dense(
    name: str, sizes: tuple[int, int, int, int, int, int, int], is_head_tied: bool = False
) -> ModelShape:
    """Layers, hidden, heads, KV heads, head dimension, intermediate, vocabulary."""
    return ModelShape(name, *sizes, is_head_tied=is_head_tied)


def _experts(
    name: str, sizes: tuple[int, int, int, int, int, int, int], experts: tuple[int, int, int]
) -> ModelShape:
    """As `_dense`, then experts, experts per token, size of an expert."""
    count, per_token, size = experts
    return ModelShape(
        name, *sizes, num_experts=count, experts_per_token=per_token, expert_size=size
    )


SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _dense("tinyllama-1.1b", (22, 2048, 32, 4, 64, 5632, 32000)),
        _dense("llama-2-7b", (32, 4096, 32, 32, 128, 11008, 32000)),
        _dense("llama-2-13b", (40, 5120, 40, 40, 128, 13824, 32000)),
        _dense("llama-2-70b", (80, 8192, 64, 8, 128, 28672, 32000)),
        _dense("llama-3-8b", (32, 4096, 32, 8, 128, 14336, 128256)),
        _dense("llama-3-70b", (80, 8192, 64, 8, 128, 28672, 128256)),
        _dense("llama-3.1-8b", (32, 4096, 32, 8, 128, 14336, 128256)),
        _dense("llama-3.1-70b", (80, 8192, 64, 8, 128, 28672, 128256)),
        _dense("llama-3.1-405b", (126, 16384, 128, 8, 128, 53248, 128256)),
        _dense("llama-3.2-1b", (16, 2048, 32, 8, 64, 8192, 128256), is_head_tied=True),
        _dense("llama-3.2-3b", (28, 3072, 24, 8, 128, 8192, 128256), is_head_tied=True),
        _dense("llama-3.3-70b", (80, 8192, 64, 8, 128, 28672, 128256)),
        ModelShape(
            "mistral-7b-v0.1",
            32,
            4096,
            32,
            8,
            128,
            14336,
            32000,
            sliding_window=4096,
            num_sliding_layers=32,
        ),
        _dense("mistral-7b", (32, 4096, 32, 8, 128, 14336, 32768)),
        _dense("mistral-nemo-12b", (40, 5120, 32, 8, 128, 14336, 131072)),
        _dense("mistral-small-24b", (40, 5120, 32, 8, 128, 32768, 131072)),
        _dense("mistral-large-123b", (88, 12288, 96, 8, 128, 28672, 32768)),
        _experts("mixtral-8x7b", (32, 4096, 32, 8, 128, 14336, 32000), (8, 2, 14336)),
        _experts("mixtral-8x22b", (56, 6144, 48, 8, 128, 16384, 32768), (8, 2, 16384)),
        _dense("qwen2.5-0.5b", (24, 896, 14, 2, 64, 4864, 151936), is_head_tied=True),
        _dense("qwen2.5-1.5b", (28, 1536, 12, 2, 128, 8960, 151936), is_head_tied=True),
        _dense("qwen2.5-3b", (36, 2048, 16, 2, 128, 11008, 151936), is_head_tied=True),
        _dense("qwen2.5-7b", (28, 3584, 28, 4, 128, 18944, 152064)),
        _dense("qwen2.5-14b", (48, 5120, 40, 8, 128, 13824, 152064)),
        _dense("qwen2.5-32b", (64, 5120, 40, 8, 128, 27648, 152064)),
        _dense("qwen2.5-72b", (80, 8192, 64, 8, 128, 29568, 152064)),
        _dense("qwen3-0.6b", (28, 1024, 16, 8, 128, 3072, 151936), is_head_tied=True),
        _dense("qwen3-1.7b", (28, 2048, 16, 8, 128, 6144, 151936), is_head_tied=True),
        _dense("qwen3-4b", (36, 2560, 32, 8, 128, 9728, 151936), is_head_tied=True),
        _dense("qwen3-8b", (36, 4096, 32, 8, 128, 12288, 151936)),
        _dense("qwen3-14b", (40, 5120, 40, 8, 128, 17408, 151936)),
        _dense("qwen3-32b", (64, 5120, 64, 8, 128, 25600, 151936)),
        _experts("qwen3-30b-a3b", (48, 2048, 32, 4, 128, 6144, 151936), (128, 8, 768)),
        _experts("qwen3-235b-a22b", (94, 4096, 64, 4, 128, 12288, 151936), (128, 8, 1536)),
    )
}

_ALIASES = {
    "llama-2-7b-32k": "llama-2-7b",
    "tinyllama": "tinyllama-1.1b",
    "mixtral": "mixtral-8x7b",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small-3.1-24b": "mistral-small-24b",
    "mistral-small-3.2-24b": "mistral-small-24b",
    "qwen2-0.5b": "qwen2.5-0.5b",
    "qwen2-1.5b": "qwen2.5-1.5b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2-72b": "qwen2.5-72b",
    "qwq-32b": "qwen2.5-32b",
}
_TUNED = re.compile(r"-(?:hf|instruct|chat|base|it|coder|math|thinking|\d{4})(?=-|$)")
_LARGE = re.compile(r"^mistral-large(-instruct)?-(2407|2411)$")  # later ones are other models
_REVISION = re.compile(r"-v\d+(?:\.\d+)?$")


def by_name(name: str) -> ModelShape:
    """The shape called `name`: case, an owner before "/", "-instruct" or the like, a date ("-2407") and
    a revision ("-v0.3") do not matter.

    Raises `UnknownName` for a model that is not in the table.
    """
    plain = name.lower().rpartition("/")[2].replace("_", "-").replace("meta-llama", "llama")
    plain = plain.replace("llama2", "llama-2").replace("llama3", "llama-3")
    plain = _LARGE.sub("mistral-large-123b", plain)
    plain = _TUNED.sub("", plain)
    if plain not in SHAPES:
        plain = _REVISION.sub("", plain)
    plain = _ALIASES.get(plain, plain)
    if plain not in SHAPES:
        raise UnknownName(
            f"model {name!r} is not known; use one of {', '.join(SHAPES)}, or a config.json"
        )
    return SHAPES[plain]
