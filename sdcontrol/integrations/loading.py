"""A model and its tokenizer from a name: a folder, a hub name, or `bundled`.

Knows where models come from; nothing of engines or prompts. Code that a model brings along is never
run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from sdcontrol.engine.bundled import load_bundled, load_bundled_tokenizer
from sdcontrol.errors import ConfigError

__all__ = ["BUNDLED", "device_of", "load_model", "load_tokenizer"]

BUNDLED = "bundled"
_DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_model(
    name: str, *, dtype: str = "auto", device: str = "auto", role: str = "target"
) -> PreTrainedModel:
    """A causal language model, ready to decode. `role` says which of the bundled ones is meant.

    `dtype` "auto" is the one it was saved in; `device` "auto" is the GPU where there is one.
    Raises `ConfigError` where it cannot be loaded.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"no dtype {dtype!r}; choose from {sorted(_DTYPES)}")
    place = device_of(device)
    _check_folder(name)
    try:
        with _quiet():
            if name == BUNDLED:
                return load_bundled(role, dtype=_DTYPES[dtype], device=place)
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                name, dtype=_DTYPES[dtype] or "auto", trust_remote_code=False
            )
        if getattr(model, "quantization_method", None) is None:  # those stay where they are
            torch.nn.Module.to(model, place)
        model.eval()
        return model
    except Exception as error:  # whatever a file or the hub makes of it
        raise _cannot_load("model", name, error) from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; raises `ConfigError` where it cannot be loaded."""
    _check_folder(name)
    try:
        if name == BUNDLED:
            return load_bundled_tokenizer()
        with _quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                name, trust_remote_code=False
            )
        return tokenizer
    except Exception as error:
        raise _cannot_load("tokenizer", name, error) from error


def device_of(name: str) -> torch.device:
    """The device meant by `name`; raises `ConfigError` where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(
            1, device=device
        ).item()  # which a device without memory, such as meta, cannot answer
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {_first_line(error)}") from error
    return device


def _check_folder(name: str) -> None:
    """A path that does not exist is no hub name: say so without asking the hub."""
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ConfigError(f"no model folder {name!r}")


def _cannot_load(what: str, name: str, error: Exception) -> ConfigError:
    return ConfigError(f"{what} {name!r} cannot be loaded: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and notices of transformers' meanwhile."""
    verbosity = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()
