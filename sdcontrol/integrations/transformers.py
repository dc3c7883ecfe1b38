"""`model.generate(..., custom_generate=decoder)`: speculation in a loop that you already have.

    decoder = SpeculativeDecoder(model, drafters=["ngram"], policy="goodput")
    out = model.generate(**inputs, max_new_tokens=256, custom_generate=decoder)

Knows what `generate` hands to a custom function, and what it drops; the engine does the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from sdcontrol.controller import Controller
from sdcontrol.core import Planner
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpec
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import TokenEvent
from sdcontrol.engine.runner import unwrap
from sdcontrol.engine.stats import EngineStats
from sdcontrol.engine.verify import Verifier
from sdcontrol.errors import ConfigError, UnsupportedGeneration
from sdcontrol.integrations.detokenizer import Detokenizer
from sdcontrol.integrations.generate_call import (
    Extras,
    GenerateCall,
    Speculation,
    Streamer,
)
from sdcontrol.policies import Policy, PolicyConfig

__all__ = ["BoundDecoder", "SpeculativeDecoder", "StreamEvent"]

@dataclass(frozen=True, slots=True)
class StreamEvent:
    """New tokens of one request. `index` is its place among the prompts."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    text: str  # of these tokens; characters cut in two are held back until they are whole
    finish_reason: str | None = None


class SpeculativeDecoder:
    """Speculative decoding around a transformers model, for any batch.

    `drafters` are `"ngram"`, `"sparse_kv:<tokens>"`, a draft model object (the arm `draft_model`),
    `Drafter` objects, or a mapping of arm names to those. `policy` is a name, a mapping with
    `kind`, a policy, or any `Planner`. Further keywords are those of `EngineConfig`.

    Raises `UnsupportedModel`, `ConfigError`.
    """

    def __init__(
        self,
        model: object,
        *,
        drafters: "Sequence[DrafterSpec] | Mapping[str, DrafterSpec]" = ("ngram",),
        policy: "str | Mapping[str, object] | PolicyConfig | Policy | Planner" = "goodput",
        verification: str | Verifier = "coupled",
        tokenizer: PreTrainedTokenizerBase | None = None,
        **settings: object,
    ) -> None:
        self.tokenizer = tokenizer
        self.planner = planner_of(policy)
        self.engine = Engine(
            model,
            drafters=drafters,
            planner=self.planner,
            verification=verification,
            tokenizer=tokenizer,
            config=EngineConfig.model_validate(settings),
        )
        self._pending: dict[str, list[TokenEvent]] = {}

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: object,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` calls; see `bind` for what it cannot pass on."""
        return BoundDecoder(self, Extras())(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            **model_kwargs,
        )

    def bind(
        self,
        *,
        streamer: Streamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stop_strings: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        speculation: Sequence[Speculation] | None = None,
    ) -> "BoundDecoder":
        """This decoder with what `generate` drops on its way here.

        `seeds` and `speculation` (False: opted out; or the drafters allowed) have one entry per row
        of the batch, `num_return_sequences` counted.
        """
        tokenizer = tokenizer or self.tokenizer
        return BoundDecoder(
            self, Extras(streamer, tokenizer, tuple(stop_strings), seeds, speculation)
        )

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        seeds: Sequence[int] | None = None,
        speculation: Sequence[Speculation] | None = None,
        **options: object,
    ) -> Iterator[StreamEvent]:
        """Decode prompts together, yielding tokens as they come. `options` are `generate`'s."""
        ids: list[str] = []
        try:
            for index, prompt in enumerate(prompts):
                ids.append(
                    self.engine.submit(
                        prompt,
                        seed=None if seeds is None else seeds[index],
                        speculation=True if speculation is None else speculation[index],
                        **options,
                    )
                )
            texts = {request_id: Detokenizer(self.tokenizer) for request_id in ids}
            for event in self._events(ids):
                done = event.finish_reason is not None
                text = texts[event.request_id].add(event.tokens, is_last=done)
                index = ids.index(event.request_id)
                yield StreamEvent(event.request_id, index, event.tokens, text, event.finish_reason)
        finally:
            self._abandon(ids)

    def report(self) -> EngineStats:
        """What was drafted, accepted and spent so far."""
        return self.engine.stats

    def close(self) -> None:
        """Free the cache; the model is as it was found."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self, model: PreTrainedModel, call: GenerateCall, extras: Extras
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode one call of `generate` to its end."""
        if unwrap(model) is not self.engine.model:
            raise ConfigError("this decoder wraps another model; make one for this model")
        call.check()
        rows = call.rows(extras)
        if extras.streamer is not None:
            if len(rows) > 1:
                raise UnsupportedGeneration(
                    f"a streamer takes one sequence, the batch has {len(rows)}; use decoder.stream"
                )
            extras.streamer.put(call.input_ids.cpu())
        return call.output(self._decode(rows, extras.streamer))

    def _decode(self, rows: "Sequence[_Row]", streamer: Streamer | None) -> list[list[int]]:
        ids: list[str] = []
        try:
            for row in rows:
                ids.append(
                    self.engine.enqueue(row.prompt, row.decoding, speculation=row.speculation)
                )
            outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
            for event in self._events(ids):
                outputs[event.request_id].extend(event.tokens)
                if streamer is not None:
                    for token in event.tokens:
                        streamer.put(torch.tensor([token]))
            if streamer is not None:
                streamer.end()
        finally:
            self._abandon(ids)
        return [outputs[request_id] for request_id in ids]

    def _events(self, ids: Sequence[str]) -> Iterator[TokenEvent]:
        """Step until these requests are done; events of others wait for whoever asks."""
        open_ids = set(ids)
        for request_id in ids:
            self._pending[request_id] = []
        while open_ids:
            if not any(self._pending[request_id] for request_id in open_ids):
                self.engine.step()
                for event in self.engine.take_events():
                    self._pending.setdefault(event.request_id, []).append(event)
            for request_id in sorted(open_ids, key=ids.index):
                events, self._pending[request_id] = self._pending[request_id], []
                for event in events:
                    if event.finish_reason is not None:
                        open_ids.discard(request_id)
                    yield event

    def _abandon(self, ids: Sequence[str]) -> None:
        """Cancel what is still running when a consumer leaves early."""
        for request_id in ids:
            self.engine.cancel(request_id)
            self._pending.pop(request_id, None)


class BoundDecoder:
    """A decoder with a streamer, stop strings, seeds or opt-outs; made by `bind`."""

    def __init__(self, decoder: SpeculativeDecoder, extras: Extras) -> None:
        self._decoder = decoder
        self._extras = extras

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: object,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` calls."""
        call = GenerateCall(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        return self._decoder.generate(model, call, self._extras)


def planner_of(policy: "str | Mapping[str, object] | PolicyConfig | Policy | Planner") -> Planner:
    """The planner itself, or a controller with this policy."""
    if isinstance(policy, (str, Mapping, PolicyConfig, Policy)):
        return Controller(policy=policy)
    return policy
