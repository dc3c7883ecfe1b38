"""Why `sdcontrol advise` may be wrong: calibrations that are none, profiles of something else, odd pairs.

Knows shapes, forwards, profiles and errors of a fit; nothing of options and files. A doubt is one line that says
what, and what to do about it.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from sdcontrol.estimators.calibration import LEAST_EFFICIENCY, MOST_EFFICIENCY
from sdcontrol.estimators.machine_profile import LEAST_STEPS, MachineProfile, StepTime
from sdcontrol.estimators.roofline import Forward
from sdcontrol.estimators.shapes import ModelShape
from sdcontrol.estimators.storage import DTYPE_BYTES

__all__ = [
    "LEAST_SHARED_VOCABULARY",
    "arithmetic_doubts",
    "fit_doubts",
    "median_error",
    "pair_doubts",
    "profile_doubts",
    "profile_fit_doubts",
    "split_doubts",
]

LEAST_SHARED_VOCABULARY = 0.9
"""Of the larger vocabulary; the engine refuses a draft model below it."""
_DOUBTFUL_ERROR = 0.1  # median, of measured steps
_DOUBTFUL_OVERHEAD = 0.75  # median share of a measured step


def median_error(errors: Sequence[float]) -> float:
    """Of relative errors, in magnitude; of at least one."""
    return median([abs(error) for error in errors])


def profile_fit_doubts(errors: Sequence[float]) -> Iterator[str]:
    """Of a profile's calibration, by its relative errors."""
    if errors and median_error(errors) > _DOUBTFUL_ERROR:
        yield "that is much; profile again with nothing else running on the machine"


def fit_doubts(
    forward: Forward, steps: Sequence[StepTime], errors: Sequence[float]
) -> Iterator[str]:
    """Of a calibration on plain steps from elsewhere, and its relative errors."""
    found = forward.calibration
    remedy = "check --model, --hardware and --tensor-parallel, or give more steps"
    reached = found.bandwidth_efficiency, found.kv_efficiency
    if median_error(errors) > _DOUBTFUL_ERROR:
        yield f"that is much; {remedy}"
    elif LEAST_EFFICIENCY in reached:
        yield f"they ask for a bandwidth efficiency below {LEAST_EFFICIENCY:g}; {remedy}"
    elif MOST_EFFICIENCY in reached:
        yield f"they ask for a bandwidth efficiency above {MOST_EFFICIENCY:g}; {remedy}"
    elif (share := _overhead_share(forward, steps)) > _DOUBTFUL_OVERHEAD:
        yield (
            f"they leave {100 * share:.0f} % of a step to launches and gaps, "
            f"{1e3 * found.layer_overhead_seconds:.3g} ms per layer; unless layers do take that long, check "
            "--model, --hardware, and the unit of time"
        )


def _overhead_share(forward: Forward, steps: Sequence[StepTime]) -> float:
    """Median, of the plain steps."""
    shares = []
    for step in steps:
        kv_tokens = step.batch_size * step.context_tokens
        whole = forward.profile(step.batch_size, kv_tokens, step.batch_size)
        shares.append(whole.overhead_seconds / whole.seconds)
    return median(shares)


def profile_doubts(profile: MachineProfile, shape: ModelShape) -> Iterator[str]:
    """Of a profile that measured the model of this shape, and yet cannot calibrate it."""
    count = len(profile.steps(shape))
    if 0 < count < LEAST_STEPS:
        yield (
            f"{shape.name} is not calibrated: the profile has {count} measured "
            f"step{'s' if count > 1 else ''} of it, at least {LEAST_STEPS} are needed; profile it with "
            "more of --batch, --tokens or --context"
        )
    other = profile.in_another_dtype(shape)
    if other is not None:
        yield (
            f"{shape.name} is not calibrated: the profile measured {other.name} in {other.dtype}, this "
            f"has {8.0 * shape.weight_bytes:.3g} bits per weight and {8.0 * shape.kv_bytes:.3g} per key "
            "and value; profile it with that --dtype, or give a config.json with the dtype measured"
        )


def pair_doubts(target: ModelShape, draft: ModelShape) -> Iterator[str]:
    """Of a draft model that the engine would refuse for this target."""
    sizes = (draft.vocab_size, target.vocab_size)
    if min(sizes) < LEAST_SHARED_VOCABULARY * max(sizes):
        yield (
            f"draft model {draft.name} has {draft.vocab_size} tokens, {target.name} "
            f"{target.vocab_size}, and the engine refuses such a pair; use a draft model with the "
            "target's tokenizer"
        )


def split_doubts(forward: Forward) -> Iterator[str]:
    """Of tensor parallelism that the model's heads do not allow."""
    shape, devices = forward.shape, forward.tensor_parallel
    fewer, more = sorted((shape.num_kv_heads, devices))
    if shape.num_heads % devices or more % fewer:
        yield (
            f"{shape.name} has {shape.num_heads} attention heads and {shape.num_kv_heads} KV heads, which "
            f"{devices} devices cannot share evenly, and most engines refuse that; give a number that divides them"
        )


def arithmetic_doubts(forward: Forward, most_tokens: int) -> Iterator[str]:
    """Of weights that are not computed with at the speed of bf16, which the table of GPUs has.

    `most_tokens` are those of the longest verification: few take no time worth mentioning.
    """
    shape, machine = forward.shape, forward.hardware.name
    if shape.weight_bytes >= DTYPE_BYTES["float32"]:
        yield (
            f"{shape.name} has weights of 32 bits, and is priced at the FLOP/s that {machine} reaches in bf16; "
            "in float32 they are far fewer, and drafts cost more than shown"
        )
    elif shape.weight_bytes == DTYPE_BYTES["float8"]:
        weights = next(p for p in forward.profile(most_tokens, 0, 1).parts if p.name == "weights")
        if 2.0 * weights.intensity_flops_per_byte > forward.hardware.ridge_flops_per_byte:
            yield (
                f"{shape.name} has weights of 8 bits, and is priced at the FLOP/s that {machine} reaches in bf16; "
                "where an engine computes in 8 bits there may be twice as many, and long drafts cost less "
                "than shown"
            )
