"""An error in words."""


def one_line(error: BaseException) -> str:
    """Type and text of an error, on one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
