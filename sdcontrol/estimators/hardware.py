"""What a machine can do at most: arithmetic, memory bandwidth, capacity, interconnect.

Knows nothing of models. `HARDWARE` holds the vendor's figures per device, dense (no sparsity), from
NVIDIA's data sheets: A100, A10, A30 and A40 (2021), H100, H100 NVL, H200, H20 and GH200 (2024), HGX B200 (2025), L4,
L40, L40S and RTX 6000 Ada (2023), RTX A6000 (2021), and the whitepapers for the RTX 3090, 4090 and 5090 (bf16 with
fp32 accumulation). A CPU has no sheet worth the name: `measure` finds its ceilings. So do engines those of
a GPU that is not in the table.
"""

import math
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from sdcontrol.errors import ConfigError, UnknownName

__all__ = ["HARDWARE", "Ceilings", "Hardware", "by_name", "measure"]


class Ceilings(Protocol):
    """What a device was seen to do at most."""

    @property
    def flops_per_second(self) -> float:
        """Multiplying matrices of the dtype of the weights."""
        ...

    @property
    def bytes_per_second(self) -> float:
        """Read and written, copying."""
        ...

    @property
    def memory_bytes(self) -> float:
        """Of memory, in all."""
        ...


@dataclass(frozen=True, slots=True)
class Hardware:
    """The ceilings of one device."""

    name: str
    flops_per_second: float  # dense, in the dtype of the weights (bf16 in the table)
    bytes_per_second: float  # memory bandwidth
    memory_bytes: float
    link_bytes_per_second: float = 0.0  # to the other devices, one direction; 0: it stands alone
    hop_seconds: float = 0.0  # latency of one step of an all-reduce

    def __post_init__(self) -> None:
        ceilings = (self.flops_per_second, self.bytes_per_second, self.memory_bytes)
        if not all(0.0 < ceiling < math.inf for ceiling in ceilings):
            raise ConfigError(
                f"hardware {self.name!r}: FLOP/s {self.flops_per_second}, bytes/s "
                f"{self.bytes_per_second}, memory {self.memory_bytes}; all must be positive and finite"
            )
        if not all(0.0 <= own < math.inf for own in (self.link_bytes_per_second, self.hop_seconds)):
            raise ConfigError(
                f"hardware {self.name!r}: link bytes/s {self.link_bytes_per_second}, seconds of a hop "
                f"{self.hop_seconds}; both must be finite, and 0 or more"
            )

    @classmethod
    def seen(cls, name: str, ceilings: Ceilings) -> Self:
        """A device that stands alone, by what was measured."""
        return cls(
            name, ceilings.flops_per_second, ceilings.bytes_per_second, ceilings.memory_bytes
        )

    @property
    def ridge_flops_per_byte(self) -> float:
        """The arithmetic intensity from which on a kernel is compute-bound."""
        return self.flops_per_second / self.bytes_per_second


_MOST_COPYING = 8  # threads
_SMALL_BYTES = 16e9
_NVLINK_HOP = 1.4e-6
_PCIE_HOP = 5e-6

HARDWARE: dict[str, Hardware] = {
    device.name: device
    for device in (
        Hardware("A100-40GB", 312e12, 1.555e12, 40e9, 300e9, _NVLINK_HOP),
        Hardware("A100-80GB", 312e12, 2.039e12, 80e9, 300e9, _NVLINK_HOP),
        Hardware("A100-40GB-PCIe", 312e12, 1.555e12, 40e9, 32e9, _PCIE_HOP),
        Hardware("A100-80GB-PCIe", 312e12, 1.935e12, 80e9, 32e9, _PCIE_HOP),
        Hardware("H100-SXM", 989e12, 3.35e12, 80e9, 450e9, _NVLINK_HOP),
        Hardware("H100-PCIe", 756e12, 2.0e12, 80e9, 64e9, _PCIE_HOP),
        Hardware("H100-NVL", 835.5e12, 3.9e12, 94e9, 64e9, _PCIE_HOP),
        Hardware("H200", 989e12, 4.8e12, 141e9, 450e9, _NVLINK_HOP),
        Hardware("H20", 148e12, 4.0e12, 96e9, 450e9, _NVLINK_HOP),
        Hardware("GH200", 989e12, 4.0e12, 96e9, 450e9, _NVLINK_HOP),
        Hardware("B200", 2250e12, 8.0e12, 180e9, 900e9, _NVLINK_HOP),
        Hardware("L4", 121e12, 0.3e12, 24e9, 32e9, _PCIE_HOP),
        Hardware("L40", 181e12, 0.864e12, 48e9, 32e9, _PCIE_HOP),
        Hardware("L40S", 362e12, 0.864e12, 48e9, 32e9, _PCIE_HOP),
        Hardware("A10", 125e12, 0.6e12, 24e9, 32e9, _PCIE_HOP),
        Hardware("A30", 165e12, 0.933e12, 24e9, 32e9, _PCIE_HOP),
        Hardware("A40", 149.7e12, 0.696e12, 48e9, 56e9, _PCIE_HOP),
        Hardware("A6000", 154.8e12, 0.768e12, 48e9, 56e9, _PCIE_HOP),
        Hardware("RTX-6000-Ada", 364.2e12, 0.96e12, 48e9, 32e9, _PCIE_HOP),
        Hardware("RTX-3090", 71e12, 0.936e12, 24e9, 32e9, _PCIE_HOP),
        Hardware("RTX-4090", 165.2e12, 1.008e12, 24e9, 32e9, _PCIE_HOP),
        Hardware("RTX-5090", 209.5e12, 1.792e12, 32e9, 64e9, _PCIE_HOP),
    )
}

_ALIASES = {
    "a100": "A100-80GB",
    "a10040": "A100-40GB",
    "a10080": "A100-80GB",
    "a100sxm": "A100-80GB",
    "a100sxm4": "A100-80GB",
    "a100sxm40gb": "A100-40GB",
    "a100sxm440gb": "A100-40GB",
    "a100sxm80gb": "A100-80GB",
    "a100sxm480gb": "A100-80GB",
    "a10040gbsxm": "A100-40GB",
    "a10040gbsxm4": "A100-40GB",
    "a10080gbsxm": "A100-80GB",
    "a10080gbsxm4": "A100-80GB",
    "a100pcie": "A100-80GB-PCIe",
    "a100pcie40gb": "A100-40GB-PCIe",
    "a100pcie80gb": "A100-80GB-PCIe",
    "h100": "H100-SXM",
    "h10080gb": "H100-SXM",
    "h10080gbhbm3": "H100-SXM",
    "h10080gbsxm": "H100-SXM",
    "h10080gbsxm5": "H100-SXM",
    "h100sxm5": "H100-SXM",
    "h100sxm80gb": "H100-SXM",
    "h100sxm580gb": "H100-SXM",
    "h10080gbpcie": "H100-PCIe",
    "h100pcie80gb": "H100-PCIe",
    "h100nvl94gb": "H100-NVL",
    "h10094gb": "H100-NVL",
    "h200141gb": "H200",
    "h200sxm": "H200",
    "gh200480gb": "GH200",
    "rtxa6000": "A6000",
    "rtx6000adageneration": "RTX-6000-Ada",
    **{
        f"{prefix}{model}": f"RTX-{model}"
        for prefix in ("", "geforcertx")
        for model in ("3090", "4090", "5090")
    },
}


def by_name(name: str) -> Hardware:
    """The device called `name`; case, spaces, hyphens and "NVIDIA" do not matter.

    Raises `UnknownName` for a device that is not in the table.
    """
    plain = _plain(name)
    if plain == "cpu":
        raise UnknownName(
            f"hardware {name!r}: CPUs differ too much for a table; measure yours by `sdcontrol profile` "
            "and give the file that it writes, or hardware.measure()"
        )
    known = {_plain(key): device for key, device in HARDWARE.items()}
    known |= {alias: HARDWARE[key] for alias, key in _ALIASES.items()}
    if plain not in known:
        raise UnknownName(
            f"hardware {name!r} is not known; use one of {', '.join(HARDWARE)}, or measure it"
        )
    return known[plain]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def measure(
    name: str = "cpu",
    *,
    memory_bytes: float | None = None,
    copy_seconds: Callable[[int], float] | None = None,
    multiply_seconds: Callable[[int], float] | None = None,
    repeats: int = 5,
) -> Hardware:
    """This machine's ceilings, the best of `repeats` tries.

    `copy_seconds(n)` reads `n` bytes and writes them, `multiply_seconds(n)` multiplies two n x n
    matrices; by default numpy does, in float32. `memory_bytes` is what the system says unless given. Takes
    about a second. Raises `ConfigError` where the clock is too coarse to tell.
    """
    copy = copy_seconds or _NumpyCopy().seconds
    multiply = multiply_seconds or _numpy_multiply_seconds
    num_bytes, side = 1 << 27, 1024
    fastest_copy = min(copy(num_bytes) for _ in range(repeats))
    fastest_product = min(multiply(side) for _ in range(repeats))
    if not (fastest_copy > 0.0 and fastest_product > 0.0):
        raise ConfigError(
            f"measured {fastest_copy} s for a copy and {fastest_product} s for a product; both must "
            "be positive: use a finer clock"
        )
    return Hardware(
        name,
        2.0 * side**3 / fastest_product,
        2.0 * num_bytes / fastest_copy,
        _physical_bytes() if memory_bytes is None else memory_bytes,
    )


def _physical_bytes() -> float:
    """Of memory; where the system does not say, a small machine's."""
    if not hasattr(os, "sysconf"):
        return _SMALL_BYTES
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _NumpyCopy:
    """Copies between the same two buffers, whose pages are there before the clock starts.

    By a few threads: one alone does not fill the bus of a server, and many take longer to start.
    """

    def __init__(self) -> None:
        self._source = self._target = np.empty(0)
        self._num_threads = min(_num_cores(), _MOST_COPYING)

    def seconds(self, num_bytes: int) -> float:
        if self._source.nbytes != num_bytes:
            self._source, self._target = np.ones(num_bytes // 8), np.zeros(num_bytes // 8)
            self._target.fill(0.0)
        targets = np.array_split(self._target, self._num_threads)
        sources = np.array_split(self._source, self._num_threads)
        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(np.copyto, targets, sources))  # threads are there, too
            started = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            return time.perf_counter() - started


def _numpy_multiply_seconds(side: int) -> float:
    left = np.ones((side, side), dtype=np.float32)
    started = time.perf_counter()
    left @ left
    return time.perf_counter() - started
