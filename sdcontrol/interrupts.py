"""What an interrupt becomes on its way through compiled code. Knows nothing of who is interrupted."""

__all__ = ["raise_interrupt"]


def raise_interrupt(error: BaseException) -> None:
    """Raise the interrupt that `error` stands for, if it does: within compiled code it becomes `SystemError`.

    For whoever handles any `Exception`, and would take a user's Ctrl-C for a fault of what was called.
    """
    cause: BaseException | None = error
    while isinstance(cause, SystemError):
        cause = cause.__cause__
    if not (cause is None or isinstance(cause, Exception)):
        raise cause
