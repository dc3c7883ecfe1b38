"""Copies between the host and a device for which nobody waits longer than they take.

Knows arrays and tensors only.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["on_its_way", "upload"]


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """The values on `device`; without waiting for what that was asked to do before."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_its_way(values: Tensor) -> Callable[[], Tensor]:
    """Begin the copy to the host. What comes back waits for that alone, not for what is asked of the device later."""
    if values.device.type != "cuda":
        return lambda: values
    there = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    there.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(values.device))

    def read() -> Tensor:
        arrived.synchronize()
        return there

    return read
