"""This machine and this process, for the record: versions, processor, peak memory.

Knows nothing of comparisons.
"""

import platform
import re
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from sdcontrol.experiments.results import Setting

__all__ = ["PeakMemory", "setting_of"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def setting_of(device: torch.device) -> Setting:
    """What a reader needs in order to judge the numbers."""
    is_gpu = device.type == "cuda"
    return Setting(
        machine=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if is_gpu else str(device),
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": str(transformers.__version__),
            "sdcontrol": version("sdcontrol"),
        },
    )


class PeakMemory:
    """The peak since it was made: of the GPU's allocator, or of this process on Linux."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_known = _reset_peak(device)

    def metric(self) -> dict[str, float]:
        """`peak_memory_bytes`; nothing where it cannot be known."""
        if not self._is_known:
            return {}
        if self._device.type == "cuda":
            return {"peak_memory_bytes": float(torch.cuda.max_memory_allocated(self._device))}
        found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"))
        return {"peak_memory_bytes": 1024.0 * int(found[1])} if found else {}


def _reset_peak(device: torch.device) -> bool:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _RESET.write_text("5", encoding="ascii")
    except OSError:  # not Linux, or not allowed
        return False
    return True


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1] if found else platform.processor() or "unknown"
