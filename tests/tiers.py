"""The two tiers of the suite: what `make test` runs, and the slow tests, which it leaves to `make test-all`.

A test is slow if it bears the mark `slow`, or by its name: in the folders of the families of kernels, what says that
something compiles. The mark is for what takes more than some three seconds of one core, where smaller cases of the
same do without it.

`make newest-triton` compiles for sm_90 alone, and of cases that differ in what the mark `sizes` names, the first: of
another Triton the tests bound no spills, and ask whether it takes each kernel. What it leaves bears `one_triton`.
"""

import re
from collections.abc import Mapping
from typing import Any

_ROOMS = r"chunk|conv|dense|diagonal|layer_step|lib|log_gate|lru|matrix|norm|rotary|selective|soft_cap|ssd_\w+"
SLOW_BY_NAME = re.compile(rf"kernels/({_ROOMS})/.*::test_(.*_)?compiles?(_.*)?")


def is_slow_by_name(test: str) -> bool:
    """test: the node id, from the folder of the tests on, without parameters."""
    return SLOW_BY_NAME.fullmatch(test) is not None


class OneTriton:
    """Which cases of tests, asked for in the order that they are collected, a second Triton need not compile."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def has(self, test: str, arguments: Mapping[str, Any], sizes: tuple[str, ...]) -> bool:
        """test: without parameters, which are the arguments. sizes: names of those that choose no other kernel."""
        if arguments.get("capability", arguments.get("target", 90)) != 90:
            return True
        case = test, repr({name: value for name, value in sorted(arguments.items()) if name not in sizes})
        is_known = case in self._seen
        self._seen.add(case)
        return bool(sizes) and is_known


def line_of_what_is_left(count: int) -> str:
    return f"{count} slow tests are left to make test-all: compiled kernels, long runs of emulators, whole models."
