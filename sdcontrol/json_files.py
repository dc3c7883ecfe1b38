"""Values in JSON files: read, or refused in one line that says what is wrong, and where.

Knows files and pydantic models; nothing of what the values mean.
"""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from sdcontrol.errors import ConfigError

__all__ = ["read_model"]

_Model = TypeVar("_Model", bound=BaseModel)


def read_model(path: Path, kind: type[_Model], *, what: str, remedy: str) -> _Model:
    """The value in the file. `what` names it to people, `remedy` says how to get one.

    Raises `ConfigError` where the file cannot be read, is no text, or holds something else.
    """
    try:
        return kind.model_validate_json(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error.reason}; {remedy}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        message = f"{path} is no {what}: {where}: {first['msg']}; {remedy}"
        raise ConfigError(message) from error
