"""Errors that the user can mend: shown as one line, never as a traceback."""

import errno
import os

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class UserError(Exception):
    """A wrong option, file or machine; its message is one line that says what to do about it."""


def reason(error: OSError) -> str:
    """What the operating system said, without the number and the path that OSError's own text carries."""
    if error.errno in NO_SPACE:
        return f"no space left ({os.strerror(error.errno)})"
    return error.strerror or str(error) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of the error's text, its type where it has none: the rest is PyTorch's advice to programmers."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """The error's text on one line."""
    if isinstance(error, OSError) and error.errno is not None:
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{reason(error)}"
    return " ".join(str(error).split()) or type(error).__name__
