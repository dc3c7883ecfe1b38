"""What an engine is made of, and the door through which requests come in.

Knows models, drafters, settings and requests; nothing of steps: those are `steps`'.
"""

from collections.abc import Mapping, Sequence

from transformers import GenerationConfig, PreTrainedTokenizerBase

from sdcontrol.core import Planner
from sdcontrol.engine.backends import device_name
from sdcontrol.engine.ceilings import to_measure
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.device_step import answers_on_device, verify_of
from sdcontrol.engine.drafters.build import DrafterSpecs, allowed_families, build_drafters
from sdcontrol.engine.drafters.host import DraftHost
from sdcontrol.engine.drafting import Drafting
from sdcontrol.engine.events import Events
from sdcontrol.engine.generation import Decoding, decoding_of, prepare_config, tokens_of
from sdcontrol.engine.guard import PlannerGuard
from sdcontrol.engine.intake import Intake
from sdcontrol.engine.model_checks import most_tokens
from sdcontrol.engine.model_watch import ModelWatch
from sdcontrol.engine.padding import eager_token_edges
from sdcontrol.engine.request import Request, TokenEvent
from sdcontrol.engine.runner import ModelRunner, unwrap
from sdcontrol.engine.sampling import Processor
from sdcontrol.engine.stats import EngineStats, Tally
from sdcontrol.engine.verify import RejectionVerifier, Verifier, verifier_of
from sdcontrol.errors import EngineClosed

__all__ = ["EngineParts"]


class EngineParts:
    """Everything that a step needs. See `loop.Engine`, which steps."""

    _is_closed = False

    def __init__(
        self,
        model: object,
        *,
        drafters: DrafterSpecs = (),
        planner: Planner | None = None,
        verification: str | Verifier = "coupled",
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.model = unwrap(model)
        self.tokenizer = tokenizer
        self.verifier = verifier_of(verification)
        self.runner = ModelRunner(self.model, self.config.attention_backend)
        self._verify_rows = verify_of(self.verifier, has_kernels=self.runner.has_kernels)
        trees = self.verifier.supports_trees
        built = build_drafters(drafters, allow_trees=trees)
        is_rejection = isinstance(self.verifier, RejectionVerifier)
        self._host = DraftHost(self.runner, self.config, "rejection" if is_rejection else "coupled")
        self.pool = self._host.allocate(built)
        self._watch = ModelWatch(self.runner)
        self.scheduler = self.config.scheduler(self.pool)
        self.drafting = Drafting(
            built,
            vocab_size=self.runner.vocab_size,
            allow_trees=trees,
            max_draft_tokens=self.config.max_draft_tokens,
        )
        self._intake = Intake(
            capacity_tokens=self.pool.capacity_tokens,
            position_limit=most_tokens(self.model),
            vocab_size=self.runner.vocab_size,
        )
        self._tally = Tally(self._host.graph_stats)
        overlap = self.config.overlap
        self._overlaps = self.runner.device.type == "cuda" if overlap is None else overlap
        self._decode_by(planner)
        self._events = Events(planner)
        self._ended: list[Request] = []  # with the last step

    @property
    def stats(self) -> EngineStats:
        """What was drafted, accepted and spent so far: the object itself, which later steps change."""
        return self._tally.stats

    def stats_so_far(self) -> EngineStats:
        """A copy of them, which later steps do not change; any thread may ask."""
        return self._tally.copy()

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        seed: int | None = None,
        speculation: bool | Sequence[str] = True,
        generation_config: GenerationConfig | None = None,
        processors: Sequence[Processor] = (),
        stop_strings: str | Sequence[str] = (),
        **options: object,
    ) -> str:
        """Queue a prompt; returns the request's id. `options` are those of `generate`.

        `speculation` False opts out; a list of families allows only those. Without a seed, a
        sampled request takes one from torch's generator. Raises `RequestRefused` where the request
        could never run, `ConfigError` and `UnsupportedGeneration` for settings.
        """
        tokens = tokens_of(prompt, self.tokenizer)
        config = prepare_config(self.model, generation_config, len(tokens), options)
        decoding = decoding_of(
            self.model,
            config,
            tokens,
            seed=seed,
            processors=processors,
            stop_strings=stop_strings,
            tokenizer=self.tokenizer,
        )
        return self.enqueue(tokens, decoding, request_id=request_id, speculation=speculation)

    def enqueue(
        self,
        prompt: Sequence[int],
        decoding: Decoding,
        *,
        request_id: str | None = None,
        speculation: bool | Sequence[str] = True,
        content: bytes | None = None,
    ) -> str:
        """Queue token ids whose sampler and stop rules are made already. See `submit`.

        `content` is that of `model_content`, where somebody has just asked for it.
        """
        self._check_open()
        root = self.model_content() if content is None else content
        allowed = allowed_families(speculation, self.drafting.families)

        def make(name: str) -> Request:
            return Request(
                name,
                prompt,
                sampler=decoding.sampler,
                rules=decoding.rules,
                temperature=decoding.temperature,
                may_draft=allowed.__contains__,
                content_root=root,
            )

        return self._intake.add(make, request_id, self._events.arrived)

    def model_content(self) -> bytes:
        """A digest of the model as it is now: requests share blocks where it is the same.

        Raises `ConfigError` where the model is in training mode, has another dtype than the cache,
        or where CUDA graphs were captured with other adapters or of weights elsewhere in memory;
        `UnsupportedGeneration` where adapters were chosen for each row.
        """
        return self._watch.content()

    def forget(self) -> None:
        """Share no block with requests of before: weights were written through `tensor.data`.

        Every other change of weights or adapters is seen without it. Requests that are live go on
        as they are: change a model while none is.
        """
        self._watch.forget()

    def cancel(self, request_id: str) -> bool:
        """End a request with the next step; False where no such request is live."""
        return self._intake.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._intake.live)

    @property
    def is_closed(self) -> bool:
        """Whether it will never decode again."""
        return self._is_closed

    @property
    def token_edges(self) -> tuple[int, ...]:
        """The numbers of tokens that decoding forwards are padded to; none where nothing is padded."""
        if self.runner.graphs is not None:
            return self.runner.graphs.token_edges
        return eager_token_edges(self.runner.model, self.config.most_decoding_tokens)

    @property
    def requests(self) -> Mapping[str, Request]:
        """The live requests, by id."""
        return self._intake.live

    def take_events(self) -> list[TokenEvent]:
        """What was emitted since the last call, in order."""
        return self._events.take()

    def _decode_by(self, planner: Planner | None) -> None:
        """Tell a planner what the engine is, and ask it from now on. There must be no requests."""
        self.planner = PlannerGuard(planner)
        self.planner.tell("pad_to", self.token_edges)
        self.planner.tell("draft_at_most", self.config.max_draft_tokens)
        device, configs = self.runner.device, self._host.model_configs
        ceilings = to_measure(device, self.model.dtype)
        self.planner.tell("runs_on", device_name(device), configs, ceilings)
        if (
            self._overlaps
            and answers_on_device(self.verifier)
            and self.planner.allows_late_observations
        ):
            self.planner.tell("goes_ahead")
        self.drafting.is_idle = self.planner.never_drafts

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine is closed; make another")
