"""Whose own code or scores made a step fail, where that is known.

A criterion or a processor that raises, or scores that nothing can be sampled from, are of one request; the
others of its step have no part in it. Knows errors alone.
"""

__all__ = ["blame", "blamed"]

_ATTRIBUTE = "_sdcontrol_blamed"


def blame(error: Exception, who: object) -> None:
    """Note whose fault it is: a request, or its sampler."""
    setattr(error, _ATTRIBUTE, who)


def blamed(error: Exception) -> object | None:
    """Whom `blame` named last."""
    who: object | None = getattr(error, _ATTRIBUTE, None)
    return who
