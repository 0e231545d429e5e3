"""What is said of a name that is none of those that there are."""

from collections.abc import Iterable


def no_choice(what: str, choices: Iterable[str], got: object) -> str:
    """The error's text, with the choice that was meant if one is near: names are spelt with _, - or as classes."""
    # used where something is wrong, by commands that are to answer at once
    from difflib import get_close_matches

    by_letters = {_letters(choice): choice for choice in choices}
    near = get_close_matches(_letters(str(got)), by_letters, n=1, cutoff=0.7)
    meant = f"; did you mean {by_letters[near[0]]!r}?" if near else ""
    return f"{what}: expected one of {', '.join(by_letters.values())}; got {got!r}{meant}"


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()
