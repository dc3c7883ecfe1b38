"""From what a user names to drafters.

"ngram"    "sparse_kv:512"    "sparse_kv:2048:scored"    a model    a Drafter
{"small": model, "ngram": "ngram"}
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from sdcontrol.core import family_of
from sdcontrol.engine.drafters.base import Drafter
from sdcontrol.engine.drafters.draft_model import DraftModelDrafter
from sdcontrol.engine.drafters.ngram import NgramDrafter
from sdcontrol.engine.drafters.sparse_kv import FAMILY, SparseArm, SparseKVDrafter
from sdcontrol.errors import ConfigError, UnknownName

__all__ = ["DrafterSpec", "DrafterSpecs", "allowed_families", "build_drafters", "named_drafters"]

DrafterSpec = str | Drafter | PreTrainedModel
DrafterSpecs = DrafterSpec | Sequence[DrafterSpec] | Mapping[str, DrafterSpec]
_TREE_BRANCHES = 2


def named_drafters(specs: DrafterSpecs) -> list[tuple[str, DrafterSpec]]:
    """Drafters under the names that they were given, "" where none was; one alone is a list of one.

    Raises `ConfigError` for what is neither a drafter nor several.
    """
    if isinstance(specs, Mapping):
        return list(specs.items())
    if isinstance(specs, (str, Drafter, nn.Module)):
        return [("", specs)]
    if not isinstance(specs, Iterable):
        raise ConfigError(
            f"drafters={specs!r} are no drafters; give a list of names, models and Drafters, "
            "[] for none"
        )
    return [("", spec) for spec in specs]


def build_drafters(specs: DrafterSpecs, *, allow_trees: bool) -> list[Drafter]:
    """One drafter per family; raises `UnknownName` or `ConfigError`.

    All budgets of `sparse_kv` become one drafter. Without `allow_trees` the n-gram drafter makes
    chains only.
    """
    named = named_drafters(specs)
    budgets = [spec for _, spec in named if isinstance(spec, str) and spec.startswith(FAMILY)]
    for name, spec in named:
        if spec in budgets and name not in ("", FAMILY, spec):
            raise ConfigError(
                f"drafter {spec!r} stands under the name {name!r}; its name says its budget, give it that"
            )
    drafters = [
        _build(name, spec, allow_trees)
        for name, spec in named
        if not (isinstance(spec, str) and spec in budgets)
    ]
    if budgets:
        drafters.append(SparseKVDrafter([SparseArm.parse(str(name)) for name in budgets]))
    return drafters


def allowed_families(speculation: bool | Sequence[str], families: Sequence[str]) -> frozenset[str]:
    """Those that a request may use: all, none, or those named, one alone too; raises `ConfigError`."""
    if isinstance(speculation, bool | np.bool_):
        return frozenset(families if speculation else ())
    names = (speculation,) if isinstance(speculation, str) else speculation
    if not isinstance(names, Iterable):
        raise ConfigError(f"speculation={speculation!r}; give True, False, or drafters in a list")
    named = {*map(family_of, names)}
    if unknown := named - set(families):
        raise ConfigError(f"unknown drafters {sorted(unknown)}; there are {[*families]}")
    return frozenset(named)


def _build(name: str, spec: DrafterSpec, allow_trees: bool) -> Drafter:
    if isinstance(spec, Drafter):
        if name and name != spec.name:
            raise ConfigError(f"drafter {spec.name!r} stands under the name {name!r}; rename one")
        return spec
    if isinstance(spec, str):
        if spec != "ngram":
            raise UnknownName(
                f"no drafter is called {spec!r}; use 'ngram', 'sparse_kv:<tokens>', "
                "a model object or a Drafter"
            )
        return NgramDrafter(name=name or spec, max_branches=_TREE_BRANCHES if allow_trees else 1)
    return DraftModelDrafter(spec, name=name or "draft_model")
