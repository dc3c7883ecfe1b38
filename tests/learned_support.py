"""Runs whose truth is known, for what learns from runs."""

import numpy as np

from sdcontrol.core import BatchView, Hint, Observation, Plan, RequestView, Timing

ARM = "draft_model"


def seen_run(
    seed: int, steps: int, *, slower: float = 1.0, noise: float = 0.02
) -> list[Observation]:
    """Forwards of 1 ms and 0.1 ms per token beyond 12, rounds of 0.4 ms, 20 us per token of catch-up.

    `confidence` is right about acceptance, and every request lives for 5 steps.
    """
    generator = np.random.default_rng(seed)
    observations = []
    for step in range(steps):
        confidence = generator.uniform(0.1, 0.9, int(generator.integers(1, 9)))
        requests = tuple(
            RequestView(
                f"{seed}.{step // 5}.{r}",
                int(generator.integers(100, 2000)),
                step % 5,
                100,
                0.0,
                (ARM,),
                {ARM: Hint(confidence=float(c), catch_up_tokens=int(generator.integers(0, 9)))},
            )
            for r, c in enumerate(confidence)
        )
        view = BatchView(step, requests, 1000)
        plan = Plan.uniform(view, ARM, int(generator.integers(1, 6)))
        drafted = tuple(choice.num_draft_tokens for choice in plan.choices)
        lengths = [generator.geometric(1.0 - c) - 1 for c in confidence]
        accepted = tuple(min(n, int(m)) for n, m in zip(drafted, lengths, strict=True))
        caught_up = sum(request.hints[ARM].catch_up_tokens for request in requests)
        factor = slower * float(np.exp(noise * generator.standard_normal()))
        timing = Timing(
            {ARM: factor * (4e-4 * max(drafted) + 2e-5 * caught_up)},
            factor * (1e-3 + 1e-4 * max(len(requests) + sum(drafted) - 12, 0)),
            overhead_seconds=1e-4 * factor,
        )
        emitted = tuple(n + 1 for n in accepted)
        observations.append(
            Observation(view, plan, drafted, drafted, accepted, emitted, timing=timing)
        )
    return observations
