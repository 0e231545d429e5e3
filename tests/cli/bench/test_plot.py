"""What a reader sees of the figures: axes, ticks, labels and legends of what matplotlib really draws."""

from dataclasses import replace

import pytest

from holdfast.cli.bench import figure, plot
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.figure import look
from holdfast.cli.bench.groups import groups
from holdfast.cli.bench.result import of_case
from holdfast.cli.bench.roofs import Roofs

ROOF = Roofs(copy_bandwidth=4e12, rates={"bfloat16": 8e14, "float32": 5e13}, copy_bytes=1, matrix_size=1)
OURS, THEIRS = "holdfast triton", "fla chunk"


@pytest.fixture
def painted(monkeypatch):
    """The axes of each figure in turn, as the page has them."""
    pytest.importorskip("matplotlib")
    found = []

    def svg(paint, salt, **options):
        return figure.svg(lambda whole, axes: paint(whole, axes) or found.append(axes), salt, **options)

    monkeypatch.setattr(plot, "svg", svg)
    return found


def row(runner=OURS, ms=2.0, T=16, **figures):
    case = Case("gla", (("B", 1), ("T", T), ("H", 1), ("K", 8), ("V", 8)), "bfloat16", "fwd+bwd")
    taken = {"low_ms": 0.9 * ms, "high_ms": 1.1 * ms} if ms else {}
    return replace(of_case(case, runner, "ok"), median_ms=ms, **taken | figures)


def check_frame(axes, x, y):
    """Both axes named, two sides of a frame, a faint grid thinner than what was drawn, and a legend at the right."""
    assert (axes.get_xlabel(), axes.get_ylabel()) == (x, y)
    legend = axes.get_legend()
    assert not legend.get_frame_on()
    assert legend.get_window_extent().x0 > axes.get_window_extent().x1
    drawn = [line.get_linewidth() for line in axes.lines if line.get_linestyle() != "None"]
    for axis in (axes.xaxis, axes.yaxis):
        for line in axis.get_gridlines():
            assert (line.get_visible(), 0 < line.get_alpha() < 0.5) == (True, True)
            assert 0 < line.get_linewidth() < min(drawn) <= max(drawn) < 2
    assert {side for side, spine in axes.spines.items() if spine.get_visible()} == {"left", "bottom"}
    assert all(0 < spine.get_linewidth() < min(drawn) for spine in axes.spines.values())


def test_with_matplotlib_there_are_plots():
    pytest.importorskip("matplotlib")
    assert figure.can_plot()


def test_time_against_size(painted):
    rows = [row(ms=T / 8, T=T, floor_ms=T / 32) for T in (4096, 16, 1000)]
    (group,) = groups([*rows, row(THEIRS, 3.0), row(THEIRS, 5.0, 1000), row(THEIRS, None, 64)])
    plot.draw(group, [THEIRS, OURS], "s")
    (axes,) = painted
    check_frame(axes, "steps T", "milliseconds")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    # a tick where something was measured, in whole numbers
    assert list(axes.get_xticks()) == [16, 1000, 4096]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["16", "1000", "4096"]
    assert list(axes.get_xticks(minor=True)) == list(axes.get_yticks(minor=True)) == []
    assert "10" in [label.get_text() for label in axes.get_yticklabels()]
    assert len([y for y in axes.get_yticks() if 0.5 <= y <= 512]) <= 7
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [THEIRS, OURS, "floor"]
    theirs, ours, floor = axes.lines
    assert (list(theirs.get_xdata()), list(theirs.get_ydata())) == ([16, 1000], [3.0, 5.0])
    assert (list(ours.get_ydata()), list(floor.get_ydata())) == ([2.0, 125.0, 512.0], [0.5, 31.25, 128.0])
    assert (ours.get_color(), ours.get_marker()) == tuple(look(OURS, [THEIRS, OURS]).values())
    # what was measured stands out from the floor
    assert floor.get_linewidth() < ours.get_linewidth()
    assert (floor.is_dashed(), ours.is_dashed(), floor.get_marker()) == (True, False, "None")
    # the quartiles show through, in the runner's colour
    assert len(axes.collections) == 2
    assert all(0 < band.get_alpha() < 0.5 for band in axes.collections)


def test_small_sizes_have_three_digits_and_a_plot_of_bytes_says_so(painted):
    sizes = ({"B": 1, "T": 16}, {"B": 2, "T": 16}, {"B": 2, "T": 32})
    rows = [replace(row(floor_bytes=2**20 * n // 3), sizes=row().sizes | each) for n, each in enumerate(sizes, 1)]
    (group,) = groups(rows)
    plot.draw(group, [OURS], "s")
    check_frame(painted[0], "MiB that must move", "milliseconds")
    assert [label.get_text() for label in painted[0].get_xticklabels()] == ["0.333", "0.667", "1"]
    # nothing says what the least would be
    assert [text.get_text() for text in painted[0].get_legend().get_texts()] == [OURS]


def test_a_roofline(painted):
    counted = row(ms=1.0, operations=10**12, floor_bytes=10**9, dram_bytes=2 * 10**9)
    hollow = row(THEIRS, 2.0, operations=10**12, floor_bytes=4 * 10**12)
    both = [replace(each, runner="mixed") for each in (counted, hollow)]
    plot.roofline([counted, hollow, *both], ROOF, [OURS, THEIRS, "mixed", "nobody"], "s")
    (axes,) = painted
    check_frame(axes, "operations a byte", "10¹² operations a second")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    # each runner once, also where only some of its rows were counted
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [OURS, THEIRS, "mixed"]
    # higher than the others, for the legend and the slope
    assert 3.6 < axes.figure.get_figheight() < 5
    markers, roofs = axes.lines[:4], axes.lines[4:]
    assert [line.get_markerfacecolor() == "none" for line in markers] == [False, True, False, True]
    assert all(line.get_linestyle() == "None" for line in markers)
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in markers] == [(500, 1000), (0.25, 500)] * 2
    # from half of what lies furthest left, where the copy bandwidth allows 4 x 10^12 operations a second for each
    assert list(zip(*roofs[0].get_data(), strict=True)) == [(0.125, 0.5), (200, 800)]
    assert [tuple(line.get_xdata()) for line in roofs[1:]] == [(200, 1000), (12.5, 1000)]
    said = {text.get_text(): text for text in axes.texts}
    assert sorted(said) == ["bfloat16 product", "copy bandwidth", "float32 product"]
    # the words stand on their lines: at the right end, and just behind the left one
    assert said["float32 product"].xy == (1000, 50)
    assert said["float32 product"].get_window_extent().x1 <= axes.transData.transform((1000, 50))[0]
    assert said["float32 product"].get_window_extent().y0 > axes.transData.transform((1000, 50))[1] - 1
    x, y = said["copy bandwidth"].xy
    assert y == pytest.approx(4 * x)
    assert 0.125 < x < 0.2
    assert 0 < said["copy bandwidth"].get_rotation() < 90
    assert "100" in [label.get_text() for label in axes.get_xticklabels()]
    assert list(axes.get_xticks(minor=True)) == list(axes.get_yticks(minor=True)) == []


def test_a_roofline_reaches_past_what_lies_furthest_right_and_to_the_left_of_one(painted):
    plot.roofline([row(ms=1.0, operations=10**12, floor_bytes=10**8)], ROOF, [OURS], "s")
    roofs = painted[0].lines[1:]
    assert [tuple(line.get_xdata()) for line in roofs] == [(0.5, 200), (200, 20000), (12.5, 20000)]


@pytest.mark.parametrize(
    "lacks", [{"kind": "host"}, {"median_ms": None}, {"operations": None}, {"floor_bytes": None}], ids=str
)
def test_a_row_that_lacks_something_has_no_place_in_a_roofline(lacks):
    whole = row(operations=1, floor_bytes=1)
    assert plot.roofline_rows([whole, replace(whole, **lacks)]) == [whole]


def test_error_over_the_steps(painted):
    errors = {"50": [0.1, 0.2, 0.3], "90": [0.2, 0.3, 0.4], "100": [0.3, 0.4, 0.5]}
    plot.error_plot([row(step_errors=errors), row(THEIRS)], [OURS, THEIRS], "s")
    (axes,) = painted
    check_frame(axes, "step", "absolute error")
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "log")
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said == [f"{OURS}, 50%", f"{OURS}, 90%", f"{OURS}, largest"]
    assert [line.is_dashed() for line in axes.lines] == [True, True, False]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2, 3]] * 3
    assert {line.get_color() for line in axes.lines} == {look(OURS, [OURS, THEIRS])["color"]}


@pytest.fixture
def styles(painted, monkeypatch):
    """What each call that draws is told, but for colours, markers and labels."""
    from matplotlib.axes import Axes

    told = []
    for name in ("plot", "fill_between", "annotate", "legend"):
        draws = getattr(Axes, name)

        def noted(axes, *given, _name=name, _draws=draws, **style):
            kept = {key: x for key, x in style.items() if key not in ("color", "marker", "label", "mfc")}
            told.append((_name, *given[2:], kept))
            return _draws(axes, *given, **style)

        monkeypatch.setattr(Axes, name, noted)
    return told


LEGEND = ("legend", {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "frameon": False})


def test_the_look_of_time_against_size(styles):
    (group,) = groups([row(T=16, floor_ms=1.0), row(T=32, floor_ms=1.0)])
    plot.draw(group, [OURS], "s")
    assert styles == [
        ("fill_between", [2.2, 2.2], {"alpha": 0.2, "lw": 0}),
        ("plot", {"ms": 5, "lw": 1.6}),
        ("plot", {"ls": (0, (4, 3)), "lw": 1.2}),
        LEGEND,
    ]


def test_the_look_of_a_roofline(styles, painted):
    plot.roofline([row(operations=10**12, floor_bytes=10**9)], replace(ROOF, rates={"bfloat16": 8e14}), [OURS], "s")
    assert styles == [
        ("plot", {"ls": "", "ms": 5.5}),
        ("plot", {"lw": 1.2}),
        ("plot", {"lw": 1.2}),
        ("annotate", (-2, 3), {"textcoords": "offset points", "ha": "right"}),
        ("annotate", (0, 6), {"textcoords": "offset points", "rotation": 28}),
        LEGEND,
    ]
    x, y = next(text.xy for text in painted[0].texts if text.get_text() == "copy bandwidth")
    assert (x, y) == pytest.approx((0.6, 2.4))
    assert [*painted[0].figure.get_size_inches()] == [8.2, 4.2]


def test_the_look_of_errors(styles, painted):
    plot.error_plot([row(step_errors={"50": [0.1], "90": [0.2], "100": [0.3], "10": [0.1]})], [OURS], "s")
    dashes = [(0, (1, 2)), (0, (4, 2)), "-", "-"]
    assert styles == [*(("plot", {"ls": each, "lw": 1.2}) for each in dashes), LEGEND]
    assert [*painted[0].figure.get_size_inches()] == [8.2, 3.6]


def test_the_style_of_a_page():
    assert {name: x for name, x in figure._STYLE.items() if not isinstance(x, str)} == {
        "font.size": 10, "axes.linewidth": 0.6, "grid.alpha": 0.15, "axes.spines.top": False,
        "axes.spines.right": False,
    }  # fmt: skip


def test_of_thirty_runners_no_two_look_alike():
    names = [str(n) for n in range(30)]
    looks = [tuple(look(name, names).values()) for name in names]
    assert len(set(looks)) == 30
    assert [looks[n][1] for n in (0, 1, 9, 10, 20)] == ["o", "s", "*", "^", "X"]
    assert [looks[n][0] for n in (10, 19, 20)] == [looks[n][0] for n in (0, 9, 0)]
