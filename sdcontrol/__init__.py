"""Turn speculation on and forget it: the text stays the model's, and no fixed setting is faster.

Importing this loads neither torch nor transformers: names that need more than the vocabulary are
loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sdcontrol.core import (
    Backend,
    BatchView,
    Belief,
    Choice,
    Cost,
    Hint,
    Observation,
    Plan,
    Planner,
    RequestView,
    Timing,
)
from sdcontrol.errors import (
    CacheExhausted,
    ConfigError,
    CounterfactualError,
    DrafterFault,
    EngineClosed,
    IntegrityError,
    ObservationError,
    PlanError,
    RequestRefused,
    SdcontrolError,
    TraceError,
    UnknownName,
    UnsupportedGeneration,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from sdcontrol import policies
    from sdcontrol.controller import Controller
    from sdcontrol.engine.loop import Engine
    from sdcontrol.integrations.transformers import SpeculativeDecoder

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BatchView",
    "Belief",
    "CacheExhausted",
    "Choice",
    "ConfigError",
    "Controller",
    "Cost",
    "CounterfactualError",
    "DrafterFault",
    "Engine",
    "EngineClosed",
    "Hint",
    "IntegrityError",
    "Observation",
    "ObservationError",
    "Plan",
    "PlanError",
    "Planner",
    "RequestRefused",
    "RequestView",
    "SdcontrolError",
    "SpeculativeDecoder",
    "Timing",
    "TraceError",
    "UnknownName",
    "UnsupportedGeneration",
    "UnsupportedModel",
    "policies",
]

_LOADED_ON_FIRST_USE = {
    "Controller": "sdcontrol.controller",
    "Engine": "sdcontrol.engine.loop",
    "SpeculativeDecoder": "sdcontrol.integrations.transformers",
}


if not TYPE_CHECKING:  # a type checker is to know the names above, and no others

    def __getattr__(name: str) -> object:
        if name == "policies":
            return import_module("sdcontrol.policies")
        if name not in _LOADED_ON_FIRST_USE:
            raise AttributeError(f"module 'sdcontrol' has no attribute {name!r}")
        value = getattr(import_module(_LOADED_ON_FIRST_USE[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
