"""Noise, logits processors and samples: facts that hold for any batch and any padding."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation import logits_process as hf

from sdcontrol.engine import gumbel_max, sampling, walk
from sdcontrol.engine.copies import upload
from sdcontrol.engine.generation import decoding_of
from sdcontrol.engine.gumbel_max import INVALID, dense_gumbel_argmax, gumbel_argmax
from sdcontrol.engine.noise import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    SYNTHETIC,
    TARGET,
    as_int64,
    derive_seed,
    gumbel,
    row_keys,
    token_counters,
    uniform,
    upper_bits,
)
from sdcontrol.engine.sampling import (
    Row,
    RowSampler,
    check_sample,
    draft_sample,
    process_rows,
    process_runs,
    processors_of_row,
    sample_rows,
)
from sdcontrol.errors import UnsupportedGeneration

PENALTY = "encoder_repetition_penalty"
FIRST_ROWS_ALONE = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.19"),
    reason=f"before 5.19 transformers applied {PENALTY} to one sequence of a prompt alone",
)
FALSE_ALARM = 1e-4  # of each statistical test here, had its seed been drawn afresh
INT64 = st.integers(-(2**63), 2**63 - 1)

GOLDEN = {  # (seed, position, stream, token): (v, gumbel), by the recipe in Python's integers
    (0, 0, TARGET, 0): (0.13870941014555427, 1.9016413323829038),
    (1, 7, TARGET, 42): (0.1437205299698, 1.863308281493287),
    (-1, 100_000, ACCEPT, 151_935): (0.8765878410642444, -0.7382283987325653),
    (2**63 - 1, 3, DRAFT, 1): (0.7101016705044915, -0.2136789068744152),
}


def tensors(*values: int) -> list[Tensor]:
    return [torch.tensor([value]) for value in values]


@pytest.mark.parametrize("place", GOLDEN)
def test_noise_has_its_golden_values(place: tuple[int, int, int, int]) -> None:
    seed, position, stream, token = place
    v, noise = GOLDEN[place]
    assert uniform(seed, position, stream, token) == v
    made = gumbel(*tensors(seed, position, token), stream).item()
    assert made == pytest.approx(noise, rel=1e-14)


def test_the_mix_is_that_of_splitmix64() -> None:
    """Its first output from state 1234567, as published with its reference code."""
    counter = token_counters(torch.tensor([0]))
    assert upper_bits(counter + 1234567).item() == 6457827717110365317 >> 12


@given(seed=INT64, position=st.integers(0, 10**6), token=st.integers(0, 10**6))
def test_integer_and_tensor_noise_are_the_same(seed: int, position: int, token: int) -> None:
    v = torch.tensor(uniform(seed, position, RESIDUAL, token), dtype=torch.float64)
    noise = gumbel(*tensors(seed, position, token), RESIDUAL)[0]
    assert torch.equal(noise, -((-(-v).log1p()).log()))


@given(seed=INT64, position=st.integers(0, 10**6), rows=st.integers(1, 5))
def test_noise_does_not_depend_on_the_batch(seed: int, position: int, rows: int) -> None:
    ids = torch.arange(37)
    alone = gumbel(*tensors(seed, position), ids, TARGET)
    seeds = torch.arange(rows)[:, None]
    seeds[-1] = seed
    batched = gumbel(seeds, torch.full_like(seeds, position), ids, TARGET)
    assert torch.equal(batched[-1], alone)


def test_streams_positions_seeds_and_tokens_give_other_noise() -> None:
    places = [(s, p, t, x) for s in (0, 1) for p in (0, 1) for t in (0, 1) for x in range(5)]
    assert len({uniform(s, p, x, t) for s, p, t, x in places}) == len(places)
    assert {TARGET, ACCEPT, RESIDUAL, DRAFT, SYNTHETIC} == set(range(5))


@given(st.integers())
def test_any_integer_is_a_seed(seed: int) -> None:
    assert RowSampler(seed=seed).seed == as_int64(seed)
    assert (as_int64(seed) - seed) % 2**64 == 0
    assert -(2**63) <= derive_seed(seed, 3, DRAFT) < 2**63


def test_gumbel_argmax_follows_softmax_at_each_position_and_independently() -> None:
    """Two chi-square tests, false alarms at `FALSE_ALARM` each."""
    scores = torch.tensor([0.0, 1.0, -1.0, 0.5, -torch.inf, 2.0])
    num = 20_000
    positions = list(range(num))
    tokens = gumbel_argmax(scores.expand(num, -1), [3] * num, positions, TARGET)
    counts = tokens.bincount(minlength=6).numpy()
    expected = scores.softmax(0).double().numpy() * num
    assert counts[4] == 0
    kept = [0, 1, 2, 3, 5]
    law = expected[kept] / expected[kept].sum() * num
    assert chisquare(counts[kept], law).pvalue > FALSE_ALARM
    pairs = torch.zeros(36).index_add_(0, tokens[:-1] * 6 + tokens[1:], torch.ones(num - 1))
    table = pairs.view(6, 6)[kept][:, kept].numpy()
    assert chi2_contingency(table).pvalue > FALSE_ALARM


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0, 300.0]),
    banned=st.sampled_from([0.0, 0.5, 0.98]),
    shape=st.sampled_from([(1, 5), (4, 97), (3, 5_000)]),
)
def test_noise_where_needed_gives_what_noise_everywhere_gives(
    seed: int, spread: float, banned: float, shape: tuple[int, int]
) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape, generator=random) * spread
    scores[torch.rand(shape, generator=random) < banned] = -torch.inf
    scores[:, 0] = 0.0
    seeds, positions = list(range(shape[0])), [seed] * shape[0]
    keys = row_keys(torch.tensor(seeds), torch.tensor(positions), TARGET)
    expected = dense_gumbel_argmax(scores, keys)
    assert torch.equal(gumbel_argmax(scores, seeds, positions, TARGET), expected)


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6])
def test_at_any_low_temperature_the_noise_is_looked_for_where_it_could_win(
    temperature: float,
) -> None:
    """Scores so large that float32 cannot tell them from themselves with noise added."""
    num = 4000
    scores = (torch.tensor([3.0, 12.3, 5.0, 12.2, -20.0]) / temperature).expand(num, -1)
    positions = list(range(num))
    keys = row_keys(torch.zeros(num, dtype=torch.int64), torch.tensor(positions), TARGET)
    expected = dense_gumbel_argmax(scores, keys)
    assert torch.equal(gumbel_argmax(scores, [0] * num, positions, TARGET), expected)
    assert expected.bincount().tolist() == [0, num]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_finite_largest_score_cannot_be_sampled(bad: float) -> None:
    scores = torch.zeros(2, 8)
    scores[1, :] = bad
    rows = [Row(RowSampler(do_sample=True), (1, 2)) for _ in range(2)]
    first, second = sample_rows(scores, rows).tolist()
    assert 0 <= first < 8
    assert second == INVALID
    with pytest.raises(UnsupportedGeneration, match="remove_invalid_values"):
        check_sample(second)


# --- processors -------------------------------------------------------------------------------

PAD, EOS, STEPS = 0, 1, 6
PROMPTS = [[5, 9, 7, 5, 9], [3], [8, 8, 4, 6, 8, 8, 4, 11, 5]]
WIDTH = max(map(len, PROMPTS))
PREFIX_SETTINGS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [9, 7], [8, 4, 6]]},
    "sequence_bias": {"sequence_bias": {(9, 7): 3.0, (4,): -2.0}},
    "min_length": {"min_length": WIDTH + 3},
    "min_new_tokens": {"min_new_tokens": 3},
    "forced_eos": {"forced_eos_token_id": EOS},
    "exponential_decay": {"exponential_decay_length_penalty": (2, 1.6)},
    "begin_suppress": {"begin_suppress_tokens": [2, 3, 4]},
}
ROW_SETTINGS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "top_h": {"top_h": 0.5},
    "min_p": {"min_p": 0.1},
    "typical": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.03},
    "eta": {"eta_cutoff": 0.05},
    "suppress": {"suppress_tokens": [4, 5]},
    "renormalize": {"renormalize_logits": True},
    "remove_invalid": {"remove_invalid_values": True},
}
EVERYTHING = {
    name: value
    for group in (*PREFIX_SETTINGS.values(), *ROW_SETTINGS.values())
    for name, value in group.items()
    if name not in ("min_length", "typical_p")
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.6,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(asked, id=name, marks=FIRST_ROWS_ALONE if PENALTY in asked else ())
        for name, asked in [
            *PREFIX_SETTINGS.items(),
            *ROW_SETTINGS.items(),
            ("everything", EVERYTHING),
        ]
    ],
)
def test_a_row_is_processed_as_in_the_padded_batch_of_generate(
    model: LlamaForCausalLM, asked: dict[str, object]
) -> None:
    """Every step of every row of a ragged batch, two returned sequences for each prompt."""
    ids = torch.tensor([[PAD] * (WIDTH - len(prompt)) + prompt for prompt in PROMPTS])
    torch.manual_seed(1)
    prepared: list[LogitsProcessorList] = []

    def keep(_model: object, input_ids: Tensor, logits_processor: LogitsProcessorList, **_: object):  # type: ignore[no-untyped-def]
        prepared.append(logits_processor)
        return input_ids

    arguments = {
        "input_ids": ids,
        "attention_mask": torch.tensor([[0] * (WIDTH - len(p)) + [1] * len(p) for p in PROMPTS]),
        "max_new_tokens": STEPS,
        "do_sample": True,
        "top_k": 0,
        "num_return_sequences": 2,
        **asked,
    }
    model.generate(**arguments, custom_generate=keep)
    out = model.generate(
        **arguments, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    changed = 0
    for row, sequence in enumerate(out.sequences.tolist()):
        prompt = PROMPTS[row // 2]
        pads = [PAD] * (WIDTH - len(prompt))
        own = processors_of_row(prepared[0], row, len(out.sequences))
        sampler = RowSampler(processors=own, do_sample=True, pad_tokens=pads)
        for step in range(len(out.logits)):
            if EOS in sequence[WIDTH : WIDTH + step]:
                break
            tokens = sequence[len(pads) : WIDTH + step]
            logits = out.logits[step][row : row + 1]
            processed = sampler.process(logits, [tokens])[0]
            torch.testing.assert_close(processed, out.scores[step][row], rtol=1e-6, atol=1e-6)
            changed += not torch.equal(processed, logits[0])
            in_pieces = process_rows(logits, [Row(sampler, tokens[:-1], tokens[-1:])])
            assert torch.equal(in_pieces[0], processed)
    assert changed or "remove_invalid_values" in asked, "the setting did nothing: no test"


@pytest.mark.parametrize(
    "name",
    [
        "PrefixConstrainedLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WatermarkLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
        "WhisperNoSpeechDetection",
        "BarkEosPrioritizerLogitsProcessor",
        "AlternatingCodebooksLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSChannelFilterLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
    ],
)
def test_processors_that_are_no_function_of_one_row_are_refused_by_name(name: str) -> None:
    cls = getattr(hf, name)
    own = type("MyOwn", (cls,), {})
    for kind in (cls, own):
        with pytest.raises(UnsupportedGeneration, match=kind.__name__):
            RowSampler(processors=LogitsProcessorList([kind.__new__(kind)]))


def test_a_processor_that_wants_more_than_ids_and_scores_is_refused() -> None:
    def needs_beams(input_ids: Tensor, scores: Tensor, beams: int) -> Tensor:
        return scores

    with pytest.raises(UnsupportedGeneration, match="more than"):
        RowSampler(processors=LogitsProcessorList([needs_beams]))


def test_a_processor_that_writes_in_place_leaves_the_logits_alone() -> None:
    def ban_last(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids[0, -1]] = -torch.inf
        return scores

    sampler = RowSampler(processors=LogitsProcessorList([ban_last]))
    logits = torch.zeros(2, 4)
    processed = process_rows(logits, [Row(sampler, (1, 2)), Row(sampler, (1, 2), (3,))])
    assert torch.equal(logits, torch.zeros(2, 4))
    assert processed.isneginf().nonzero().tolist() == [[0, 2], [1, 3]]


def test_a_rejected_draft_is_not_shown_again() -> None:
    shown: list[list[int]] = []

    def watching(input_ids: Tensor, scores: Tensor) -> Tensor:
        shown.append(input_ids[0].tolist())
        return scores

    sampler = RowSampler(processors=LogitsProcessorList([watching]), pad_tokens=[0])
    steps = [((1, 2), (3, 4)), ((1, 2), (5,)), ((1, 2, 6), ()), ((1, 2, 6, 7), (8, 9, 3))]
    for tokens, draft in steps:
        process_rows(torch.zeros(1, 10), [Row(sampler, tokens, draft)])
    assert shown == [[0, *tokens, *draft] for tokens, draft in steps]


def test_rows_with_equal_settings_share_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = hf.TemperatureLogitsWarper.__call__

    def counted(self: hf.TemperatureLogitsWarper, input_ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(len(scores))
        return real(self, input_ids, scores)

    monkeypatch.setattr(hf.TemperatureLogitsWarper, "__call__", counted)
    heats = [0.5, 2.0, 0.5, 0.5]
    samplers = [
        RowSampler(processors=LogitsProcessorList([hf.TemperatureLogitsWarper(heat)]))
        for heat in heats
    ]
    logits = torch.randn(4, 6)
    processed = process_rows(logits, [Row(sampler, (1,)) for sampler in samplers])
    assert torch.equal(processed, logits / torch.tensor(heats)[:, None])
    assert sorted(calls) == [1, 3]


@pytest.mark.parametrize("sizes", [(1, 4, 2, 3), (5,)])
def test_rows_of_a_sampler_that_follow_one_another_are_processed_as_each_alone(
    sizes: tuple[int, ...],
) -> None:
    samplers = [
        RowSampler(processors=LogitsProcessorList([hf.TemperatureLogitsWarper((0.5, 2.0)[i % 2])]))
        for i in range(len(sizes))
    ]
    rows = [Row(own, ()) for own, size in zip(samplers, sizes, strict=True) for _ in range(size)]
    logits = torch.randn(len(rows), 6, generator=torch.Generator().manual_seed(7))
    runs = list(zip(samplers, sizes, strict=True))
    alone = zip(logits, rows, strict=True)
    expected = torch.cat([row.sampler.process(own[None], [()]) for own, row in alone])
    assert torch.equal(process_runs(logits, runs), expected)
    assert torch.equal(process_rows(logits, rows), expected)


def test_what_is_sent_to_a_device_is_sent_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.tensor(list, device=...)` would wait for all that the device was asked to do."""
    sent: list[str] = []
    for module in (sampling, gumbel_max, walk):

        def noted(values: object, device: torch.device, name: str = module.__name__) -> Tensor:
            sent.append(name.rpartition(".")[2])
            return upload(values, device)  # type: ignore[arg-type]

        monkeypatch.setattr(module, "upload", noted)
    rows = mixed_rows()
    scores = process_rows(torch.randn(len(rows), 64), rows)
    assert sent == ["sampling"]
    sample_rows(scores, rows)
    assert sent[1:] == ["sampling", "gumbel_max"]
    walk.take_rows(scores, [3, 1])
    assert sent[3:] == ["walk"]


def test_prompts_that_processors_look_at_are_on_the_models_device() -> None:
    """A penalty for the prompt's tokens gathers scores, which are there."""
    told: dict[str, object] = {}

    def processors_of(**facts: object) -> LogitsProcessorList:
        told.update(facts)
        return LogitsProcessorList()

    model = SimpleNamespace(device=torch.device("meta"), _get_logits_processor=processors_of)
    decoding_of(model, GenerationConfig(), [3, 4], seed=1)  # type: ignore[arg-type]
    ids = told["encoder_input_ids"]
    assert isinstance(ids, Tensor)
    assert ids.device.type == "meta"


def test_padding_does_not_change_the_sample() -> None:
    logits = torch.randn(1, 50)
    tokens = [
        sample_rows(
            logits, [Row(RowSampler(do_sample=True, seed=5, pad_tokens=[0] * pads), (7, 8))]
        )
        for pads in (0, 3)
    ]
    assert torch.equal(*tokens)


# --- drafters that sample ---------------------------------------------------------------------


def mixed_rows() -> list[Row]:
    hot = LogitsProcessorList([hf.TemperatureLogitsWarper(1.5), hf.TopKLogitsWarper(20)])
    wary = LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(1.5)])
    samplers = [
        RowSampler(),
        RowSampler(processors=wary),
        RowSampler(do_sample=True, seed=1),
        RowSampler(processors=hot, do_sample=True, seed=2),
        RowSampler(processors=LogitsProcessorList([*wary, *hot]), do_sample=True, seed=3),
    ]
    return [Row(sampler, (1, 2, 3), (4, 5)) for sampler in samplers for _ in range(40)]


def test_a_coupled_drafter_with_the_targets_logits_drafts_the_targets_token() -> None:
    rows = mixed_rows()
    logits = torch.randn(len(rows), 64, generator=torch.Generator().manual_seed(4))
    drafted = draft_sample(logits, rows)
    assert drafted.tokens == sample_rows(process_rows(logits, rows), rows).tolist()
    assert drafted.distribution is None


def test_a_rejection_drafter_follows_the_law_that_it_returns() -> None:
    """Chi-square, false alarm at `FALSE_ALARM`; each row is another step of the request."""
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(5))
    sampler = RowSampler(do_sample=True, seed=9)
    num = 4_000
    rows = [Row(sampler, range(step)) for step in range(num)]
    drafted = draft_sample(logits.expand(num, -1), rows, verification="rejection")
    assert drafted.distribution is not None
    law = drafted.distribution[0].double().numpy()
    counts = torch.tensor(drafted.tokens).bincount(minlength=6).numpy()
    assert chisquare(counts, law / law.sum() * num).pvalue > FALSE_ALARM
    assert drafted.tokens != draft_sample(logits.expand(num, -1), rows).tokens


def test_a_rejected_position_is_drafted_with_fresh_noise_at_the_next_step() -> None:
    sampler = RowSampler(do_sample=True, seed=9)
    logits = torch.zeros(60, 1000)
    now = draft_sample(logits, [Row(sampler, (1,), (2,))] * 60, verification="rejection")
    later = draft_sample(logits, [Row(sampler, (1, 3), ())] * 60, verification="rejection")
    assert now.tokens != later.tokens


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_confidence_is_the_largest_probability_whatever_was_drawn(verification: str) -> None:
    rows = mixed_rows()
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(6)).expand(len(rows), -1)
    drafted = draft_sample(logits, rows, verification=verification)
    largest = process_rows(logits, rows).softmax(dim=-1).amax(dim=-1)
    assert drafted.confidence == pytest.approx(largest.tolist(), rel=1e-5)


def test_confidence_is_always_a_number_between_0_and_1() -> None:
    logits = torch.zeros(3, 5)
    logits[0] = torch.nan
    logits[1, 2] = 1e30
    drafted = draft_sample(logits, [Row(RowSampler(), (1,))] * 3)
    assert drafted.confidence == [0.0, 1.0, pytest.approx(0.2)]
