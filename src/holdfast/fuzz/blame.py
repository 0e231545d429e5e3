"""Whose an error is: one that the library raises on purpose, or one from inside."""

import traceback
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def is_ours(error: BaseException | None, may_be_plain: bool = False) -> bool:
    """Whether the library itself raised it, as what it raises on purpose. may_be_plain: a RuntimeError will do."""
    kinds = (ValueError, TypeError, NotImplementedError, *((RuntimeError,) if may_be_plain else ()))
    if not isinstance(error, kinds) or error.__traceback__ is None:
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(last.filename).resolve()
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "fuzz") and "raise" in (last.line or "")


def place(error: BaseException | None) -> str:
    """The innermost line of the library that led to the error."""
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    own = [x for x in frames if Path(x.filename).resolve().is_relative_to(_PACKAGE)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "no line of the library"
