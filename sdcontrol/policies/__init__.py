"""What to do, given a belief: one file per policy, its config and its class.

A policy is one file and one line.
"""

from sdcontrol.policies.base import Policy, PolicyConfig, Refiner
from sdcontrol.policies.goodput import GoodputConfig
from sdcontrol.policies.off import OffConfig
from sdcontrol.policies.registry import PolicySpec, build, names, parse, register
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
register(GoodputConfig)
