"""Linear layers that are given one and the same tensor, computed as one product.

    queries, keys, values     one product of 6144 columns is 10 us shorter than three of 4096, 1024, 1024
    gate, up                  of 8B models on an H200, 1 to 64 tokens; together a tenth of what products take

Which layers those are is seen in a forward, not known by name. Their weights lie one behind the other in memory,
and each layer's parameter is its own part of that: values, shapes and names stay as they were. Where
somebody gives a layer other weights its group is left alone. Knows torch's layers; nothing of graphs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

__all__ = ["Merged", "merge", "merged", "same_inputs"]


_Computed = tuple[Tensor, tuple[Tensor, ...]]
"""The tensor that was given, and each layer's part of what came of it."""


@dataclass(slots=True)
class Merged:
    """Layers whose weights lie one behind the other, and what was computed for those to come."""

    layers: Sequence[nn.Linear]
    weight: nn.Parameter  # [columns of all, inputs]
    bias: nn.Parameter | None
    sizes: tuple[int, ...]  # columns of each
    computed: _Computed | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the layers still have these weights."""
        return _are_adjacent([layer.weight for layer in self.layers], self.weight) and (
            self.bias is None or _are_adjacent([each.bias for each in self.layers], self.bias)
        )


class _Part(nn.Linear):
    """What a layer of a group is while the group counts: the first one asked computes for all."""

    def forward(self, given: Tensor) -> Tensor:
        """See `torch.nn.Linear`."""
        group: Merged = self.__dict__["group"]
        place: int = self.__dict__["place"]
        computed = group.computed
        if computed is None or computed[0] is not given:
            product = functional.linear(given, group.weight, group.bias)
            computed = given, product.split(group.sizes, dim=-1)
        group.computed = None if place == len(group.sizes) - 1 else computed  # nothing is kept
        return computed[1][place]


def same_inputs(model: PreTrainedModel, forward: Callable[[], object]) -> list[list[nn.Linear]]:
    """Groups of plain linear layers of one module that `forward` gives the same tensor, in the order of calls."""
    owner = {id(child): parent for parent in model.modules() for child in parent.children()}
    calls: list[tuple[nn.Linear, Tensor, int]] = []  # and how often it had been changed in place
    plain = [module for module in model.modules() if _is_plain(module)]

    def see(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        if given:
            changes = 0 if given[0].is_inference() else given[0]._version
            calls.append((module, given[0], changes))

    hooks = [module.register_forward_pre_hook(see) for module in plain]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(id(layer.weight) for layer, *_ in calls)
    groups = (
        [layer for layer, *_ in group]
        for _, group in groupby(calls, lambda c: (id(owner.get(id(c[0]))), id(c[1]), c[2]))
    )
    return [group for group in groups if _can_be_merged(group, times)]


def merge(layers: Sequence[nn.Linear]) -> Merged:
    """Lay the layers' weights one behind the other, unless they lie so already."""
    has_bias = layers[0].bias is not None
    return Merged(
        layers,
        _side_by_side([layer.weight for layer in layers]),
        _side_by_side([layer.bias for layer in layers]) if has_bias else None,
        tuple(layer.out_features for layer in layers),
    )


@contextmanager
def merged(groups: Sequence[Merged]) -> Iterator[None]:
    """Inside the block the layers of each group are computed at once, where they have their weights."""
    members = [
        (layer, group, place)
        for group in groups
        if group.is_whole
        for place, layer in enumerate(group.layers)
    ]
    try:
        for layer, group, place in members:
            layer.__dict__.update(group=group, place=place)
            layer.__class__ = _Part
        yield
    finally:
        for layer, group, _ in members:
            layer.__class__ = nn.Linear
            layer.__dict__.pop("group", None)
            layer.__dict__.pop("place", None)
            group.computed = None


def _is_plain(module: nn.Module) -> bool:
    """A linear layer with weights of its own kind, which nobody listens to."""
    if type(module) is not nn.Linear or type(module.weight.data) is not Tensor:
        return False
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    is_patched = "forward" in module.__dict__ or module._compiled_call_impl is not None
    return not is_patched and not any(hooks) and module.weight.is_contiguous()


def _can_be_merged(group: Sequence[nn.Linear], times: Mapping[int, int]) -> bool:
    """Several layers alike, each with weights that no other has, and called once."""
    first = group[0]
    return len(group) > 1 and all(
        layer.weight.dtype == first.weight.dtype
        and layer.weight.device == first.weight.device
        and (layer.bias is None) == (first.bias is None)
        and times[id(layer.weight)] == 1
        for layer in group
    )


def _side_by_side(parameters: Sequence[Tensor]) -> nn.Parameter:
    """All of them as one, of which each becomes a part."""
    first = parameters[0]
    rows = sum(len(parameter) for parameter in parameters)
    if _are_adjacent(parameters, None):
        whole = first.data.as_strided((rows, *first.shape[1:]), first.stride())
    else:
        whole = torch.cat([parameter.data for parameter in parameters])
        pieces = whole.split([len(parameter) for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.data = piece
    return nn.Parameter(whole, requires_grad=False)  # whose shape `torch.compile` takes as given


def _are_adjacent(parameters: Sequence[Tensor], whole: Tensor | None) -> bool:
    """Whether they lie one behind the other in one piece of memory, from the beginning of `whole`."""
    if whole is not None and parameters[0].data_ptr() != whole.data_ptr():
        return False
    return all(
        left.data_ptr() + left.numel() * left.element_size() == right.data_ptr()
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        for left, right in pairwise(parameters)
    )
