"""How large everything is: on a GPU the shapes and cells of an 8B model, elsewhere tiny ones.

Knows shapes and numbers; nothing of torch. Contexts are multiples of the block size. Loads are in
the order of measuring: time may run out.
"""

from dataclasses import dataclass

from sdcontrol.estimators.shapes import ModelShape, by_name

__all__ = ["FULL", "SMALL", "Grid", "Scale"]

Grid = tuple[tuple[int, int], ...]
"""Pairs of batch size and context tokens."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of every part. Repetitions are per cell."""

    name: str
    is_small: bool  # no figure means anything
    target: ModelShape
    draft: ModelShape
    dtype: str
    plain: Grid
    uncompiled: Grid  # of plain ones, once more without layers compiled
    verification: Grid
    tokens_per_request: tuple[int, ...]  # mean, of verification
    attention: Grid
    transformers: Grid
    magicdec: Grid
    promise: Grid
    mixes: tuple[str, ...]  # of acceptance, in the order of measuring
    host: Grid
    sparse_budgets: tuple[int, int]  # of recent pages, and of scored pages
    steps: int  # timed in a turn of an arm
    blocks: int  # turns of every arm that count
    text_tokens: int  # new tokens of texts that are compared
    reserve_bytes: float  # activations, logits, workspaces, graphs

    @property
    def sparse_arm(self) -> str:
        """Sinks and recent pages."""
        return f"sparse_kv:{self.sparse_budgets[0]}"

    @property
    def scored_arm(self) -> str:
        """Scored pages."""
        return f"sparse_kv:{self.sparse_budgets[1]}:scored"


def _product(batches: tuple[int, ...], contexts: tuple[int, ...], most_tokens: int) -> Grid:
    return tuple((b, c) for b in batches for c in contexts if b * c <= most_tokens)


_PROMISE_FIRST = ((16, 4096), (64, 512), (4, 4096), (256, 512), (64, 4096))  # many, so mixed within

FULL = Scale(
    name="full",
    is_small=False,
    target=by_name("llama-3.1-8b"),
    draft=by_name("llama-3.2-1b"),
    dtype="bfloat16",
    plain=(*_product((1, 8, 32, 64, 128), (1024, 8192), 1 << 21), (16, 32768)),
    uncompiled=((1, 1024), (32, 1024)),
    verification=_product((8, 32, 64), (1024, 8192), 1 << 19),
    tokens_per_request=(1, 2, 4, 8, 16),
    attention=((1, 32768), (8, 8192), (16, 32768), (32, 16384), (64, 8192), (128, 4096)),
    transformers=((32, 1024), (1, 1024)),
    magicdec=((16, 32768), (32, 16384), (64, 8192), (64, 4096), (128, 4096)),
    promise=tuple(
        dict.fromkeys(
            (*_PROMISE_FIRST, *_product((1, 4, 16, 64, 256), (512, 4096, 32768), 1 << 19))
        )
    ),
    mixes=("mixed", "0.7", "0.5", "0.9"),
    host=((16, 4096), (1, 1024), (32, 1024), (128, 1024)),
    sparse_budgets=(512, 2048),
    steps=24,
    blocks=6,
    text_tokens=64,
    reserve_bytes=10e9,
)


def _tiny(name: str, layers: int) -> ModelShape:
    return ModelShape(
        name, layers, 64, 4, 2, 16, 128, 3200, weight_bytes=4.0, head_bytes=4.0, kv_bytes=4.0
    )


SMALL = Scale(
    name="cpu, small scale",
    is_small=True,
    target=_tiny("tiny-target", 2),
    draft=_tiny("tiny-draft", 1),
    dtype="float32",
    plain=((1, 64), (4, 128)),
    uncompiled=((1, 64),),
    verification=((4, 64),),
    tokens_per_request=(1, 4),
    attention=((2, 128),),
    transformers=((2, 64), (1, 64)),
    magicdec=((2, 256),),
    promise=((2, 128),),
    mixes=("mixed",),
    host=((2, 64),),
    sparse_budgets=(64, 128),
    steps=4,
    blocks=2,
    text_tokens=12,
    reserve_bytes=1e8,
)
