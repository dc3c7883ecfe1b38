"""What all parts share: the device and its measured ceilings, the models, one open engine, the time.

Knows no part. Models and the engine are made when first asked for and dropped between parts.
"""

import gc
import time
from collections.abc import Callable
from functools import cached_property

import torch
from transformers import LlamaForCausalLM

from benchmarks.gpu.decoder import Decoder, DecoderSpec
from benchmarks.gpu.floors import Need, Rates, kv_bytes, score_bytes, weight_bytes
from benchmarks.gpu.models import random_llama
from benchmarks.gpu.scale import Scale
from sdcontrol.engine.ceilings import measure_ceilings

__all__ = ["Bench", "Budget"]

USABLE = 0.95  # of the free memory; allocators lose some
_CPU_BYTES = 2e9  # that tiny models may take


class Budget:
    """How long a part may go on; a clock can be passed in."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = now()
        self.seconds = seconds

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self._now() - self._started

    @property
    def left(self) -> float:
        """Seconds until the end; negative past it."""
        return self.seconds - self.spent


class Bench:
    """A device, and what is on it; `free_bytes` where they are not to be asked for."""

    def __init__(self, scale: Scale, device: torch.device, free_bytes: float | None = None) -> None:
        self.scale = scale
        self.device = device
        self.dtype: torch.dtype = getattr(torch, scale.dtype)
        self.budget = Budget(float("inf"))
        self.free_bytes = _free_bytes(device) if free_bytes is None else USABLE * free_bytes
        self._models: dict[str, LlamaForCausalLM] = {}
        self._decoder: Decoder | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether the figures are a GPU's."""
        return self.device.type == "cuda"

    @cached_property
    def rates(self) -> Rates:
        """Copy bandwidth and matrix rate: the best of a few, since clocks take a while to rise."""
        tries = [measure_ceilings(self.device, self.dtype) for _ in range(5 if self.is_cuda else 1)]
        return Rates(
            max(seen.bytes_per_second for seen in tries),
            max(seen.flops_per_second for seen in tries),
        )

    def target(self) -> LlamaForCausalLM:
        """The model that decodes."""
        return self._model("target")

    def draft(self) -> LlamaForCausalLM:
        """The draft model."""
        return self._model("draft")

    def need(self, kv_tokens: int, *, with_draft: bool = False, scored_requests: int = 0) -> Need:
        """What an engine of so many KV tokens takes, its models included.

        `scored_requests` of them may choose pages by score.
        """
        scale = self.scale
        shapes = {"target": scale.target} | ({"draft": scale.draft} if with_draft else {})
        needed: dict[str, float] = {}
        for name, shape in shapes.items():
            needed[f"{name} weights"] = weight_bytes(shape)
            needed[f"{name} KV"] = kv_bytes(shape, kv_tokens)
        if scored_requests:
            needed["page scores"] = score_bytes(scale.target, kv_tokens, scored_requests)
        needed["reserve"] = scale.reserve_bytes
        return Need(needed, self.free_bytes)

    def decoder(self, spec: DecoderSpec) -> Decoder:
        """The open engine if it is of this kind, or a new one instead."""
        if self._decoder is None or self._decoder.spec != spec:
            self._close_decoder()
            draft = self.draft() if "draft_model" in spec.drafters else None
            self._decoder = Decoder(spec, self.target(), draft)
        return self._decoder

    def release(self) -> None:
        """Free everything that a part had; compiled graphs hold memory of their own."""
        self._close_decoder()
        self._models.clear()
        if self.is_cuda and self.is_usable:
            torch.compiler.reset()
        self._collect()

    @property
    def is_usable(self) -> bool:
        """Whether the device still answers: after some errors it never does in this process."""
        try:
            self.wait()
        except RuntimeError:
            return False
        return True

    def wait(self) -> None:
        """Until the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def _model(self, name: str) -> LlamaForCausalLM:
        if name not in self._models:
            shape = self.scale.target if name == "target" else self.scale.draft
            self._models[name] = random_llama(
                shape, device=self.device, dtype=self.dtype, seed=len(name)
            )
        return self._models[name]

    def _close_decoder(self) -> None:
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None
            self._collect()

    def _collect(self) -> None:
        gc.collect()
        if self.is_cuda and self.is_usable:
            torch.cuda.empty_cache()


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return USABLE * torch.cuda.mem_get_info(device)[0]
    return _CPU_BYTES
