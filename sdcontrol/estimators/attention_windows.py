"""Which layers of a model attend to a window, from a parsed `config.json`.

Knows the lists and patterns in which configs say so, and the defaults of a `model_type` (of transformers
5), on which configs of before 2025 rely.
"""

from collections.abc import Mapping

from sdcontrol.estimators.config_numbers import whole_number

__all__ = ["windows_of"]

_FULL_EVERY = {  # of so many layers one attends to everything
    "afmoe": 4,
    "cohere2": 4,
    "cohere2_moe": 4,
    "cwm": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "granite_swa": 4,
    "granitemoe_swa": 4,
    "olmo3": 4,
    "vaultgemma": 2,
}
_FIRST_FULL = {"dots1": 62, "qwen2": 28, "qwen2_5_vl": 80, "qwen2_vl": 80, "qwen3": 28}
"""Models whose first `max_window_layers` layers attend to everything, and how many those are."""
_UNWINDOWED = frozenset(
    {"qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "smollm3"}
)
"""Models that have a window, but do not use it unless they are told to."""
_WINDOWED = "L"  # in a pattern such as "LLLG"


def windows_of(config: Mapping[str, object], kind: str, num_layers: int) -> tuple[int | None, int]:
    """The window in tokens, and how many of the layers have it; (None, 0) without.

    `config` is a parsed `config.json`, `kind` its `model_type`.
    """
    window = whole_number(config, "sliding_window")
    used = config.get("use_sliding_window")
    if used is None:
        used = kind not in _UNWINDOWED
    if window is None or window < 1 or not used:  # some say that they have none by 0 or -1
        return None, 0
    sliding = _sliding_layers(config, kind, num_layers)
    return (window, sliding) if sliding else (None, 0)


def _sliding_layers(config: Mapping[str, object], kind: str, num_layers: int) -> int:
    listed = config.get("layer_types")
    if isinstance(listed, list) and listed:
        return sum("sliding" in str(layer) for layer in listed[:num_layers])
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return sum(pattern[layer % len(pattern)] == _WINDOWED for layer in range(num_layers))
    names = ("sliding_window_pattern", "global_attn_every_n_layers")
    every = whole_number(config, *names) or _FULL_EVERY.get(kind)
    if every is not None and every > 0:
        return num_layers - num_layers // every
    if kind in _FIRST_FULL:
        full = whole_number(config, "max_window_layers")
        return max(num_layers - (_FIRST_FULL[kind] if full is None else max(full, 0)), 0)
    return num_layers
