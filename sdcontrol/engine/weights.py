"""What a model's text depends on beside its input: its weights as they are now, adapters and hooks.

Knows modules and tensors; nothing of forwards, caches or requests.
"""

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from torch import Tensor, nn

from sdcontrol.errors import UnsupportedGeneration

__all__ = ["ModelState", "model_state"]

# What PEFT's layers keep of themselves beside their weights.
_ADAPTER_FACTS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
_ROW_FACTS = frozenset({"adapter_names", "alora_offsets"})  # that it hands them for a forward
_DIGEST_BYTES = 16


class ModelState(NamedTuple):
    """Two digests that are equal as long as a model computes the same from the same weights."""

    layout: bytes  # which tensors there are and where, which adapters count, and who hooks in
    content: bytes  # the same, how often tensors were written to, which forwards are replaced


def model_state(model: nn.Module) -> ModelState:
    """The state of a model, in a fraction of a millisecond for hundreds of modules.

    torch does not count what is written through `tensor.data` or in inference mode: neither is seen
    here. Raises `UnsupportedGeneration` where a call chose adapters for each row.
    """
    _check_hooks(model)
    places, writes = array("q"), array("q")
    facts: list[object] = []
    for module in _modules(model):
        inside = module.__dict__
        if "_active_adapter" in inside:
            facts.append([inside.get(name) for name in _ADAPTER_FACTS])
        if module._forward_hooks or module._forward_pre_hooks:
            places.extend(_hooked_in(module))
        if "forward" in inside:
            writes.append(id(inside["forward"]))
        for tensor in _tensors(module):
            places.append(id(tensor))
            places.append(_address(tensor))
            writes.append(0 if tensor.is_inference() else tensor._version)
    layout = _digest(places.tobytes(), repr(facts).encode())
    return ModelState(layout, _digest(layout, writes.tobytes()))


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """All of them; one with several parents comes several times."""
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            waiting.extend(module._modules.values())
            yield module


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Its own parameters and buffers, but those that it makes anew, such as rotary frequencies."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield buffer


def _hooked_in(module: nn.Module) -> Iterator[int]:
    """Numbers of who may change what a module computes, which come once in a process.

    transformers' own hooks look at outputs, and change nothing.
    """
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for number, hook in hooks.items():
            if not getattr(hook, "__module__", "").startswith("transformers."):
                yield number


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor that is made of others
        return 0


def _check_hooks(model: nn.Module) -> None:
    """PEFT hands `adapter_names` to its layers by hooks, for the rows of one plain forward.

    It leaves them there when `generate` raises, and every later call would be refused too.
    """
    found = [
        (module, key, name)
        for module in _modules(model)
        if module._forward_pre_hooks
        for key, hook in module._forward_pre_hooks.items()
        for name in _ROW_FACTS.intersection(getattr(hook, "keywords", ()))
    ]
    for module, key, _ in found:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    if found:
        name = found[0][2]
        raise UnsupportedGeneration(
            f"{name} is not supported by speculative decoding: one adapter serves all rows; leave "
            "it out and choose an adapter with set_adapter"
        )


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()
