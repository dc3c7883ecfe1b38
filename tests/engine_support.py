"""What the engine's tests share: tiny models, planners, and the comparison with `generate`."""

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import sdcontrol
from sdcontrol.core import BatchView, Choice, Confidence, Observation, Plan
from sdcontrol.engine.drafters.base import Draft, Drafter, DraftTask
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from sdcontrol.observed_refusals import check_observation

_PACKAGE = str(Path(sdcontrol.__file__).parent)
VOCAB = 61
NEAR_TIE = 1e-5
"""Of the logits' standard deviation: closer than this, float32 does not decide between the two."""

ARCHITECTURES: Mapping[str, Mapping[str, object]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 24},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Phi3": {},
    "Olmo2": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
}

_EAGER_ONLY = {"Gemma2", "GptOss"}

_SHAPE: Mapping[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,  # large enough for texts that do not repeat at once
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_model(
    architecture: str = "Llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> PreTrainedModel:
    """A small model with random weights; `changes` are settings of its config."""
    settings = {**_SHAPE, **ARCHITECTURES.get(architecture, {}), **changes}
    config = getattr(transformers, f"{architecture}Config")(**settings)
    config._attn_implementation = "eager" if architecture in _EAGER_ONLY else "sdpa"
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{architecture}ForCausalLM")(config)
    return model.to(dtype).eval()


def noised(model: PreTrainedModel, noise: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """A copy whose weights are off by `noise` of their spread: a draft model that is often right."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            spread = parameter.float().std() if parameter.numel() > 1 else 0.0
            off = torch.randn(parameter.shape, generator=generator) * spread * noise
            parameter.add_(off.to(parameter.dtype))
    return other


def random_prompt(length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    """Random tokens; from 20 tokens on, half of it says again what the other half said."""
    rng = random.Random(seed)
    if length < 20:
        return [rng.randrange(1, vocab) for _ in range(length)]
    phrase = [rng.randrange(1, vocab) for _ in range(length // 2)]
    return [*phrase, rng.randrange(1, vocab), *phrase][-length:]


PROMPTS = [random_prompt(length, seed=length) for length in (6, 21, 36, 50, 44, 12)]
ROOMY = {"block_size": 8, "max_batch_size": 4, "max_prefill_tokens": 40, "kv_tokens": 512}
"""Settings of an engine that holds four of the prompts and 40 tokens more of each."""


# ---- planners


@dataclass
class RecordingPlanner:
    """Plans nothing, and keeps what it was told."""

    observations: list[Observation] = field(default_factory=list)

    def plan(self, view: BatchView) -> Plan:
        return Plan.off(view)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        return plan

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)

    def totals(self) -> tuple[int, int]:
        """Draft tokens proposed and accepted."""
        seen = self.observations
        return sum(sum(o.proposed) for o in seen), sum(sum(o.accepted) for o in seen)

    def faults(self) -> list[str]:
        return [fault for observation in self.observations for fault in observation.faults]


@dataclass
class ForcedPlanner(RecordingPlanner):
    """The same arm and length wherever that is possible."""

    arm: str = "ngram"
    num_draft_tokens: int = 4

    def plan(self, view: BatchView) -> Plan:
        return Plan.uniform(view, self.arm, self.num_draft_tokens)


class RandomPlanner(RecordingPlanner):
    """Any legal plan: any arm, any length, also none; and shortens at random while drafting."""

    def __init__(self, seed: int, *, most: int = 6, off: float = 0.1, shorten: float = 0.2) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._most = most
        self._off = off
        self._shorten = shorten

    def plan(self, view: BatchView) -> Plan:
        choices, free = [], view.free_kv_tokens
        for request in view.requests:
            choice = Choice.off()
            if request.drafters and self._random.random() >= self._off:
                arm = self._random.choice(request.drafters)
                wanted = self._random.randint(1, self._most)
                choice = Choice.of(arm, max(min(wanted, request.remaining_tokens - 1, free), 0))
            free -= choice.num_draft_tokens
            choices.append(choice)
        return Plan(tuple(choices))

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        return Plan(tuple(self._cut(choice) for choice in plan.choices))

    def _cut(self, choice: Choice) -> Choice:
        if choice.drafter is None or self._random.random() >= self._shorten:
            return choice
        return Choice.of(choice.drafter, self._random.randint(0, choice.num_draft_tokens))


class LatePlanner(RandomPlanner):
    """One that may be told of a step after the next was planned."""

    allows_late_observations = True


class Seldom(RandomPlanner):
    """Drafts in every `period`-th step alone, and may be asked before tokens are known."""

    allows_late_observations = True
    plans_ahead = True

    def __init__(self, seed: int, *, period: int = 13) -> None:
        super().__init__(seed, off=0.0)
        self._period = period

    def plan(self, view: BatchView) -> Plan:
        return Plan.off(view) if view.step % self._period else super().plan(view)


# ---- drafters


class TextDrafter(Drafter):
    """Drafts the text that it was told will come, with every `wrong_every`-th token off by one.

    `texts` is keyed by the prompt; a tree offers a wrong sibling beside every token.
    """

    name = "text"

    def __init__(
        self,
        texts: Mapping[tuple[int, ...], Sequence[int]],
        *,
        wrong_every: int = 0,
        as_tree: bool = False,
        vocab: int = VOCAB,
    ) -> None:
        self._texts = {prompt: tuple(text) for prompt, text in texts.items()}
        self._wrong_every = wrong_every
        self._as_tree = as_tree
        self._vocab = vocab

    def propose(
        self, tasks: Sequence[DraftTask], keep_drafting: Callable[[Sequence[Draft]], Sequence[int]]
    ) -> list[Draft]:
        return [self._draft(task) for task in tasks]

    def _draft(self, task: DraftTask) -> Draft:
        tokens = tuple(task.request.tokens)
        for prompt, text in self._texts.items():
            if tokens[: len(prompt)] == prompt:
                done = len(tokens) - len(prompt)
                ahead = list(text[done : done + task.num_draft_tokens])
                return self._shaped(ahead, done, task.num_draft_tokens)
        return Draft()

    def _shaped(self, ahead: list[int], done: int, most: int) -> Draft:
        if self._wrong_every:
            ahead = [
                (token + 1) % self._vocab if (done + index) % self._wrong_every == 0 else token
                for index, token in enumerate(ahead)
            ]
        if not self._as_tree:
            return Draft.chain(ahead)
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in ahead:
            tokens += [(token + 7) % self._vocab, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Draft(tuple(tokens[:most]), tuple(parents[:most]))


def text_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Tokens of one to three letters, so that strings stand across tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    rng = random.Random(0)
    words = {letter: number for number, letter in enumerate(letters)}
    while len(words) < vocab:
        words.setdefault("".join(rng.choices(letters, k=rng.randint(2, 3))), len(words))
    tokenizer = Tokenizer(BPE(words, merges=[]))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


# ---- the comparison


@dataclass(frozen=True)
class Reference:
    """What `generate` says, and how far its first choice was ahead at each place."""

    tokens: list[int]
    margins: list[float]  # of the two largest scores, in standard deviations


def generate_alone(model: PreTrainedModel, prompt: Sequence[int], **options: object) -> Reference:
    """`generate` of one prompt."""
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    return Reference(tokens, [_margin(scores[0]) for scores in out.scores])


def _margin(scores: torch.Tensor) -> float:
    finite = scores[scores.isfinite()].double()
    if len(finite) < 2:
        return float("inf")
    best = finite.topk(2).values
    return float((best[0] - best[1]) / finite.std().clamp(min=1e-30))


@dataclass
class Comparison:
    """Counts of all texts that were compared with `generate`."""

    texts: int = 0
    tokens: int = 0
    near_ties: int = 0

    def check(self, reference: Reference, output: Sequence[int], what: str) -> None:
        """Fails unless the texts are equal up to a near-tie, which is counted."""
        self.texts += 1
        self.tokens += len(reference.tokens)
        if list(output) == reference.tokens:
            return
        pairs = zip(output, reference.tokens, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        assert place is not None, f"{what}: {len(output)} tokens, not {len(reference.tokens)}"
        assert reference.margins[place] < NEAR_TIE, (
            f"{what}: differs at token {place}, where the reference is "
            f"{reference.margins[place]:.2g} standard deviations ahead: "
            f"{list(output)} is not {reference.tokens}"
        )
        self.near_ties += 1


COMPARISON = Comparison()
"""Over the whole session; the exactness tests print and bound it in the end."""


def live_requests(engine: Engine) -> dict[str, Request]:
    """What has been submitted and has not ended, by id."""
    return dict(engine._intake.live)


def submit_all(engine: Engine, prompts: Sequence[Sequence[int]], **options: object) -> list[str]:
    """Ids of greedy requests, unless `options` say otherwise."""
    settings = {"do_sample": False, **options}
    return [engine.submit(prompt, **settings) for prompt in prompts]


def run_checked(engine: Engine) -> dict[str, Request]:
    """Step to the end, checking the books after each step and the events at the end."""
    finished: dict[str, Request] = {}
    said: dict[str, list[int]] = {}
    while engine.has_work:
        live = dict(engine.requests)
        engine.step()
        engine.scheduler.check_integrity()
        finished |= {name: request for name, request in live.items() if request.finish_reason}
        for event in engine.take_events():
            said.setdefault(event.request_id, []).extend(event.tokens)
    assert said == {name: request.output for name, request in finished.items()}
    for observation in getattr(engine.planner._planner, "observations", ()):
        check_observation(observation)  # which the engine vouches for
    return finished


# ---- interrupts


@contextmanager
def interrupt_at(place: int) -> Iterator[list[int]]:
    """Raise at the `place`-th of all places in the package where an interpreter looks for signals: they are counted."""
    counted = [0]

    def look(frame: FrameType, event: str, _: object) -> None:
        ours = frame.f_code.co_filename.startswith(_PACKAGE)
        if ours and event in {"call", "c_return", "c_exception"}:
            counted[0] += 1
            if counted[0] == place:
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield counted
    finally:
        sys.setprofile(before)
