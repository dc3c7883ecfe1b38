"""From a name, a shorthand, a mapping or a config model to a policy.

Knows the policies by their configs only; a config's `kind` is the policy's name.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, SerializeAsAny, ValidationError
from pydantic.fields import FieldInfo

from sdcontrol.errors import ConfigError, UnknownName
from sdcontrol.policies.base import Policy, PolicyConfig

__all__ = ["PolicySpec", "build", "names", "parse", "register"]

_Config = TypeVar("_Config", bound=PolicyConfig)
_CONFIGS: dict[str, type[PolicyConfig]] = {}


def register(config: type[_Config]) -> type[_Config]:
    """Make a policy known by its config's `kind`. Usable as a decorator.

    Raises `ConfigError` for what is no config, and where `kind` has no default or is taken by another config.
    """
    if not (isinstance(config, type) and issubclass(config, PolicyConfig)):
        raise ConfigError(
            f"{config!r} cannot be registered; give a subclass of sdcontrol.policies.PolicyConfig, whose "
            "build() returns the policy"
        )
    fields: Mapping[str, FieldInfo] = config.model_fields
    field = fields.get("kind")
    kind = None if field is None else field.default
    if not isinstance(kind, str):
        raise ConfigError(
            f'{config.__name__} has no kind; add a field such as kind: Literal["mine"] = "mine"'
        )
    if _CONFIGS.get(kind, config) is not config:
        raise ConfigError(f"policy name {kind!r} is taken by {_CONFIGS[kind].__name__}; rename one")
    _CONFIGS[kind] = config
    return config


def names() -> tuple[str, ...]:
    """The names of all policies, in alphabetical order."""
    return tuple(sorted(_CONFIGS))


def build(spec: "str | Mapping[str, object] | PolicyConfig") -> Policy:
    """The policy meant by `spec`, in its initial state.

    `spec` is a name ("goodput"), a shorthand ("static:ngram:4"), a mapping with "kind", or a
    config model. Raises `UnknownName` for a name, `ConfigError` for a setting that does not exist
    or cannot have its value; both name the nearest valid one.
    """
    return parse(spec).build()


def parse(spec: "str | Mapping[str, object] | PolicyConfig") -> PolicyConfig:
    """The validated config meant by `spec`; see `build`."""
    if isinstance(spec, PolicyConfig):
        return spec
    if isinstance(spec, str):
        kind, colon, text = spec.partition(":")
        config = _config(kind)
        return _validate(config, config.from_text(text) if colon else {})
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f"policy given as {type(spec).__name__}: use a name, a mapping or a config model; one of your own "
            "is a subclass of sdcontrol.policies.Policy"
        )
    settings = dict(spec)
    kind_given = settings.pop("kind", None)
    if not isinstance(kind_given, str):
        raise ConfigError(f'policy {dict(spec)!r} has no "kind"; it is one of {list(names())}')
    return _validate(_config(kind_given), settings)


PolicySpec = Annotated[SerializeAsAny[PolicyConfig], BeforeValidator(parse)]
"""The type of a policy field in another pydantic model: accepts all that `build` accepts."""


def _config(kind: str) -> type[PolicyConfig]:
    if kind not in _CONFIGS:
        fixed = "; a drafter with a fixed number of tokens is static:DRAFTER:TOKENS"
        raise UnknownName(f"no policy is called {kind!r}; {_nearest(kind, names())}{fixed}")
    return _CONFIGS[kind]


def _validate(config: type[PolicyConfig], settings: Mapping[str, object]) -> PolicyConfig:
    known = [name for name in config.model_fields if name != "kind"]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"{config.__name__} has no setting {name!r}; {_nearest(str(name), known)}"
            )
    try:
        return config.model_validate(dict(settings))
    except ValidationError as error:
        raise ConfigError(_told(config, error)) from error


def _nearest(name: str, valid: Iterable[str]) -> str:
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return f"did you mean {close[0]!r}? Valid: {valid}" if close else "it has none"


def _told(config: type[PolicyConfig], error: ValidationError) -> str:
    """Which settings are missing, and how to give them; or what is wrong with those given."""
    items = error.errors(include_url=False)
    absent = [str(item["loc"][0]) for item in items if item["type"] == "missing"]
    if absent:
        kind = config.model_fields["kind"].default
        example = f", as in {config.example}" if config.example else ""
        return f"policy {kind!r} needs {' and '.join(absent)}{example}"
    told = [
        f"{'.'.join(map(str, item['loc'])) or 'settings'}={item['input']!r}: {item['msg']}"
        for item in items
    ]
    return f"{config.__name__}: {'; '.join(told)}"
