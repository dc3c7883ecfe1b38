"""What the learned policy of a case learns from: recorded runs that nobody scores.

Seeds are others than those of any block, and so are prompts where acceptance is real. What is fitted
is what `sdcontrol train` fits to traces of such runs. Knows no scores.
"""

from benchmarks.keeping import Keeping
from benchmarks.regret.rig import Arm, Rig
from benchmarks.regret.scoring import ADAPTIVE, OFF
from sdcontrol.policies.learned_model import LearnedModel, fit

__all__ = ["trained_model"]

_FIRST_BLOCK = 1000
_ARMS = (OFF, "static:draft_model:2", "static:ngram:4", ADAPTIVE, ADAPTIVE)
"""As traffic would have left: no speculation, settings tried, and then what decides for itself."""


def trained_model(rig: Rig) -> LearnedModel:
    """Fitted to every phase of a workload, or to each arm in a group of a cell's prompts."""
    runs = []
    for number, policy in enumerate(_ARMS):
        keeper = Keeping(policy)
        arm = Arm(policy, policy)
        arm.controller = keeper
        for phase in rig.case.phases_of(2 * number + 1):
            rig.run(arm, phase, _FIRST_BLOCK + number, is_training=True)
        runs.append(keeper.observations)
    return fit(runs)
