"""What to do, given a belief: one file per policy, its config and its class.

    policies.build("goodput")                                  a name
    policies.build("static:ngram:4")                           a shorthand
    policies.build({"kind": "static", "drafter": "ngram", "num_draft_tokens": 4})
    policies.build(StaticConfig(drafter="ngram", num_draft_tokens=4))

A new policy is one file and one line. The file has a config, whose `kind` is the policy's name, and
the policy; the line is the `register` below it, or beside the others in this module:

    from typing import Literal

    from sdcontrol import policies
    from sdcontrol.core import BatchView, Belief, Plan
    from sdcontrol.policies.base import Policy, PolicyConfig


    class EverySecondConfig(PolicyConfig):
        kind: Literal["every_second"] = "every_second"
        drafter: str = "ngram"

        def build(self) -> "EverySecond":
            return EverySecond(self.drafter)


    class EverySecond(Policy):
        def __init__(self, drafter: str) -> None:
            self.drafter = drafter

        def plan(self, view: BatchView, belief: Belief) -> Plan:
            return Plan.uniform(view, self.drafter, 2) if view.step % 2 else Plan.off(view)


    policies.register(EverySecondConfig)

`sdcontrol.policies.checks.check_policy(policy)` says whether it keeps the contract.
"""

from sdcontrol.policies.base import Policy, PolicyConfig, Refiner
from sdcontrol.policies.goodput import GoodputConfig
from sdcontrol.policies.learned import LearnedConfig
from sdcontrol.policies.off import OffConfig
from sdcontrol.policies.oracle import OracleConfig
from sdcontrol.policies.registry import PolicySpec, build, names, parse, register
from sdcontrol.policies.rivals.budget_argmax import BudgetArgmaxConfig
from sdcontrol.policies.rivals.concurrency_schedule import ConcurrencyScheduleConfig
from sdcontrol.policies.rivals.ema_steps import EmaStepsConfig
from sdcontrol.policies.rivals.heuristic import HeuristicConfig
from sdcontrol.policies.rivals.smartspec import SmartSpecConfig
from sdcontrol.policies.rivals.throughput_aware import ThroughputAwareConfig
from sdcontrol.policies.roofline import RooflineConfig
from sdcontrol.policies.static import StaticConfig

__all__ = [
    "Policy",
    "PolicyConfig",
    "PolicySpec",
    "Refiner",
    "build",
    "names",
    "parse",
    "register",
]

register(OffConfig)
register(StaticConfig)
register(RooflineConfig)
register(GoodputConfig)
register(LearnedConfig)
register(OracleConfig)
register(ConcurrencyScheduleConfig)
register(SmartSpecConfig)
register(EmaStepsConfig)
register(ThroughputAwareConfig)
register(BudgetArgmaxConfig)
register(HeuristicConfig)
