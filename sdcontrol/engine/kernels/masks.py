"""What each query of a group may see: one additive mask, made once a forward.

Knows groups, windows and trees; nothing of caches or of how attention is computed.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sdcontrol.engine.copies import upload
from sdcontrol.engine.packing import AttentionGroup, ancestors

__all__ = ["attention_mask", "needs_company"]


def needs_company(rows: Tensor) -> bool:
    """Whether a row that is alone in its block would take longer than two."""
    return rows.device.type == "cpu" and rows.dtype == torch.bfloat16


def attention_mask(
    group: AttentionGroup, window: int | None, dtype: torch.dtype, shared: int, num_keys: int
) -> Tensor | None:
    """Additive mask `[requests, queries * shared, keys]`; None: everything is visible.

    Where a row may get company there is one more, which sees everything. Made once a forward and kept
    in the group for the layers that follow.
    """
    if window is not None and window >= group.num_keys:
        window = None
    key = (window, dtype, shared, num_keys)
    if key not in group.masks:
        mask = _build_mask(group, window, dtype, num_keys)
        folded = None if mask is None else mask.repeat_interleave(shared, dim=1)
        if folded is not None and needs_company(folded):
            folded = functional.pad(folded, (0, 0, 0, 1))
        group.masks[key] = folded
    return group.masks[key]


def _build_mask(
    group: AttentionGroup, window: int | None, dtype: torch.dtype, num_keys: int
) -> Tensor | None:
    even = min(group.starts) + 1 == num_keys and group.num_queries == 1
    if even and window is None:
        return None
    device = group.device
    index = torch.arange(num_keys, device=device)
    starts = np.array(group.starts, dtype=np.int64)
    last = starts[:, None, None] + np.arange(group.num_queries)[:, None]  # key that a query sees
    limits = upload(last, device)
    visible = index <= limits
    if window is not None:
        visible &= index > limits - window
    for row, parents in enumerate(group.trees):
        if parents is not None:
            _show_tree(visible[row], group.starts[row], parents, window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def _show_tree(
    visible: Tensor,  # [queries, keys] of one request
    start: int,
    parents: tuple[int, ...],
    window: int | None,
) -> None:
    """Inside a draft, a node sees the path to its root; before it, what its depth allows."""
    nodes = len(parents)
    paths = ancestors(parents)
    depths = paths.sum(1)
    if window is not None:
        paths &= depths[:, None] - depths[None, :] < window
    rows = visible[1 : nodes + 1]
    index = np.arange(visible.shape[1])[None, :]
    first = -1 if window is None else (start + depths - window)[:, None]
    before = (index <= start) & (index > first)
    rows[:] = torch.from_numpy(before).to(visible.device)
    rows[:, start + 1 : start + 1 + nodes] = torch.from_numpy(paths).to(visible.device)
