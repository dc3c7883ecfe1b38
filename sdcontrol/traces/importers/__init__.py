"""Public and foreign recordings as workloads: arrivals, texts, acceptance.

    azure      CSV of arrivals and lengths              texts      prompts and outputs
    mooncake   JSON lines, with shared prompt blocks    vllm       per-request speculation metrics

Each `read_*(path)` gives an `Imported`: a workload that reads the file anew whenever it is iterated,
and a report of what was malformed. Nothing malformed is repaired or guessed.
"""

from sdcontrol.traces.importers.azure import read_azure
from sdcontrol.traces.importers.mooncake import read_mooncake
from sdcontrol.traces.importers.rows import Imported, ImportReport, MalformedRow
from sdcontrol.traces.importers.texts import NgramMatcher, Tokenize, read_texts, tokenizer_from
from sdcontrol.traces.importers.vllm import read_vllm

__all__ = [
    "ImportReport",
    "Imported",
    "MalformedRow",
    "NgramMatcher",
    "Tokenize",
    "read_azure",
    "read_mooncake",
    "read_texts",
    "read_vllm",
    "tokenizer_from",
]
