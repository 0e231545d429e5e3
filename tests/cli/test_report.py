"""What training prints where no terminal is, and its sparkline."""

import io

import pytest
from rich.console import Console

from holdfast.cli.report import Report, plain, sparkline


def printed(steps, width=100):
    text = io.StringIO()
    return text, Report(Console(file=text, width=width), steps)


def test_a_sparkline_goes_from_the_least_to_the_largest():
    assert sparkline([0.0, 1.0, 2.0, 3.0, 7.0]) == "▁▂▃▄█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([-2.0, -9.0]) == "█▁"


@pytest.mark.parametrize(
    ("steps", "said"),
    [(3, [1, 2, 3]), (20, range(1, 21)), (50, [1, *range(2, 51, 2)]), (410, [1, *range(20, 401, 20), 410])],
)
def test_about_twenty_lines_the_first_and_the_last_among_them(steps, said):
    text, report = printed(steps)
    with report:
        for step in range(1, steps + 1):
            report.step(step, f"loss {step}")
    assert [line.split()[1] for line in text.getvalue().splitlines()] == [str(step) for step in said]
    assert f"step {steps} of {steps}  loss {steps}" in text.getvalue()
    assert text.getvalue().startswith(f"step {'1':>{len(str(steps))}} of {steps}  loss 1\n")


def test_a_plain_line_has_no_colours_on_a_terminal_either():
    text = io.StringIO()
    plain(Console(file=text, width=20, force_terminal=True, color_system="truecolor"), "[bold] 'a' 12 /b/c" + "x" * 20)
    assert text.getvalue() == "[bold] 'a' 12 /b/c" + "x" * 20 + "\n"


def test_text_is_printed_as_it_is():
    """No markup, no colours, no folding: paths and prompts hold brackets."""
    text, report = printed(1, width=20)
    report.line("[bold]" + "x" * 30)
    report.table(("a", "b"), [("1", "2.5")], title="[i] title")
    report.sample("[red]pro", "mpt[/red]")
    lines = text.getvalue().splitlines()
    assert lines[0] == "[bold]" + "x" * 30
    assert lines[1] == "[i] title"
    assert "[red]prompt[/red]" in lines
    assert any("1" in line and "2.5" in line for line in lines)
