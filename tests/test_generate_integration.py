"""`generate(custom_generate=decoder)` and `stream`: what is asked is honoured or refused by name."""

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from structlog.testing import capture_logs
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    TextStreamer,
)

from sdcontrol import SpeculativeDecoder
from sdcontrol.engine.renamed import CACHE
from sdcontrol.errors import (
    ConfigError,
    EngineClosed,
    RequestRefused,
    SdcontrolError,
    UnknownName,
    UnsupportedGeneration,
)
from sdcontrol.integrations.transformers import StreamEvent
from sdcontrol.policies.goodput import Goodput
from tests.engine_support import noised, random_prompt, text_tokenizer, tiny_model
from tests.tokenizer_support import byte_tokenizer

NEW = 16
LENGTHS = (24, 5, 37, 11)


@cache
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def decoder() -> Iterator[SpeculativeDecoder]:
    """Drafts with a model that is often right, and sometimes wrong."""
    drafters = ["ngram", noised(model())]
    with SpeculativeDecoder(
        model(), drafters=drafters, policy="static:draft_model:3", kv_tokens=4096
    ) as made:
        yield made
        used = made.report().drafters["draft_model"]
        assert 0 < used.accepted < used.proposed


def padded(lengths: Sequence[int] = LENGTHS) -> dict[str, Tensor]:
    """Prompts padded on the left to the longest."""
    width = max(lengths)
    prompts = [random_prompt(length, seed) for seed, length in enumerate(lengths)]
    return {
        "input_ids": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - n) + [1] * n for n in lengths]),
    }


def both(
    decoder: SpeculativeDecoder, inputs: Mapping[str, Tensor], **options: object
) -> tuple[Tensor, Tensor]:
    """What plain `generate` gives, and what the decoder gives in its place."""
    settings = {"max_new_tokens": NEW, "do_sample": False, **options}
    plain = model().generate(**inputs, **settings)
    return plain, model().generate(**inputs, **settings, custom_generate=decoder)


def frequent_tokens(count: int) -> list[int]:
    """Tokens that some of the rows would write, but not at once."""
    plain = model().generate(**padded(), max_new_tokens=NEW, do_sample=False)
    written = plain[:, -NEW + 3 :].flatten().tolist()
    return sorted(set(written), key=written.index)[:count]


# ---- equal to plain generate


@pytest.mark.parametrize("lengths", [LENGTHS, (19, 19, 19), (9,)], ids=["ragged", "even", "one"])
def test_greedy_batches_are_those_of_generate(
    decoder: SpeculativeDecoder, lengths: Sequence[int]
) -> None:
    plain, ours = both(decoder, padded(lengths))
    assert ours.dtype == plain.dtype
    assert torch.equal(ours, plain)


def test_a_batch_without_a_mask_is_padded_by_its_padding_token(decoder: SpeculativeDecoder) -> None:
    plain, ours = both(decoder, {"input_ids": padded()["input_ids"]})
    assert torch.equal(ours, plain)
    assert torch.equal(ours, both(decoder, padded())[1])


def test_rows_that_end_at_one_of_several_eos_tokens_are_filled_with_the_padding_token(
    decoder: SpeculativeDecoder,
) -> None:
    ends = frequent_tokens(2)
    plain, ours = both(decoder, padded(), eos_token_id=ends, pad_token_id=3)
    assert torch.equal(ours, plain)
    lengths = {(row[-NEW:] == 3).sum().item() for row in ours}
    assert len(lengths) > 1


def test_without_a_padding_token_the_first_eos_token_fills(decoder: SpeculativeDecoder) -> None:
    ends = frequent_tokens(2)
    config = GenerationConfig(eos_token_id=ends, max_new_tokens=NEW, do_sample=False)
    inputs = padded()
    plain = model().generate(**inputs, generation_config=config)
    ours = model().generate(**inputs, generation_config=config, custom_generate=decoder)
    assert torch.equal(ours, plain)


def test_the_result_is_a_dictionary_where_one_is_asked_for(decoder: SpeculativeDecoder) -> None:
    plain, ours = both(decoder, padded(), return_dict_in_generate=True)
    assert type(ours) is type(plain)
    assert torch.equal(ours.sequences, plain.sequences)


def test_processors_of_the_settings_and_of_the_caller_are_applied(
    decoder: SpeculativeDecoder,
) -> None:
    class Ban:
        """Bans what stood two places before, padding included."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.scatter(1, input_ids[:, -2:-1], -torch.inf)

    without, _ = both(decoder, padded())
    plain, ours = both(
        decoder,
        padded(),
        logits_processor=LogitsProcessorList([Ban()]),
        repetition_penalty=1.3,
        no_repeat_ngram_size=3,
        min_new_tokens=6,
        eos_token_id=frequent_tokens(3),
    )
    assert torch.equal(ours, plain)
    assert not torch.equal(plain[:, : without.shape[1]], without[:, : plain.shape[1]])


def test_stopping_criteria_of_the_caller_end_rows(decoder: SpeculativeDecoder) -> None:
    def wrote_a_small_token(input_ids: Tensor, scores: object, **_: object) -> Tensor:
        return input_ids[:, -1] < 4

    def stop() -> StoppingCriteriaList:
        return StoppingCriteriaList([wrote_a_small_token])

    ends = {"eos_token_id": frequent_tokens(1), "stopping_criteria": stop()}
    plain, ours = both(decoder, padded(), **ends)
    assert torch.equal(ours, plain)
    assert not torch.equal(ours, both(decoder, padded(), eos_token_id=frequent_tokens(1))[1])


@pytest.mark.parametrize("extra", [3, 25], ids=["shorter", "longer"])
def test_a_length_criterion_stands_in_place_of_max_new_tokens(
    decoder: SpeculativeDecoder, extra: int
) -> None:
    limit = MaxLengthCriteria(max_length=max(LENGTHS) + extra)
    plain, ours = both(decoder, padded(), stopping_criteria=StoppingCriteriaList([limit]))
    assert plain.shape[1] == max(LENGTHS) + extra
    assert torch.equal(ours, plain)


def test_an_eos_criterion_stands_in_place_of_the_settings(decoder: SpeculativeDecoder) -> None:
    first, second = frequent_tokens(2)
    criteria = StoppingCriteriaList([EosTokenCriteria(second)])
    plain, ours = both(decoder, padded(), eos_token_id=first, stopping_criteria=criteria)
    assert torch.equal(ours, plain)


def test_the_models_own_generation_config_counts() -> None:
    own = tiny_model()
    own.generation_config.max_new_tokens = 7
    own.generation_config.repetition_penalty = 1.5
    plain = own.generate(**padded())
    with SpeculativeDecoder(own, policy="static:ngram:3", kv_tokens=2048) as decoder:
        ours = own.generate(**padded(), custom_generate=decoder)
    assert plain.shape[1] == max(LENGTHS) + 7
    assert torch.equal(ours, plain)


def test_position_ids_that_say_nothing_new_are_fine(decoder: SpeculativeDecoder) -> None:
    inputs = padded()
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    plain, ours = both(decoder, inputs, position_ids=positions)
    assert torch.equal(ours, plain)


def test_a_model_that_peft_wraps_writes_what_it_would() -> None:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers the old way
        adapted = get_peft_model(tiny_model(), config).eval()
    inputs = padded((12, 5))
    plain = adapted.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    with SpeculativeDecoder(adapted, policy="static:ngram:3", kv_tokens=2048) as decoder:
        options = {"max_new_tokens": NEW, "do_sample": False, "custom_generate": decoder}
        assert torch.equal(adapted.generate(**inputs, **options), plain)
        with pytest.raises(UnsupportedGeneration, match="assistant_model"):
            adapted.generate(**inputs, **options, assistant_model=model())


def llava() -> PreTrainedModel:
    text = {**tiny_model().config.to_dict(), "max_position_embeddings": 512}
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    config = LlavaConfig(text_config=text, vision_config=vision.to_dict(), image_token_id=60)
    torch.manual_seed(0)
    made = LlavaForConditionalGeneration(config).eval()
    made.generation_config.pad_token_id = 0
    return made


def test_text_of_a_model_that_may_see_images_is_decoded() -> None:
    seeing = llava()
    options = {"max_new_tokens": NEW, "do_sample": False}
    plain = seeing.generate(**padded(), **options)
    with SpeculativeDecoder(seeing, policy="static:ngram:3", kv_tokens=2048) as decoder:
        assert torch.equal(seeing.generate(**padded(), **options, custom_generate=decoder), plain)
        image = torch.zeros(1, 3, 16, 16)
        with pytest.raises(UnsupportedGeneration, match=r"pixel_values|mm_encoder_outputs"):
            seeing.generate(**padded(), **options, pixel_values=image, custom_generate=decoder)


# ---- sampling


def sample(decoder: object, **options: object) -> Tensor:
    settings = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.2, **options}
    return model().generate(**padded(), **settings, custom_generate=decoder)


def test_sampling_is_governed_by_torchs_seed(decoder: SpeculativeDecoder) -> None:
    torch.manual_seed(5)
    first, second = sample(decoder), sample(decoder)
    torch.manual_seed(5)
    assert torch.equal(sample(decoder), first)
    assert not torch.equal(first, second)


def test_greedy_calls_leave_torchs_generator_alone(decoder: SpeculativeDecoder) -> None:
    before = torch.get_rng_state()
    both(decoder, padded())
    decoder.engine.cancel(decoder.engine.submit([1, 2, 3], do_sample=False, max_new_tokens=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_given_seeds_say_it_all_whatever_is_drafted(decoder: SpeculativeDecoder) -> None:
    seeds = [1, 2, 3, 2]
    first = sample(decoder.bind(seeds=seeds))
    with SpeculativeDecoder(model(), policy="off", kv_tokens=2048) as plain:
        assert torch.equal(sample(plain.bind(seeds=seeds)), first)
    for same in (np.array(seeds, np.uint64), torch.tensor(seeds), list(np.array(seeds))):
        assert torch.equal(sample(decoder.bind(seeds=same)), first)
    other = sample(decoder.bind(seeds=[1, 9, 3, 2]))
    assert [torch.equal(a, b) for a, b in zip(first, other, strict=True)] == [
        True,
        False,
        True,
        True,
    ]


def test_num_return_sequences_gives_different_texts_of_each_prompt(
    decoder: SpeculativeDecoder,
) -> None:
    texts = sample(decoder, num_return_sequences=3)
    assert texts.shape[0] == 3 * len(LENGTHS)
    width = max(LENGTHS)
    prompts = padded()["input_ids"].repeat_interleave(3, dim=0)
    assert torch.equal(texts[:, :width], prompts)
    assert len({tuple(row) for row in texts[:, width:].tolist()}) == len(texts)


# ---- bind


class Recorder:
    """A streamer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        assert not self.has_ended
        self.told.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


def test_a_bound_streamer_is_told_what_generate_tells_it(decoder: SpeculativeDecoder) -> None:
    plain, ours = Recorder(), Recorder()
    inputs, options = padded((9,)), {"max_new_tokens": NEW, "do_sample": False}
    model().generate(**inputs, **options, streamer=plain)
    model().generate(**inputs, **options, custom_generate=decoder.bind(streamer=ours))
    assert ours.told == plain.told
    assert ours.has_ended


def test_a_text_streamer_prints_the_text(
    decoder: SpeculativeDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = decoder.bind(streamer=TextStreamer(text_tokenizer(), skip_prompt=True))
    options = {"max_new_tokens": NEW, "do_sample": False, "custom_generate": bound}
    with capture_logs():
        out = model().generate(**padded((9,)), **options)
    assert capsys.readouterr().out.strip() == text_tokenizer().decode(out[0, 9:])


def test_a_streamer_takes_one_sequence(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(UnsupportedGeneration, match="batch has 4"):
        both(decoder.bind(streamer=Recorder()), padded())


@pytest.mark.parametrize("is_alone", [False, True], ids=["in a list", "alone"])
def test_bound_stop_strings_end_rows_where_generate_ends_them(
    decoder: SpeculativeDecoder, *, is_alone: bool
) -> None:
    tokenizer = text_tokenizer()
    inputs = padded((30,))
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    text = tokenizer.decode(model().generate(**inputs, **options)[0, 30:])
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    asked = stop if is_alone else [stop]
    plain = model().generate(**inputs, **options, stop_strings=asked, tokenizer=tokenizer)
    bound = decoder.bind(tokenizer=tokenizer, stop_strings=asked)
    ours = model().generate(**inputs, **options, custom_generate=bound)
    assert torch.equal(ours, plain)
    assert ours.shape[1] < 70


def test_a_stream_ends_at_a_stop_string_that_is_given_alone_and_not_at_its_letters() -> None:
    tokenizer, options = text_tokenizer(), {"max_new_tokens": 40, "do_sample": False}
    with SpeculativeDecoder(model(), kv_tokens=2048, tokenizer=tokenizer) as decoder:
        (events,) = collect(decoder.stream(["abcab"], **options)).values()
        text = "".join(event.text for event in events)
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        assert min(map(text.index, stop)) < text.index(stop)
        (events,) = collect(decoder.stream(["abcab"], **options, stop_strings=stop)).values()
    assert "".join(event.text for event in events).endswith(stop)
    assert events[-1].finish_reason == "stop"


def test_stop_strings_need_a_tokenizer(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        both(decoder.bind(stop_strings=["x"]), padded())


def test_rows_that_opted_out_are_never_drafted_for() -> None:
    with SpeculativeDecoder(model(), policy="static:ngram:3", kv_tokens=2048) as decoder:
        plain, ours = both(decoder.bind(speculation=[False] * 4), padded())
        assert torch.equal(ours, plain)
        assert decoder.report().drafters == {}
        both(decoder.bind(speculation=np.array([False] * 4)), padded())
        assert decoder.report().drafters == {}
        both(decoder.bind(speculation=[False, True, ["ngram"], False]), padded())
        assert decoder.report().drafters["ngram"].steps > 0


@pytest.mark.parametrize("name", ["seeds", "speculation"])
def test_what_is_bound_per_row_has_as_many_entries(decoder: SpeculativeDecoder, name: str) -> None:
    with pytest.raises(ConfigError, match=f"3 {name} for 4 rows"):
        both(decoder.bind(**{name: [True] * 3}), padded())


@pytest.mark.parametrize("name", ["seeds", "speculation"])
@pytest.mark.parametrize("given", [False, 7, "ngram"])
def test_what_is_bound_per_row_is_a_list(
    decoder: SpeculativeDecoder, name: str, given: object
) -> None:
    with pytest.raises(ConfigError, match=f"{name}={given!r}; give a list"):
        both(decoder.bind(**{name: given}), padded())
    with pytest.raises(ConfigError, match=f"{name}={given!r}; give a list"):
        list(decoder.stream([[1, 2]], **{name: given}))


def test_a_row_may_allow_only_drafters_that_exist(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(ConfigError, match="sparse_kv"):
        both(decoder.bind(speculation=[["sparse_kv"]] * 4), padded())
    assert not decoder.engine.step().view.requests


# ---- refused by name


REFUSED: Mapping[str, Mapping[str, object]] = {
    "num_beams": {"num_beams": 2},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "guidance_scale": {"guidance_scale": 1.5},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "dola_layers": {"dola_layers": "low"},
    "cache_implementation": {"cache_implementation": "static"},
    "streamer": {"streamer": Recorder()},
    "negative_prompt_ids": {"negative_prompt_ids": torch.ones(4, 3, dtype=torch.int64)},
    CACHE: {CACHE: DynamicCache()},
    "synced_gpus": {"synced_gpus": True},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [1, 2]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(decoder: SpeculativeDecoder, name: str) -> None:
    options = {"max_new_tokens": 4, "custom_generate": decoder, **REFUSED[name]}
    with pytest.raises(UnsupportedGeneration, match=name):
        model().generate(**padded(), **options)


def test_an_assistant_beside_the_decoder_is_refused(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(UnsupportedGeneration, match=r"assistant_model.*drafters=\[assistant"):
        both(decoder, padded((5,)), assistant_model=noised(model()))


def test_a_filled_cache_is_refused_however_it_comes(decoder: SpeculativeDecoder) -> None:
    inputs = padded((6,))
    given = {CACHE: model()(**inputs, use_cache=True)[CACHE]}
    with pytest.raises(UnsupportedGeneration, match=f"^{CACHE} would"):
        model().generate(**inputs, max_new_tokens=4, **given, custom_generate=decoder)
    with pytest.raises(UnsupportedGeneration, match=f"filled {CACHE} "):
        decoder(
            model(),
            inputs["input_ids"],
            LogitsProcessorList(),
            StoppingCriteriaList(),
            GenerationConfig(max_length=20),
            **given,
        )


def test_input_embeddings_are_refused(decoder: SpeculativeDecoder) -> None:
    embeddings = model().get_input_embeddings()(padded()["input_ids"])
    with pytest.raises(UnsupportedGeneration, match="inputs_embeds"):
        model().generate(inputs_embeds=embeddings, max_new_tokens=4, custom_generate=decoder)


def test_padding_on_the_right_is_refused(decoder: SpeculativeDecoder) -> None:
    flipped = {name: values.flip(1) for name, values in padded().items()}
    with pytest.raises(UnsupportedGeneration, match="pad on the left"):
        model().generate(**flipped, max_new_tokens=4, custom_generate=decoder)


def test_a_mask_of_another_shape_than_the_prompts_is_refused(decoder: SpeculativeDecoder) -> None:
    ids = padded()["input_ids"]
    ones = torch.ones(len(LENGTHS), max(LENGTHS) + 3, dtype=torch.int64)
    with_padding = ones.clone()
    with_padding[1, :9] = 0
    for wide in (ones, with_padding):
        with pytest.raises(
            UnsupportedGeneration, match=r"\[4, 40\].*\[4, 37\]; give an attention_mask"
        ):
            model().generate(ids, attention_mask=wide, max_new_tokens=4, custom_generate=decoder)


def test_positions_of_the_callers_own_are_refused(decoder: SpeculativeDecoder) -> None:
    inputs = padded()
    shifted = inputs["attention_mask"].cumsum(1)
    with pytest.raises(UnsupportedGeneration, match="position_ids"):
        model().generate(**inputs, position_ids=shifted, max_new_tokens=4, custom_generate=decoder)


def test_rows_of_different_lengths_need_a_padding_token(decoder: SpeculativeDecoder) -> None:
    def ends(input_ids: Tensor, scores: object, **_: object) -> Tensor:
        return input_ids[:, -1] < 9

    bare = tiny_model(pad_token_id=None)
    criteria = StoppingCriteriaList([ends])
    with SpeculativeDecoder(bare, kv_tokens=2048) as decoder:
        options = {"max_new_tokens": 4, "do_sample": False, "custom_generate": decoder}
        with pytest.raises(UnsupportedGeneration, match="pad_token_id"):
            bare.generate(**padded(), **options, stopping_criteria=criteria)
        assert bare.generate(**padded(), **options).shape == (4, max(LENGTHS) + 4)


def test_another_model_than_the_decoders_is_refused(decoder: SpeculativeDecoder) -> None:
    other = tiny_model(seed=1)
    with pytest.raises(ConfigError, match="wraps another model"):
        other.generate(**padded(), max_new_tokens=4, custom_generate=decoder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 4}, "did you mean 'max_batch_size'"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"drafters": ["ngrams"]}, "ngrams"),
        ({"drafters": ["ngram"], "policy": "static:draft_model:3"}, "did you mean 'ngram'"),
        ({"policy": "goodpt"}, "did you mean 'goodput'"),
        ({"verification": "couple"}, "coupled"),
    ],
)
def test_settings_that_do_not_exist_are_named(settings: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder(model(), **settings)


def test_one_drafter_needs_no_list() -> None:
    with SpeculativeDecoder(model(), drafters="ngram", policy="static:ngram:3") as decoder:
        both(decoder, padded())
        assert decoder.report().drafters["ngram"].steps > 0
    drafter = noised(model())
    with SpeculativeDecoder(model(), drafters=drafter, policy="static:draft_model:3") as decoder:
        both(decoder, padded())
        assert decoder.report().drafters["draft_model"].steps > 0
    for wrong in (None, 3):
        with pytest.raises(ConfigError, match=f"drafters={wrong} are no drafters; give a list"):
            SpeculativeDecoder(model(), drafters=wrong)


@pytest.mark.parametrize("given", [None, 3, Goodput], ids=repr)
def test_what_is_no_policy_is_refused(given: Any) -> None:
    """Else nobody would ever draft, and nobody would be told."""
    with pytest.raises(ConfigError, match="is no policy; give a name"):
        SpeculativeDecoder(model(), policy=given)


def test_an_unknown_drafter_is_an_unknown_name() -> None:
    with pytest.raises(UnknownName):
        SpeculativeDecoder(model(), drafters=["medusa"])


def test_nothing_runs_on_after_a_refusal(decoder: SpeculativeDecoder) -> None:
    """One row too long for the cache: the rows before it are cancelled."""
    with pytest.raises(RequestRefused, match="KV cache holds"):
        model().generate(**padded(), max_new_tokens=4070, custom_generate=decoder)
    decoder.engine.step()
    assert not decoder.engine.has_work


# ---- stream


PROMPTS = ["say it once more, say it once", "naïve 😀", "x"]


@cache
def writer() -> PreTrainedModel:
    """A model that writes bytes, also wrong ones."""
    return tiny_model(vocab_size=len(byte_tokenizer()))


@pytest.fixture(scope="module")
def streaming() -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder(
        writer(), tokenizer=byte_tokenizer(), policy="static:ngram:4", kv_tokens=4096
    ) as made:
        yield made


def collect(events: Iterator[StreamEvent]) -> dict[int, list[StreamEvent]]:
    by_prompt: dict[int, list[StreamEvent]] = {}
    for event in events:
        by_prompt.setdefault(event.index, []).append(event)
    return by_prompt


def test_a_stream_adds_up_to_what_generate_writes(streaming: SpeculativeDecoder) -> None:
    tokenizer = byte_tokenizer()
    by_prompt = collect(streaming.stream(PROMPTS, max_new_tokens=24, do_sample=False))
    assert sorted(by_prompt) == [0, 1, 2]
    for index, events in by_prompt.items():
        prompt = tokenizer(PROMPTS[index], return_tensors="pt")
        plain = writer().generate(**prompt, max_new_tokens=24, do_sample=False)
        new = plain[0, prompt["input_ids"].shape[1] :].tolist()
        assert [token for event in events for token in event.tokens] == new
        text = "".join(event.text for event in events)
        assert text == tokenizer.decode(new, skip_special_tokens=True)


def test_a_stream_says_last_how_a_request_ended(streaming: SpeculativeDecoder) -> None:
    for events in collect(streaming.stream(PROMPTS, max_new_tokens=24, do_sample=False)).values():
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == "length"
        assert len({event.request_id for event in events}) == 1
        assert all(event.drafters == {} for event in events[:-1])


def test_the_last_events_have_the_drafts_of_each_request() -> None:
    with SpeculativeDecoder(writer(), tokenizer=byte_tokenizer(), policy="static:ngram:4") as own:
        by_prompt = collect(own.stream(PROMPTS, max_new_tokens=24, do_sample=False))
        total = own.report().drafters["ngram"]
    each = [events[-1].drafters.get("ngram") for events in by_prompt.values()]
    assert sum(stats.proposed for stats in each if stats) == total.proposed > 0
    assert sum(stats.accepted for stats in each if stats) == total.accepted


def test_tokens_come_while_others_are_still_decoded(streaming: SpeculativeDecoder) -> None:
    order = [event.index for event in streaming.stream(PROMPTS, max_new_tokens=24, do_sample=False)]
    assert sorted(order) != order


def test_leaving_a_stream_cancels_what_runs(streaming: SpeculativeDecoder) -> None:
    stream = streaming.stream(PROMPTS, max_new_tokens=400, do_sample=False)
    next(stream)
    assert streaming.engine.has_work
    stream.close()
    streaming.engine.step()
    assert not streaming.engine.has_work
    streaming.engine.scheduler.check_integrity()


def test_a_cancelled_request_says_so_and_the_others_go_on(streaming: SpeculativeDecoder) -> None:
    stream = streaming.stream(PROMPTS, max_new_tokens=24, do_sample=False)
    first = next(stream)
    streaming.engine.cancel(first.request_id)
    reasons = {index: events[-1].finish_reason for index, events in collect(stream).items()}
    assert reasons.pop(first.index) == "cancelled"
    assert set(reasons.values()) == {"length"}


def test_a_refused_prompt_is_told_and_the_others_run(streaming: SpeculativeDecoder) -> None:
    refused: list[int] = []
    prompts = ["a", "", "b", "too long " * 600]
    told = collect(
        streaming.stream(
            prompts,
            on_refused=lambda index, error: refused.append(index),
            max_new_tokens=3,
            do_sample=False,
        )
    )
    assert (sorted(told), refused) == ([0, 2], [1, 3])
    with pytest.raises(RequestRefused, match="empty"):
        list(streaming.stream(prompts, max_new_tokens=3))


def test_streamed_seeds_are_those_of_the_prompts(streaming: SpeculativeDecoder) -> None:
    def texts(seeds: list[int]) -> list[str]:
        options = {"max_new_tokens": 12, "do_sample": True}
        by_prompt = collect(streaming.stream(["x"] * 3, seeds=seeds, **options))
        return ["".join(event.text for event in by_prompt[index]) for index in range(3)]

    first = texts([1, 2, 1])
    assert first[0] == first[2] != first[1]
    assert texts([2, 1, 1]) == [first[1], first[0], first[0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [1]}, "1 seeds for 3"),
        ({"seed": 1}, "give a list"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"num_beams": 2}, "num_beams"),
        ({"max_tokens": 2}, "max_tokens"),
    ],
)
def test_options_that_a_stream_cannot_honour_are_named(
    streaming: SpeculativeDecoder, options: Mapping[str, object], message: str
) -> None:
    with pytest.raises(SdcontrolError, match=message):
        list(streaming.stream(PROMPTS, **options))


def test_requests_may_be_named(streaming: SpeculativeDecoder) -> None:
    names = ["first", "second", "third"]
    by_prompt = collect(streaming.stream(PROMPTS, ids=names, max_new_tokens=3, do_sample=False))
    assert {index: events[0].request_id for index, events in by_prompt.items()} == dict(
        enumerate(names)
    )
    with pytest.raises(RequestRefused, match="'first' is taken"):
        list(streaming.stream(PROMPTS[:2], ids=["first", "first"], max_new_tokens=3))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 40},
        {"generation_config": GenerationConfig(do_sample=False)},
        {"generation_config": GenerationConfig(max_length=45)},
    ],
    ids=["default", "asked", "settings", "settings asked"],
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_a_stream_ends_where_generate_does_without_a_number_of_tokens(
    decoder: SpeculativeDecoder, options: Mapping[str, object]
) -> None:
    """20 new tokens, however long the prompt is, unless there is a length for both together."""
    prompt = random_prompt(30, seed=1)
    plain = model().generate(torch.tensor([prompt]), **options)
    told = [token for event in decoder.stream([prompt], **options) for token in event.tokens]
    assert told == plain[0, len(prompt) :].tolist()


def test_one_string_is_no_list_of_prompts(streaming: SpeculativeDecoder) -> None:
    with pytest.raises(ConfigError, match="give a list"):
        streaming.stream("x")


def test_without_a_tokenizer_tokens_stream_and_text_is_empty(decoder: SpeculativeDecoder) -> None:
    events = list(decoder.stream([[1, 2, 3]], max_new_tokens=5, do_sample=False))
    assert sum(len(event.tokens) for event in events) == 5
    assert {event.text for event in events} == {""}
    with pytest.raises(ConfigError, match="tokenizer"):
        list(decoder.stream(["text"], max_new_tokens=5))


def test_two_threads_share_a_decoder(streaming: SpeculativeDecoder) -> None:
    """Each gets all of its own events, and no other's."""
    alone = collect(streaming.stream(PROMPTS, max_new_tokens=24, do_sample=False))
    found: dict[int, dict[int, list[StreamEvent]]] = {}

    def run(turn: int) -> None:
        found[turn] = collect(streaming.stream(PROMPTS, max_new_tokens=24, do_sample=False))

    threads = [threading.Thread(target=run, args=(turn,)) for turn in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # however long it takes: pytest ends a test that hangs
    for by_prompt in found.values():
        for index, events in alone.items():
            tokens = [token for event in events for token in event.tokens]
            assert [token for event in by_prompt[index] for token in event.tokens] == tokens
    assert len(found) == 2


def test_a_stream_that_lost_its_events_says_so(streaming: SpeculativeDecoder) -> None:
    stream = streaming.stream(["x"], max_new_tokens=8, do_sample=False)
    next(stream)
    streaming.engine.run()
    streaming.engine.take_events()
    with pytest.raises(SdcontrolError, match="ended without their events"):
        list(stream)


# ---- several decoders, reports, the end


def test_two_decoders_on_one_model_do_not_meet() -> None:
    inputs, options = padded(), {"max_new_tokens": NEW, "do_sample": False}
    plain = model().generate(**inputs, **options)
    with (
        SpeculativeDecoder(model(), policy="static:ngram:3", kv_tokens=2048) as one,
        SpeculativeDecoder(
            model(), drafters=[noised(model())], policy="static:draft_model:2"
        ) as two,
    ):
        streams = one.stream([[1, 2, 3]], **options), two.stream([[1, 2, 3]], **options)
        texts: list[list[int]] = [[], []]
        for pair in zip(*streams, strict=False):
            for text, event in zip(texts, pair, strict=True):
                text.extend(event.tokens)
        shortest = min(map(len, texts))
        assert texts[0][:shortest] == texts[1][:shortest]
        for each in (one, two):
            assert torch.equal(model().generate(**inputs, **options, custom_generate=each), plain)
        assert torch.equal(model().generate(**inputs, **options), plain)
        assert set(one.report().drafters) == {"ngram"}
        assert set(two.report().drafters) == {"draft_model"}


def test_a_report_is_of_the_moment_it_was_asked_for() -> None:
    with SpeculativeDecoder(model(), policy="static:ngram:3", kv_tokens=2048) as decoder:
        both(decoder, padded())
        before = decoder.report()
        steps, proposed = before.steps, before.drafters["ngram"].proposed
        assert steps > 0
        assert before.emitted == (NEW - 1) * len(LENGTHS)  # the first tokens come with the prompts
        both(decoder, padded())
        assert (before.steps, before.drafters["ngram"].proposed) == (steps, proposed)
        assert decoder.report().steps > steps


def test_a_closed_decoder_is_refused_and_the_model_is_as_it_was() -> None:
    own = tiny_model()
    plain = own.generate(**padded(), max_new_tokens=NEW, do_sample=False)
    with SpeculativeDecoder(own, kv_tokens=2048) as decoder:
        own.generate(**padded(), max_new_tokens=NEW, do_sample=False, custom_generate=decoder)
    assert torch.equal(own.generate(**padded(), max_new_tokens=NEW, do_sample=False), plain)
    with pytest.raises(EngineClosed):
        own.generate(**padded(), max_new_tokens=4, custom_generate=decoder)
