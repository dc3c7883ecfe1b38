"""From transformers' generation settings to what a request needs: a sampler and stop rules.

Whatever cannot be honoured is refused by name, never ignored. Knows nothing of engines or drafts.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Protocol, cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StopStringCriteria,
)

from sdcontrol.engine.request import Criterion, StopRules
from sdcontrol.engine.sampling import Processor, RowSampler
from sdcontrol.errors import ConfigError, UnsupportedGeneration

__all__ = [
    "Decoding",
    "check_generation_config",
    "decoding_of",
    "eos_token_ids",
    "fresh_seed",
    "prepare_config",
    "stop_string_criteria",
    "strings_of",
    "temperature_of",
    "tokens_of",
]

# Setting: the values that mean "not asked for", and what to call it.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "num_beams": ((None, 1), "beam search"),
    "num_beam_groups": ((None, 1), "group beam search"),
    "penalty_alpha": ((None, 0, 0.0), "contrastive search"),
    "dola_layers": ((None,), "DoLa decoding"),
    "prompt_lookup_num_tokens": ((None,), "prompt lookup (use the drafter 'ngram')"),
    "assistant_early_exit": ((None,), "early-exit drafting"),
    "constraints": ((None,), "constrained beam search"),
    "force_words_ids": ((None,), "constrained beam search"),
    "guidance_scale": ((None, 1, 1.0), "classifier-free guidance"),
    "watermarking_config": ((None,), "watermarking"),
    "token_healing": ((None, False), "token healing"),
    "output_scores": ((None, False), "output_scores"),
    "output_logits": ((None, False), "output_logits"),
    "output_attentions": ((None, False), "output_attentions"),
    "output_hidden_states": ((None, False), "output_hidden_states"),
    "cache_implementation": ((None, "dynamic"), "another cache (the engine brings its own)"),
}


@dataclass(frozen=True, slots=True)
class Decoding:
    """How one request samples and when it ends."""

    sampler: RowSampler
    rules: StopRules
    temperature: float  # 0 when greedy


class _Generator(Protocol):
    """How `generate` prepares its settings; transformers' types do not fit its own models."""

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **options: object
    ) -> tuple[GenerationConfig, dict[str, object]]: ...

    def _prepare_special_tokens(
        self, config: GenerationConfig, has_mask: bool, device: torch.device
    ) -> None: ...

    def _get_logits_processor(self, **facts: object) -> LogitsProcessorList: ...


def tokens_of(prompt: str | Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Token ids of a prompt; raises `ConfigError` for text without a tokenizer, and for what is neither."""
    if not isinstance(prompt, str):
        try:
            return [index(token) for token in prompt]
        except TypeError as error:
            shown = reprlib.repr(prompt)
            raise ConfigError(
                f"prompt {shown}: {error}; give a text, or a list of token ids"
            ) from error
    if tokenizer is None:
        raise ConfigError("a text prompt needs a tokenizer; pass tokenizer=...")
    return list(tokenizer(prompt)["input_ids"])


def check_generation_config(config: GenerationConfig) -> None:
    """Raise `UnsupportedGeneration` for a setting that cannot be honoured."""
    for name, (neutral, feature) in _REFUSED.items():
        setting = getattr(config, name, None)
        if setting not in neutral:
            raise UnsupportedGeneration(
                f"{name}={setting!r}: {feature} is not supported by speculative decoding here; "
                "remove it, or use plain generate"
            )


def prepare_config(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None,
    num_prompt_tokens: int,
    options: Mapping[str, object],
) -> GenerationConfig:
    """The settings that `generate` would arrive at.

    Raises `ConfigError` for unknown options, `UnsupportedGeneration` for known ones that cannot be
    honoured.
    """
    generator = cast(_Generator, model)
    try:
        config, unknown = generator._prepare_generation_config(generation_config, **options)
    except ValueError as error:
        raise ConfigError(f"transformers refuses these generation options: {error}") from error
    unknown = {key: value for key, value in unknown.items() if key not in _MODEL_FLAGS}
    if unknown:
        raise ConfigError(f"unknown generation options {sorted(unknown)}")
    check_generation_config(config)
    if (config.num_return_sequences or 1) > 1:
        raise UnsupportedGeneration(
            f"num_return_sequences={config.num_return_sequences}: one prompt is one request here; "
            "submit it several times, with a seed each"
        )
    generator._prepare_special_tokens(config, True, device=model.device)
    if config.max_new_tokens is None:
        configs = [model.generation_config, generation_config or GenerationConfig()]
        lengths = [options.get("max_length"), *[each.max_length for each in configs]]
        is_asked = any(length is not None for length in lengths)
        config.max_new_tokens = _room(model, config, num_prompt_tokens, is_asked=is_asked)
    if config.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {config.max_new_tokens}; ask for at least 1")
    config.max_length = num_prompt_tokens + config.max_new_tokens
    if config.min_new_tokens is not None:
        config.min_length = num_prompt_tokens + config.min_new_tokens
    return config


def _room(
    model: PreTrainedModel, config: GenerationConfig, num_prompt_tokens: int, *, is_asked: bool
) -> int:
    """New tokens within `max_length`, which counts the prompt where somebody asked for that length."""
    most = config.max_length or 20
    if not is_asked:
        positions = getattr(model.config, "max_position_embeddings", None)
        most = min(filter(None, (most + num_prompt_tokens, positions)))
    return max(most - num_prompt_tokens, 0)


_MODEL_FLAGS = frozenset({"output_attentions", "output_hidden_states", "use_cache"})


def decoding_of(
    model: PreTrainedModel,
    config: GenerationConfig,
    prompt: Sequence[int],
    *,
    seed: int | None = None,
    processors: Sequence[Processor] = (),
    criteria: Sequence[Criterion] = (),
    stop_strings: str | Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Decoding:
    """What a prepared config asks of one unpadded prompt; sampling without a seed takes a fresh one."""
    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=model.device)
    prepared = cast(_Generator, model)._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=ids,
        logits_processor=LogitsProcessorList(processors),
        device=model.device,
        model_kwargs={},
    )
    do_sample = bool(config.do_sample)
    if seed is None:
        seed = fresh_seed() if do_sample else 0
    rules = StopRules(
        max_new_tokens=int(config.max_new_tokens or 0),
        eos_token_ids=eos_token_ids(config),
        criteria=(*criteria, *_criteria_of(config, stop_strings, tokenizer)),
    )
    return Decoding(
        RowSampler(processors=prepared, do_sample=do_sample, seed=seed),
        rules,
        temperature_of(config),
    )


def _criteria_of(
    config: GenerationConfig,
    stop_strings: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[Criterion, ...]:
    strings = (*strings_of(stop_strings), *strings_of(config.stop_strings))
    timed = () if config.max_time is None else (MaxTimeCriteria(max_time=config.max_time),)
    return (*timed, *stop_string_criteria(strings, tokenizer))


def eos_token_ids(config: GenerationConfig) -> frozenset[int]:
    """Every token that ends a text."""
    tokens = getattr(config, "_eos_token_tensor", None)
    return frozenset() if tokens is None else frozenset(tokens.flatten().tolist())


def strings_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """One alone is one, as for `generate`, and not its letters."""
    return (given,) if isinstance(given, str) else tuple(given or ())


def stop_string_criteria(
    stop_strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Criterion, ...]:
    """transformers' own criterion for stop strings; raises `ConfigError` without a tokenizer."""
    if not stop_strings:
        return ()
    if tokenizer is None:
        raise ConfigError("stop_strings need a tokenizer; pass tokenizer=...")
    return (StopStringCriteria(tokenizer=tokenizer, stop_strings=list(stop_strings)),)


def temperature_of(config: GenerationConfig) -> float:
    """0 when greedy."""
    if not config.do_sample:
        return 0.0
    return 1.0 if config.temperature is None else float(config.temperature)


def fresh_seed() -> int:
    """A seed from torch's global generator, so that `torch.manual_seed` governs it."""
    return int(torch.randint(0, 2**62, ()).item())
