"""Pictures of placements say what their tables say; what cannot be drawn is an error by name."""

import numpy as np
import pytest

import moejax.plot as mp


pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install moejax[plots]")


def loads():
    return {"node": [2, 0, 1], "comp_us": [4.0, 1.0, 1.0], "comm_us": [0.5, 1.5, 1.0]}


def shares():
    return {"expert": [0, 1, 1, 3], "node": [2, 0, 1, 0], "share": [1.0, 0.25, 0.75, 1.0]}


def course():
    # Steps are out of order on purpose.
    return {
        "search": ["b", "b", "a", "a", "a"],
        "step": [2, 1, 1, 2, 3],
        "total_us": [7.0, 9.0, 8.0, 6.0, 5.0],
        "bound_us": [6.5, 6.5, 4.0, 4.0, 4.0],
    }


TABLES = {"node_loads": loads, "expert_shares": shares, "convergence": course}
LABELS = {
    "node_loads": ("Node", "Time (us)"),
    "expert_shares": ("Node", "Expert"),
    "convergence": ("Step", "Time (us)"),
}
every_figure = pytest.mark.parametrize("name", TABLES)


def draw(name, table, **options):
    return getattr(mp, name)(table, mp.figure()[1][0, 0], **options)


def texts(ax):
    return " | ".join(text.get_text() for text in ax.texts)


@every_figure
def test_title_and_units(name):
    ax = draw(name, TABLES[name](), title="What is seen")
    assert ax.get_title(loc="left") == "What is seen"
    assert (ax.get_xlabel(), ax.get_ylabel()) == LABELS[name]


@every_figure
def test_can_be_saved(name, tmp_path):
    fig, axes = mp.figure()
    getattr(mp, name)(TABLES[name](), axes[0, 0])
    path = mp.save(fig, tmp_path / "picture.png", dpi=50)
    assert path.read_bytes().startswith(b"\x89PNG")


@every_figure
def test_missing_column_is_named(name):
    table = TABLES[name]()
    for column in {"node_loads": ["comp_us"], "convergence": ["step"]}.get(name, list(table)):
        rest = {key: values for key, values in table.items() if key != column}
        with pytest.raises(ValueError, match=f"{name}: no column '{column}'"):
            draw(name, rest)


@every_figure
def test_two_rows_of_one_place(name):
    twice = {column: [*values, values[0]] for column, values in TABLES[name]().items()}
    with pytest.raises(ValueError, match=f"{name}: 2 rows with"):
        draw(name, twice)


def test_loads_go_up_and_down_and_the_longest_are_marked():
    ax = draw("node_loads", loads())
    bars = {
        c.get_label(): {round(b.get_x() + b.get_width() / 2): b for b in c} for c in ax.containers
    }
    assert {node: bar.get_height() for node, bar in bars["compute"].items()} == {0: 1, 1: 1, 2: 4}
    down = {node: bar.get_height() for node, bar in bars["communication"].items()}
    assert down == {0: -1.5, 1: -1.0, 2: -0.5}
    marked = {float(line.get_ydata()[0]) for line in ax.lines}
    assert marked == {0.0, 4.0, -1.5}
    # 4 over a mean of 2, and 1.5 over a mean of 1.
    assert "max/mean: 2.00 compute, 1.50 communication" in texts(ax)
    ticks = ax.yaxis.get_major_formatter()
    assert ticks(-1.5, 0) == "1.5"


def test_loads_without_communication():
    table = loads()
    del table["comm_us"]
    ax = draw("node_loads", table, legend=False)
    assert [c.get_label() for c in ax.containers] == ["compute"]
    assert ax.get_legend() is None
    idle = draw("node_loads", {"node": [0, 1], "comp_us": [0.0, 0.0]})
    assert "nothing to do" in texts(idle)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_impossible_time(value):
    with pytest.raises(ValueError, match=r"comm_us = .* at node=0; allowed is 0 or more"):
        draw("node_loads", loads() | {"comm_us": [0.5, value, 1.0]})


def test_shares_are_the_picture():
    ax = draw("expert_shares", shares())
    drawn = np.asarray(ax.collections[0].get_array()).reshape(4, 3)
    expected = np.zeros((4, 3))
    expected[0, 2], expected[1, 0], expected[1, 1], expected[3, 0] = 1, 0.25, 0.75, 1
    np.testing.assert_array_equal(drawn, expected)
    # Expert 0 on top; four places for four experts.
    assert ax.get_ylim() == (3.5, -0.5)
    assert "an expert on 1 nodes on average" in texts(ax)
    assert len(ax.figure.axes) == 2
    assert len(draw("expert_shares", shares(), colorbar=False).figure.axes) == 1


def test_rows_of_nothing_only_say_how_many_there_are():
    table = {name: [*values, 0] for name, values in shares().items()}
    table["expert"][-1], table["node"][-1] = 5, 4
    ax = draw("expert_shares", table)
    assert np.asarray(ax.collections[0].get_array()).size == 6 * 5
    assert "an expert on 0.667 nodes on average" in texts(ax)


@pytest.mark.parametrize(
    "column, value, said",
    [
        ("share", 1.5, r"share = 1.5 at expert=0, node=2; allowed is \[0, 1\]"),
        ("share", np.nan, r"share = nan at expert=0, node=2"),
        ("node", -1, "node = -1; allowed is a whole number from 0"),
        ("expert", 0.5, "expert = 0.5; allowed is a whole number from 0"),
    ],
)
def test_impossible_share(column, value, said):
    table = shares()
    table[column][0] = value
    with pytest.raises(ValueError, match=said):
        draw("expert_shares", table)


def test_course_of_every_search_with_its_bound():
    ax = draw("convergence", course())
    lines = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
    assert list(lines) == ["b", "a"]
    np.testing.assert_array_equal(lines["b"].get_xydata(), [[1, 9], [2, 7]])
    np.testing.assert_array_equal(lines["a"].get_xydata(), [[1, 8], [2, 6], [3, 5]])
    bounds = [line for line in ax.lines if line.get_label().startswith("_")]
    assert [line.get_ydata()[0] for line in bounds] == [6.5, 4.0]
    assert [line.get_color() for line in bounds] == [lines[name].get_color() for name in "ba"]
    assert "no placement is better" in texts(ax)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["b", "a"]


def test_course_of_one_search_without_a_bound():
    ax = draw("convergence", {"step": [1, 2, 3], "total_us": [np.inf, 4.0, 3.0]})
    assert len(ax.lines) == 1
    assert "1 row without a number left out" in texts(ax)
    with pytest.raises(ValueError, match="no row has a finite total_us"):
        draw("convergence", {"step": [1], "total_us": [np.nan]})
    with pytest.raises(ValueError, match="the table is empty"):
        draw("convergence", {"step": [], "total_us": []})
