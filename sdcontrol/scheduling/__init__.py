"""Which requests run in a step and on which blocks: pure Python, for the engine and for replay."""

from sdcontrol.scheduling.blocks import NULL_BLOCK, BlockPool, BlockTable, block_keys
from sdcontrol.scheduling.scheduler import Row, ScheduledBatch, ScheduledRequest, Scheduler

__all__ = [
    "NULL_BLOCK",
    "BlockPool",
    "BlockTable",
    "Row",
    "ScheduledBatch",
    "ScheduledRequest",
    "Scheduler",
    "block_keys",
]
