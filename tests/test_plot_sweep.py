"""Pictures of any columns: what is on the axes is the table, and mistakes are named."""

import numpy as np
import pytest

from moejax import plot, report
from moejax.report import Layout
from moejax.report._pictures import png


def axes():
    return plot.figure()[1][0, 0]


def drawn_lines(ax):
    return {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(
    "name, label",
    [
        ("tbt_ms", "tbt (ms)"),
        ("throughput_per_gpu_tok_s", "throughput per gpu (tok/s)"),
        ("system.gpu.hbm_bandwidth", "system.gpu.hbm bandwidth (B/s)"),
        ("area_mm2", "area (mm²)"),
        ("scheduler_time", "scheduler time (s)"),
        ("flops_per_s", "flops per s (FLOP/s)"),
        ("batch", "batch"),
        ("systems", "systems"),
        ("ms", "ms (ms)"),
    ],
)
def test_the_unit_of_a_column_is_in_its_label(name, label):
    assert plot.label_of(name) == label


def line_table():
    return {
        "batch": np.array([4, 1, 2, 1, 2, 4]),
        "policy": np.array(["sieve"] * 3 + ["mine"] * 3),
        "tbt_ms": np.array([5.0, 2.0, 3.0, 1.0, np.nan, 40.0]),
    }


def test_lines_are_the_table():
    ax = plot.lines(line_table(), axes(), x="batch", y="tbt_ms", by="policy", title="seen")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("batch", "tbt (ms)")
    assert ax.get_title(loc="left") == "seen"
    assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "log")  # 4 : 1 and 40 : 1
    found = {k: np.array(line.get_data()).tolist() for k, line in drawn_lines(ax).items()}
    assert found == {"Sieve": [[1, 2, 4], [2, 3, 5]], "mine": [[1, 4], [1, 40]]}
    assert "1 row without a number left out" in "".join(texts(ax))


def test_policies_keep_their_colors_and_numbers_their_order():
    table = line_table() | {"policy": np.array(["sieve"] * 3 + ["no_exp"] * 3)}
    ax = plot.lines(table, axes(), x="batch", y="tbt_ms", by="policy")
    assert list(drawn_lines(ax)) == ["NoExp", "Sieve"]
    mine = plot.lines(line_table(), axes(), x="batch", y="tbt_ms", by="policy")
    assert drawn_lines(mine)["mine"].get_color() == plot.policy_style("mine").color
    assert drawn_lines(ax)["Sieve"].get_color() == plot.policy_style("sieve").color
    table = line_table() | {"width": np.array([16, 16, 16, 8, 8, 8])}
    ax = plot.lines(table, axes(), x="batch", y="tbt_ms", by="width")
    assert list(drawn_lines(ax)) == ["8", "16"]


def test_intervals_are_shaded():
    table = line_table()
    table |= {"tbt_ms_low": 0.5 * table["tbt_ms"], "tbt_ms_high": 2 * table["tbt_ms"]}
    ax = plot.lines(table, axes(), x="batch", y="tbt_ms", by="policy")
    corners = ax.collections[1].get_paths()[0].vertices  # "mine" is drawn first
    assert {(1.0, 1.0), (1.0, 4.0), (4.0, 2.5), (4.0, 10.0)} <= set(map(tuple, corners.tolist()))
    assert "shaded: 95 % CI" in "".join(texts(ax))


def test_words_along_x_are_dots_in_order_of_appearance():
    table = {"model": ["b", "a", "c"], "tbt_ms": [1.0, 2.0, 3.0]}
    ax = plot.lines(table, axes(), x="model", y="tbt_ms")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["b", "a", "c"]
    assert ax.lines[0].get_linestyle() == "None"


def test_cells_are_the_table():
    table = {"x": [2, 1, 2], "y": ["top", "low", "low"], "t_us": [7.0, 1.0, np.inf]}
    ax = plot.heat_map(table, axes(), x="x", y="y", value="t_us")
    grid = np.asarray(ax.images[0].get_array().filled(np.nan))
    np.testing.assert_array_equal(grid, [[1.0, np.nan], [np.nan, 7.0]])
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["low", "top"]
    assert {"×", "1", "7"} <= set(texts(ax))
    assert ax.figure.axes[1].get_ylabel() == "t (us)"
    even = {"x": [1, 2], "y": [1, 1], "t_us": [3.0, 3.0]}
    assert plot.heat_map(even, axes(), x="x", y="y", value="t_us")


@pytest.mark.parametrize("more, step", [((False, False), "post"), ((True, True), "pre")])
def test_the_front_is_joined_by_what_is_reached(more, step):
    table = {"a": [1.0, 2.0, 2.0, 3.0], "b": [3.0, 2.0, 3.0, 1.0], "front": [1, 1, 0, 1]}
    ax = plot.pareto(table, axes(), x="a", y="b", more=more)
    (line,) = [line for line in ax.lines if line.get_label() == "_front"]
    assert line.get_drawstyle() == f"steps-{step}"
    assert np.array(line.get_data()).tolist() == [[1, 2, 3], [3, 2, 1]]
    arrow = {"post": "↙", "pre": "↗"}[step]
    assert f"{arrow} is better · 3 of 4 on the front" in "".join(texts(ax))


@pytest.mark.parametrize(
    "draw, table, columns, said",
    [
        (plot.lines, line_table(), dict(x="batch", y="tbt"), "did you mean 'tbt_ms'"),
        (plot.lines, line_table(), dict(x="batch", y="policy"), "'policy' holds"),
        (plot.lines, line_table(), dict(x="batch", y="batch"), "allowed are different columns"),
        (plot.lines, line_table(), dict(x="batch", y="tbt_ms"), "2 rows with batch=1"),
        (plot.lines, {"a": [], "b": []}, dict(x="a", y="b"), "the table is empty"),
        (plot.lines, {"a": [1], "b": [1, 2]}, dict(x="a", y="b"), "unequal length"),
        (plot.lines, {"a": [1], "b": [np.nan]}, dict(x="a", y="b"), "no row has finite a and b"),
        (plot.pareto, {"a": [1], "b": [1]}, dict(x="a", y="b"), "no row has front"),
        (plot.pareto, {"a": ["w"], "b": [1]}, dict(x="a", y="b"), "'a' holds text"),
        (
            plot.heat_map, {"a": [1, 1], "b": [1, 1], "c": [1, 2]}, dict(x="a", y="b", value="c"),
            "2 rows with a=1, b=1",
        ),
        (plot.heat_map, {"a": [1], "b": [1]}, dict(x="a", y="b", value="b"), "three columns"),
        (
            plot.heat_map, {"a": [1], "b": [1], "c": [np.nan]}, dict(x="a", y="b", value="c"),
            "no row has a finite c",
        ),
    ],
)  # fmt: skip
def test_tables_that_can_not_be_drawn(draw, table, columns, said):
    with pytest.raises(ValueError, match=said):
        draw(table, axes(), **columns)


def sweep_rows():
    """Two models, three batches, two seeds; the second model runs on a system of its own."""
    model, batch, seed = (
        x.ravel() for x in np.meshgrid(["m", "n"], [1, 2, 4], [0, 1], indexing="ij")
    )
    batch, seed = batch.astype(int), seed.astype(int)
    system = np.where(model == "m", "one", "two")
    table = dict(model=model, system=system, batch=batch, seed=seed, tbt_ms=batch + 2.0 * seed)
    return report.rows_of(table, ("model", "system", "batch", "seed"))


def test_means_and_intervals_over_seeds():
    figure = report.draw(
        sweep_rows(), Layout("line", "batch", "tbt_ms", "model"), ["seed", "system"]
    )
    (ax,) = figure.axes
    for line in drawn_lines(ax).values():
        np.testing.assert_allclose(line.get_ydata(), [2, 3, 5])
    # Two values that differ by 2: half of the interval is 12.706, from the table of Student's t.
    top = max(corner[1] for corner in ax.collections[0].get_paths()[0].vertices)
    assert top == pytest.approx(5 + 12.706, rel=1e-4)


def test_what_is_neither_drawn_nor_averaged_is_refused():
    rows = sweep_rows()
    with pytest.raises(ValueError, match="rows of one point differ in model .m, n, ....: choose"):
        report.draw(rows, Layout("line", "batch", "tbt_ms"), ["seed"])
    with pytest.raises(ValueError, match="differ in seed"):
        report.draw(rows, Layout("line", "batch", "tbt_ms", "model"))
    # The system goes with the model, and differs in no point.
    assert report.draw(rows, Layout("line", "batch", "tbt_ms", "model"), ["seed"])
    panels = report.draw(rows, Layout("line", "batch", "tbt_ms", panel="model"), ["seed"])
    assert [ax.get_title(loc="left") for ax in panels.axes] == ["m", "n"]
    many = report.rows_of({"k": np.arange(13), "x": np.zeros(13), "y": np.ones(13)}, ("k", "x"))
    with pytest.raises(ValueError, match="--by k: 13 values, at most 12 are drawn"):
        report.draw(many, Layout("line", "x", "y", "k"))


def test_a_picture_is_chosen():
    rows = sweep_rows()
    layout = report.choose(rows, ["seed"])
    assert (layout.x, layout.y, layout.by, layout.panel) == ("batch", "tbt_ms", "model", "system")
    narrow, fixed = report.narrowed(rows, Layout("line", "batch", "tbt_ms"), ["seed"])
    assert fixed == {"model": "m"} and set(narrow["system"]) == {"one"}
    assert report.choose(report.rows_of({"x": [1.0]}, ("x",))) is None


def test_a_front_of_means():
    rows = sweep_rows().with_column("rate_tok_s", 1.0 / sweep_rows()["batch"])
    layout = Layout("pareto", "tbt_ms", "rate_tok_s", "model", maximize=("rate_tok_s",))
    (ax,) = report.draw(rows, layout, ["seed"]).axes
    assert "↖ is better · 2 of 6 on the front" in "".join(texts(ax))
    again = report.draw(rows, layout, ["seed"])
    assert png(ax.figure, dpi=40) == png(again, dpi=40)
