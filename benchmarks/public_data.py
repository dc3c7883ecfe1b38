"""Workloads of the public data: recorded arrivals and texts, drawn acceptance where nobody ran.

The n-gram drafter's acceptance is exact: what it would have had accepted in the recorded outputs
under greedy decoding. `draft_model` and `sparse_kv` are simulated by `PROCESSES`. Tokens are those
of the bundled tokenizer. The data stand in the folder that `SDCONTROL_DATA` names, or in
`shared/data` beside the checkout.
"""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from sdcontrol.engine import bundled
from sdcontrol.experiments.sources import ngram_outcomes
from sdcontrol.traces.acceptance_process import AcceptanceProcess, HardStretches
from sdcontrol.traces.importers import read_azure, read_mooncake, read_texts, tokenizer_from
from sdcontrol.traces.workload import Workload
from sdcontrol.traces.workloads import mixture, with_contexts_of, with_drafters

__all__ = ["DATA", "PROCESSES", "WORKLOADS", "workload"]

DATA = Path(os.environ.get("SDCONTROL_DATA", Path(__file__).parents[2] / "shared" / "data"))
_TOKENIZER = Path(bundled.__file__).parent / "tokenizer" / "tokenizer.json"
_TEXTS = {"edit": "edit_eval", "chat": "gsm8k_gpt3_175b", "agent": "swe_agent_turns"}

PROCESSES: Mapping[str, AcceptanceProcess] = {
    "draft_model": AcceptanceProcess(
        rates=(0.7, 0.7, 0.68, 0.66, 0.64),
        concentration=8.0,
        hard=HardStretches(share=0.3, factor=0.6, tokens=15.0),
        tells_confidence=True,
    ),
    "sparse_kv:512": AcceptanceProcess(
        rates=(0.85, 0.84, 0.83, 0.82),
        concentration=15.0,
        hard=HardStretches(share=0.2, factor=0.8, tokens=30.0),
        tells_confidence=True,
    ),
}
"""Rates near published ones: an EAGLE head about 0.7 per token, a self-draft with a KV budget 0.85."""

WORKLOADS: Mapping[str, Mapping[str, float]] = {
    "edit": {"edit": 1.0},
    "chat": {"chat": 1.0},
    "agent": {"agent": 1.0},
    "mixed": {"edit": 1.0, "chat": 1.0, "agent": 0.5, "long": 0.5},
    "mixed-long": {"edit": 1.0, "chat": 1.0, "agent": 1.0, "long": 1.0},
}
"""Shares of the texts; `long` is edits and chats after the prompts of the Mooncake trace."""

_AT_MOONCAKE = frozenset({"agent", "mixed-long"})  # the others come as in the Azure trace


def workload(name: str, num_requests: int) -> Workload:
    """Requests of the recorded texts, at the recorded arrivals."""
    parts = [(_part(kind), share) for kind, share in WORKLOADS[name].items()]
    mixed = mixture(name, parts, num_requests, seed=1)
    read = read_mooncake if name in _AT_MOONCAKE else read_azure
    file = "mooncake_conversation.jsonl" if name in _AT_MOONCAKE else "azure_2023_conv.csv"
    arrivals = read(DATA / "arrivals" / file).workload.first(num_requests)
    timed = mixed.with_arrivals_of(arrivals)
    return Workload.of(name, timed, **timed.origin)


@cache
def _part(kind: str) -> Workload:
    if kind == "long":
        short = mixture("edit or chat", [(_part("edit"), 1.0), (_part("chat"), 1.0)], 256)
        prompts = read_mooncake(DATA / "arrivals" / "mooncake_conversation.jsonl").workload
        return with_contexts_of(short, prompts)
    path = DATA / "text" / f"{_TEXTS[kind]}.jsonl"
    texts = read_texts(path, tokenizer_from(_TOKENIZER), ngram_outcomes).workload
    seed = list(_TEXTS).index(kind)
    drawn = with_drafters(Workload.of(kind, texts), PROCESSES, seed=seed)
    kept = tuple(drawn)
    return Workload(kind, drawn.arms, lambda: kept, drawn.origin)
