"""What transformers calls a model's cache: it was `past_key_values` before 5.24.

Knows nothing but names.
"""

import inspect

from transformers import GenerationMixin

__all__ = ["CACHE", "CACHES"]

CACHES = ("cache", "past_key_values")
"""As an argument of models and of `generate`, and in what they return: now, and before."""

_arguments = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = next(name for name in CACHES if name in _arguments)
"""As the version that is installed says."""
