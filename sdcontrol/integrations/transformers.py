"""`model.generate(..., custom_generate=decoder)`: speculation in a loop that you already have.

    decoder = SpeculativeDecoder(model, drafters=["ngram"], policy="goodput")
    out = model.generate(**inputs, max_new_tokens=256, custom_generate=decoder)

Knows what `generate` hands to a custom function, and what it drops; the engine does the rest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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
from transformers.generation.utils import GenerateDecoderOnlyOutput

from sdcontrol.engine.drafters.build import DrafterSpecs
from sdcontrol.engine.generation import strings_of
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.runner import unwrap
from sdcontrol.engine.stats import EngineStats
from sdcontrol.engine.verify import Verifier
from sdcontrol.errors import ConfigError, RequestRefused, UnsupportedGeneration
from sdcontrol.integrations.bound import BoundDecoder
from sdcontrol.integrations.detokenizer import Detokenizer
from sdcontrol.integrations.feed import Consumer, Feed
from sdcontrol.integrations.generate_call import (
    Extras,
    GenerateCall,
    GenerateRow,
    Speculation,
    Streamer,
)
from sdcontrol.integrations.recording import RunTable, check_recording, facts_of_run, recorder_of
from sdcontrol.integrations.settings import (
    PolicyLike,
    arms_of,
    check_policy_drafter,
    engine_config,
    planner_of,
)
from sdcontrol.integrations.streaming import StreamEvent, options_per_prompt, stream_events
from sdcontrol.integrations.warm_start import check_warm_start, keep, warm_start_of

__all__ = ["BoundDecoder", "SpeculativeDecoder", "StreamEvent"]


class SpeculativeDecoder:
    """Speculative decoding around a transformers model, for any batch.

    `drafters` are `"ngram"`, `"sparse_kv:<tokens>"`, a draft model object (the arm `draft_model`),
    `Drafter` objects: one, a list, or a mapping of arm names to those. `policy` is a name, a mapping with
    `kind`, a policy, or any `Planner`. `record` is a new folder for a trace of the run, finished
    by `close`: with `keep_token_ids` it has those of prompts and outputs, with `acceptance_table` what every
    drafter would have had accepted everywhere, for replays of other policies. `close` computes that, which may
    take as long as the run, and every request is kept in memory till then. `warm_start` is a folder in which what a
    run taught is kept for the next one: read here, written by `close`, one file per models, drafters and machine.
    Further keywords are those of `EngineConfig`.

    Raises `UnsupportedModel`, `ConfigError`, `TraceError`.
    """

    def __init__(  # noqa: PLR0913  (what a user may say of a run, each by its name)
        self,
        model: object,
        *,
        drafters: DrafterSpecs = ("ngram",),
        policy: PolicyLike = "goodput",
        verification: str | Verifier = "coupled",
        tokenizer: PreTrainedTokenizerBase | None = None,
        record: Path | str | None = None,
        keep_token_ids: bool = False,
        acceptance_table: bool = False,
        warm_start: Path | str | None = None,
        **settings: object,
    ) -> None:
        config = engine_config(settings)
        check_policy_drafter(policy, arms_of(drafters))
        check_recording(
            record, verification, keep_token_ids=keep_token_ids, acceptance_table=acceptance_table
        )
        self.tokenizer, self.planner = tokenizer, planner_of(policy, config.max_draft_tokens)
        check_warm_start(warm_start, self.planner)
        self._recorder = recorder_of(self.planner, record, keep_token_ids=keep_token_ids)
        try:
            self.engine = Engine(
                model,
                drafters=drafters,
                planner=self._recorder or self.planner,
                verification=verification,
                tokenizer=tokenizer,
                config=config,
            )
        except BaseException:
            if self._recorder is not None:
                self._recorder.discard()
            raise
        self._warm_start = warm_start_of(warm_start, self.planner, self.engine, drafters)
        if self._recorder is not None:
            self._recorder.describe(facts_of_run(self.engine, drafters))
        self._table = RunTable.of(self.engine, drafters, record if acceptance_table else None)
        self._feed = Feed(self.engine, self._warm_start)

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
        stop_strings: str | Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        speculation: Sequence[Speculation] | None = None,
    ) -> "BoundDecoder":
        """This decoder with what `generate` drops on its way here.

        `seeds` and `speculation` (False: opted out; or the drafters allowed) have one entry per row
        of the batch, `num_return_sequences` counted.
        """
        extras = Extras(
            streamer, tokenizer or self.tokenizer, strings_of(stop_strings), seeds, speculation
        )
        return BoundDecoder(self, extras)

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        ids: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        speculation: Sequence[Speculation] | None = None,
        on_refused: Callable[[int, RequestRefused], None] | None = None,
        **options: object,
    ) -> Iterator[StreamEvent]:
        """Decode prompts together, yielding tokens as they come. `options` are `generate`'s.

        `ids`, `seeds` and `speculation` (False: opted out; or the drafters allowed) have one entry
        per prompt.

        A prompt that can never run raises `RequestRefused`, or is told to `on_refused` with its
        place while the others run. Leaving the loop early cancels what has not ended.
        """
        per_prompt = {"request_id": ids, "seed": seeds, "speculation": speculation}
        own = options_per_prompt(prompts, per_prompt, options)
        return self._stream(prompts, own, on_refused)

    def _stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: Sequence[Mapping[str, object]],
        on_refused: Callable[[int, RequestRefused], None] | None,
    ) -> Iterator[StreamEvent]:
        consumer = Consumer(self._feed)
        places: dict[str, tuple[int, Detokenizer]] = {}
        try:
            for index, prompt in enumerate(prompts):
                try:
                    request_id = self._submit(consumer, prompt, options[index])
                except RequestRefused as error:
                    if on_refused is None:
                        raise
                    on_refused(index, error)
                    continue
                places[request_id] = index, Detokenizer(self.tokenizer)
            yield from stream_events(consumer, places)
        finally:
            consumer.close()

    def _submit(
        self, consumer: Consumer, prompt: str | Sequence[int], options: Mapping[str, object]
    ) -> str:
        submit: Callable[..., str] = self.engine.submit
        return self._add(consumer, lambda: submit(prompt, **options))

    def _add(self, consumer: Consumer, submit: Callable[[], str]) -> str:
        """Submit for a consumer; the request is kept where an acceptance table will want it."""
        table = self._table
        return consumer.add(submit if table is None else lambda: table.keep(submit()))

    def report(self) -> EngineStats:
        """What was drafted, accepted and spent so far; later steps do not change it.

        `report().requests[id]` tells what was chosen for a request and why; `lines()` of it says
        so in words.
        """
        return self.engine.stats_so_far()

    def forget(self) -> None:
        """Compute every prompt of later calls anew: weights were written through `tensor.data`.

        Every other change of weights or adapters between calls is seen without it.
        """
        self.engine.forget()

    def close(self) -> None:
        """Free the cache; the model is as it was found. A recording is finished, its acceptance table computed;
        what it taught is kept.

        Raises `TraceError` where these cannot be written; the table also where a request did not come through
        the decoder, but through its engine.
        """
        self.engine.close()
        keep(self._warm_start)
        if self._recorder is not None:
            self._recorder.close()
        table, self._table = self._table, None
        if table is not None:
            table.add()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self, model: PreTrainedModel, call: GenerateCall, extras: Extras
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode one call of `generate` to its end: token ids `[rows, width]`, or `generate`'s own record.

        Raises `ConfigError` for another model than the decoder's, and for one that is in training
        mode, has another dtype than before, or other adapters than its CUDA graphs;
        `UnsupportedGeneration` for what cannot be honoured.
        """
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

    def _decode(self, rows: Sequence[GenerateRow], streamer: Streamer | None) -> list[list[int]]:
        consumer = Consumer(self._feed)
        outputs: dict[str, list[int]] = {}
        content = self.engine.model_content()
        try:
            for row in rows:
                outputs[self._enqueue(consumer, row, content)] = []
            for event in consumer:
                outputs[event.request_id].extend(event.tokens)
                if streamer is not None:
                    for token in event.tokens:
                        streamer.put(torch.tensor([token]))
        finally:
            consumer.close()
        if streamer is not None:
            streamer.end()
        return list(outputs.values())

    def _enqueue(self, consumer: Consumer, row: GenerateRow, content: bytes) -> str:
        enqueue, speculation = self.engine.enqueue, row.speculation
        return self._add(
            consumer,
            lambda: enqueue(row.prompt, row.decoding, speculation=speculation, content=content),
        )
