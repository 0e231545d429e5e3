"""What the training commands print: a progress bar on a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
PLAIN_LINES = 20


def sparkline(values: Sequence[float]) -> str:
    """One bar a value, from the least to the largest."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def plain(console: Console, text: str) -> None:
    """A line as it is: nothing of it is taken for markup or coloured, and it is not broken at the console's width."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Report:
    """Shows the steps of one run."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[measured]}"),
                TimeRemainingColumn(compact=True),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
            self._task = self._progress.add_task("training", total=self.steps, measured="")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def line(self, text: str) -> None:
        plain(self.console, text)

    def step(self, step: int, measured: str) -> None:
        """Called after every step; `measured` says how it went."""
        if self._progress:
            self._progress.update(self._task, completed=step, measured=measured)
        elif step == 1 or step % max(1, self.steps // PLAIN_LINES) == 0 or step == self.steps:
            self.line(f"step {step:>{len(str(self.steps))}} of {self.steps}  {measured}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
        if title:
            self.console.print(Text(title, style="bold"))
        table = Table()
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def sample(self, prompt: str, made: str) -> None:
        self.console.rule("sample", style="dim")
        self.console.print(Text(prompt, style="bold") + Text(made))
        self.console.rule(style="dim")
