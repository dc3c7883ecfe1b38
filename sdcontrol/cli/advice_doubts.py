"""Why `sdcontrol advise` may be wrong: calibrations that are none, profiles of something else, odd pairs.

Knows shapes, profiles and errors of a fit; nothing of options and files. A doubt is one line that says
what, and what to do about it.
"""

from collections.abc import Iterator, Sequence

from sdcontrol.estimators.calibration import LEAST_EFFICIENCY, MOST_EFFICIENCY
from sdcontrol.estimators.machine_profile import LEAST_STEPS, MachineProfile
from sdcontrol.estimators.roofline import Calibration
from sdcontrol.estimators.shapes import ModelShape

__all__ = [
    "LEAST_SHARED_VOCABULARY",
    "fit_doubts",
    "median_error",
    "pair_doubts",
    "profile_doubts",
]

LEAST_SHARED_VOCABULARY = 0.9
"""Of the larger vocabulary; the engine refuses a draft model below it."""
_DOUBTFUL_ERROR = 0.1  # median, of measured steps


def median_error(errors: Sequence[float]) -> float:
    """Of relative errors, in magnitude; of at least one."""
    ordered = sorted(abs(error) for error in errors)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2.0


def fit_doubts(found: Calibration, errors: Sequence[float], *, is_profile: bool) -> Iterator[str]:
    """Of a calibration and its relative errors, on a profile or on steps from elsewhere."""
    if not errors:
        return
    remedy = "check --model, --hardware and --tensor-parallel, or give more steps"
    if is_profile:
        remedy = "profile again with nothing else running on the machine"
    reached = () if is_profile else (found.bandwidth_efficiency, found.kv_efficiency)
    if median_error(errors) > _DOUBTFUL_ERROR:
        yield f"that is much; {remedy}"
    elif LEAST_EFFICIENCY in reached:
        yield f"they ask for a bandwidth efficiency below {LEAST_EFFICIENCY:g}; {remedy}"
    elif MOST_EFFICIENCY in reached:
        yield f"they ask for a bandwidth efficiency above {MOST_EFFICIENCY:g}; {remedy}"


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
