"""What a user says of policies, drafters and settings, as an engine needs it.

Knows names and configs; nothing of models, tokens or text.
"""

import difflib
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from sdcontrol.controller import Controller
from sdcontrol.core import Planner, family_of
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.base import Drafter
from sdcontrol.engine.drafters.build import DrafterSpecs, named_drafters
from sdcontrol.engine.drafters.sparse_kv import FAMILY as SPARSE_KV
from sdcontrol.errors import ConfigError, UnknownName
from sdcontrol.outcomes import DEPTH
from sdcontrol.policies import Policy, PolicyConfig, parse

__all__ = ["PolicyLike", "arms_of", "check_policy_drafter", "engine_config", "planner_of"]

PolicyLike = str | Mapping[str, object] | PolicyConfig | Policy | Planner
"""A name, a mapping with `kind`, a config, a policy, or any planner."""


def planner_of(policy: PolicyLike, max_draft_tokens: int = DEPTH) -> Planner:
    """The planner itself, or a controller with this policy; raises `UnknownName`, `ConfigError`."""
    if isinstance(policy, (str, Mapping, PolicyConfig, Policy)):
        return Controller(policy, max_draft_tokens=max_draft_tokens)
    if isinstance(policy, type) or not (hasattr(policy, "plan") and hasattr(policy, "observe")):
        raise ConfigError(
            f'policy={policy!r} is no policy; give a name ("off" for no drafts), a mapping, a policy, or an '
            "object with plan and observe"
        )
    return policy


def arms_of(drafters: DrafterSpecs) -> list[str]:
    """The names under which a policy may choose these drafters."""
    arms: list[str] = []
    for name, drafter in named_drafters(drafters):
        if isinstance(drafter, Drafter):
            arms.extend(drafter.arms)
        elif isinstance(drafter, str):
            arms.append(drafter if family_of(drafter) == SPARSE_KV else name or drafter)
        else:
            arms.append(name or "draft_model")
    return arms


def check_policy_drafter(policy: PolicyLike, arms: Iterable[str]) -> None:
    """Raise `UnknownName` where a policy that names its drafter names one that is not there.

    Such a policy would never draft, and nobody would be told.
    """
    settings = parse(policy) if isinstance(policy, (str, Mapping)) else policy
    drafter = getattr(settings, "drafter", None)
    valid = sorted(arms)
    if not isinstance(drafter, str) or drafter in valid:
        return
    close = difflib.get_close_matches(drafter, valid, n=1, cutoff=0.0)
    nearest = f"did you mean {close[0]!r}? There are {valid}" if close else "there are none"
    raise UnknownName(f"the policy drafts with {drafter!r}, which is not configured; {nearest}")


def engine_config(settings: Mapping[str, object]) -> EngineConfig:
    """Settings of an engine; raises `ConfigError` for an unknown key or an impossible value."""
    known = sorted(EngineConfig.model_fields)
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(f"no engine setting {name!r}; did you mean {close[0]!r}? {known}")
    try:
        return EngineConfig.model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{first['loc'][0]}={first['input']!r}: {first['msg']}") from error
