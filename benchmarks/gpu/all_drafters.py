"""Engines of one load with every drafter, accepted at the rates of the requests' kinds, one more of which waits.

Of a size of their own each: of one engine for all loads, graphs would have too many shapes.
"""

from benchmarks.gpu.acceptance import kind_rates
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoder import Decoder, DecoderSpec, kv_tokens_for
from sdcontrol.outcomes import DEPTH

__all__ = ["kv_tokens_of", "open_decoder"]

_VERIFIER = kind_rates()


def kv_tokens_of(bench: Bench, batch: int, context: int) -> int:
    """KV tokens of `batch` contexts, with room for a turn in which all drafts are accepted."""
    return kv_tokens_for(batch, context, _room(bench))


def open_decoder(bench: Bench, batch: int, context: int) -> Decoder:
    """With the load's contexts in place."""
    drafters = ("draft_model", bench.scale.sparse_arm, "ngram")
    kv_tokens = kv_tokens_of(bench, batch, context)
    spec = DecoderSpec(drafters, _VERIFIER, kv_tokens, batch, _room(bench), has_queue=True)
    decoder = bench.decoder(spec)
    decoder.prepare(batch, context)
    return decoder


def _room(bench: Bench) -> int:
    return (bench.scale.steps + 8) * (DEPTH + 1)
