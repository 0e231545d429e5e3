"""Which runners are measured in which cases, as --runners and --counters say it."""

from collections.abc import Collection
from dataclasses import dataclass

from .case import Case
from .peers import PEERS, peers_of
from .subject import Runner, holdfast_runners
from .suites import SUITES


@dataclass(frozen=True)
class _Item:
    """name: a runner's, or its first word. text: what the case must say, "" for any. out: whether it is left out."""

    name: str
    text: str
    out: bool

    def names(self, runner: str) -> bool:
        return self.name in (runner, runner.split()[0])


@dataclass(frozen=True)
class Selection:
    """Items such as "holdfast", "fla chunk", "-holdfast reference" (all but it), "flashrnn@B16 T1024" (only in cases
    with that text), parted by commas. A runner is taken if an item names it, or if every item leaves something out, and
    none leaves it out."""

    items: tuple[_Item, ...] = ()

    @staticmethod
    def of(text: str) -> "Selection":
        """From the command line; "" selects everything."""
        items = []
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, _, where = word.removeprefix("-").partition("@")
            items.append(_Item(name.strip(), where.strip(), word.startswith("-")))
        return Selection(tuple(items))

    def takes(self, runner: str, case: Case) -> bool:
        """Whether the runner is to be measured in the case."""
        said = f"{case.label}: {case}"
        matching = [item for item in self.items if item.names(runner) and item.text in said]
        if any(item.out for item in matching):
            return False
        return bool(matching) or all(item.out for item in self.items)

    def check(self, cases: Collection[Case], option: str) -> None:
        """Raises ValueError for a name that is no peer's and none of these cases' backends'.

        What is left out may be a backend of any suite's.
        """
        known = _names(cases)
        anywhere = known | _names([case for suite in SUITES.values() for case in suite.cases()])
        for item in self.items:
            if not any(item.names(name) for name in (anywhere if item.out else known)):
                raise ValueError(
                    f"{option}: expected some of {', '.join(sorted(known))} or their first words; got {item.name!r}"
                )


EVERYTHING = Selection()


def _names(cases: Collection[Case]) -> set[str]:
    """Of the peers and of these cases' backends."""
    return {peer.name for peer in PEERS} | {runner.name for case in cases for runner in holdfast_runners(case)}


def runners_of(case: Case, wanted: Selection = EVERYTHING) -> list[Runner]:
    """Holdfast's backends, then the peers."""
    runners: list[Runner] = [*holdfast_runners(case), *peers_of(case.op)]
    return [runner for runner in runners if wanted.takes(runner.name, case)]
