"""How layers are computed while a graph is recorded: the same numbers in fewer, larger launches.

    products      linear layers that are given one tensor are one product (`merging`)
    the rest      norms, rotary embedding, activations and sums between products are fused by
                  `torch.compile`, where asked for: some seconds for each kind of layer, once

Outside the block the model is as it was: whoever else calls it, and every forward without a graph, sees nothing of this.
Knows modules and how a runner probes them; nothing of buckets or recorders.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from sdcontrol.engine.attention import make_opaque
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.merging import Merged, merge, merged, same_inputs
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.logs import EventLog

__all__ = ["Fusion", "fusion_of"]

log = EventLog(__name__)


class Fusion:
    """The groups of one model, and its layers as they are compiled."""

    def __init__(self, groups: Sequence[Merged], layers: Sequence[nn.Module]) -> None:
        self.groups = groups
        self._calls = [(layer, _compiled(layer)) for layer in layers]

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled."""
        return bool(self._calls)

    def stop_compiling(self) -> None:
        """From now on layers are taken as they are."""
        self._calls = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the model computes so. One thread at a time."""
        try:
            for layer, call in self._calls:
                layer.__dict__["_compiled_call_impl"] = call
            with merged(self.groups):
                yield
        finally:
            for layer, _ in self._calls:
                layer.__dict__.pop("_compiled_call_impl", None)


def fusion_of(runner: ModelRunner, config: EngineConfig) -> Fusion:
    """What can be fused in this runner's model, as the settings ask for it.

    Weights are laid anew, which takes the memory of one group meanwhile; where that fails the
    remaining groups are left out, with a warning.
    """
    groups: list[Merged] = []
    if config.merge_projections:
        groups = _merged_groups(same_inputs(runner.model, runner.probe))
    layers: list[nn.Module] = []
    if config.compile_layers:
        make_opaque()
        layers = _layers_of(runner)
    return Fusion(groups, layers)


def _merged_groups(found: Sequence[Sequence[nn.Linear]]) -> list[Merged]:
    groups: list[Merged] = []
    try:
        for layers in found:
            groups.append(merge(layers))
    except RuntimeError as error:  # no memory, or parameters that refuse other memory
        log.warning("projections_left_apart", merged=len(groups), of=len(found), reason=str(error))
    return groups


def _layers_of(runner: ModelRunner) -> list[nn.Module]:
    """The modules that hold an attention module each, unless somebody has compiled them."""
    attention = set(runner.attention)
    return [
        parent
        for parent in runner.model.modules()
        if not attention.isdisjoint(parent.children()) and parent._compiled_call_impl is None
    ]


def _compiled(layer: nn.Module) -> Callable[..., object]:
    """One compilation serves all layers alike, at any number of tokens; of one token it is another."""
    compiled: Callable[..., object] = torch.compile(layer._call_impl, dynamic=True)
    return compiled
