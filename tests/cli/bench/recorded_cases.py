"""The cases of every suite, on record, so that a change of one is seen: records of a suite compare by them.

    PYTHONPATH=src:tests python -m cli.bench.recorded_cases

writes tests/cli/bench/cases.txt anew.
"""

from pathlib import Path

from holdfast.cli.bench.suites import SUITES

CASES = Path(__file__).with_name("cases.txt")


def lines() -> list[str]:
    """A suite and a case each, in the order in which they run."""
    return [f"{name}: {case}; {case.kind}; {case.label}" for name, suite in SUITES.items() for case in suite.cases()]


if __name__ == "__main__":
    CASES.write_text("\n".join(lines()) + "\n", encoding="utf-8")
