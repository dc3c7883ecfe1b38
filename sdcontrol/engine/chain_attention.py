"""Triton's bucket attention whose requests can be moved on between replays of its graph.

Knows tables; nothing of models, graphs or drafts.
"""

from collections.abc import Sequence

from torch import Tensor

from sdcontrol.engine.kernels.bucket_attention import TritonBucketAttention

__all__ = ["ChainBucketAttention"]


class ChainBucketAttention(TritonBucketAttention):
    """See `static_inputs.BucketAttention`."""

    @property
    def first_keys(self) -> Sequence[Tensor]:
        """See `static_inputs.BucketAttention`."""
        return [tables.requests[:, 2] for tables in self._tables.values()]
