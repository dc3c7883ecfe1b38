"""The user's model, between an engine's steps: whether it is still the one that was probed.

Knows runners, weights and autocast; nothing of requests or blocks.
"""

import torch

from sdcontrol.engine.attention import make_opaque_to
from sdcontrol.engine.model_checks import check_mode
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.weights import model_state
from sdcontrol.errors import ConfigError

__all__ = ["ModelWatch"]


class ModelWatch:
    """Compares a model that has its cache and graphs with what it is later."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._model = runner.model
        self._dtype = runner.model.dtype
        self._layout = model_state(runner.model).layout
        self._num_forgotten = 0

    def forget(self) -> None:
        """From now on keys and values of before count as another model's."""
        self._num_forgotten += 1

    def content(self) -> bytes:
        """A digest: where it is the same, keys and values of the same tokens are, autocast included.

        Raises `ConfigError` where the model cannot be decoded as it is now, `UnsupportedGeneration`
        where adapters were chosen for each row.
        """
        check_mode(self._model)
        make_opaque_to(self._model)
        if self._model.dtype != self._dtype:
            raise ConfigError(
                f"the model's dtype changed from {self._dtype} to {self._model.dtype}, and the KV "
                "cache was made for the first; make a new decoder"
            )
        state = model_state(self._model)
        if self._runner.graphs is not None and state.layout != self._layout:
            raise ConfigError(
                "the model's adapters changed, its hooks did, or its weights moved in memory, and CUDA "
                "graphs keep what they were made of; make a new decoder, or one with cuda_graphs=False"
            )
        return state.content + self._num_forgotten.to_bytes(8, "little") + self._autocast()

    def _autocast(self) -> bytes:
        """In which type this thread would have the model compute, where that is not its own."""
        device = self._model.device.type
        enabled = torch.is_autocast_enabled(device)
        return str(torch.get_autocast_dtype(device)).encode() if enabled else b""
