"""Every error that sdcontrol raises on purpose.

    SdcontrolError
    ├── ConfigError             a setting, argument or name that cannot be used
    │   └── UnknownName         a policy, drafter or model name that does not exist
    ├── PlanError               a plan that does not fit its view
    ├── ObservationError        an observation that does not fit its view
    ├── UnsupportedModel        a model feature that the attention path cannot honour
    ├── UnsupportedGeneration   a generation setting that cannot be honoured
    ├── RequestRefused          a request that can never run, or whose id is taken
    ├── CacheExhausted          the block pool cannot hold what was asked of it
    ├── IntegrityError          the block pool's books do not balance: a bug in sdcontrol
    ├── DrafterFault            a drafter raised or returned nonsense
    ├── EngineClosed            the engine was used after it was closed
    ├── TraceError              a trace that cannot be read
    └── CounterfactualError     a recorded trace that cannot answer a plan never made

A message gives what, the value, the limit and the remedy.
"""

__all__ = [
    "CacheExhausted",
    "ConfigError",
    "CounterfactualError",
    "DrafterFault",
    "EngineClosed",
    "IntegrityError",
    "ObservationError",
    "PlanError",
    "RequestRefused",
    "SdcontrolError",
    "TraceError",
    "UnknownName",
    "UnsupportedGeneration",
    "UnsupportedModel",
]


class SdcontrolError(Exception):
    """Base of every error that sdcontrol raises on purpose."""


class ConfigError(SdcontrolError, ValueError):
    """A setting, argument or name cannot be used."""


class UnknownName(ConfigError):
    """A policy, drafter or model name does not exist."""


class PlanError(SdcontrolError, ValueError):
    """A plan does not fit its view."""


class ObservationError(SdcontrolError, ValueError):
    """An observation does not fit its view."""


class UnsupportedModel(SdcontrolError, ValueError):
    """The attention path cannot honour a feature of the model."""


class UnsupportedGeneration(SdcontrolError, ValueError):
    """A generation setting cannot be honoured."""


class RequestRefused(SdcontrolError, ValueError):
    """A request can never run, or its id is taken."""


class CacheExhausted(SdcontrolError, RuntimeError):
    """The block pool cannot hold what was asked of it."""


class IntegrityError(SdcontrolError, RuntimeError):
    """The block pool's books do not balance: a bug in sdcontrol."""


class DrafterFault(SdcontrolError, RuntimeError):
    """A drafter raised or returned nonsense."""


class EngineClosed(SdcontrolError, RuntimeError):
    """The engine was used after it was closed."""


class TraceError(SdcontrolError, ValueError):
    """A trace cannot be read."""


class CounterfactualError(SdcontrolError, LookupError):
    """A recorded trace cannot answer a plan that was never made."""
