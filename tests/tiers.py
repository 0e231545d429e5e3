"""The two tiers of the suite: what `make test` runs, and the slow tests, which it leaves to `make test-all`.

A test is slow if it bears the mark `slow`, or by its name: in the folders of the families of kernels, what says that
something compiles. The mark is for what takes more than some three seconds of one core, where smaller cases of the
same do without it.
"""

import re

SLOW_BY_NAME = re.compile(r"kernels/(dense|diagonal|matrix)/.*::test_(.*_)?compiles?(_.*)?")


def is_slow_by_name(test: str) -> bool:
    """test: the node id, from the folder of the tests on, without parameters."""
    return SLOW_BY_NAME.fullmatch(test) is not None


def line_of_what_is_left(count: int) -> str:
    return f"{count} slow tests are left to make test-all: compiled kernels, long runs of emulators, whole models."
