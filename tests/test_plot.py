"""What is drawn is what the table says; a table that cannot be drawn is an error that names why."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import moejax.plot as mp
from moejax.plot._policies import POLICIES


pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install moejax[plots]")

MACHINES = [
    {"name": "GPU", "flops_per_s": 2000e12, "bandwidth": 8e12},
    {"name": "HBM-PIM", "flops_per_s": 64e12, "bandwidth": 64e12},
]


def bins_table():
    return {
        "batch": [64, 1, 8],
        "share_1": [0.25, 1.0, 0.5],
        "share_2": [0.25, 0.0, 0.25],
        "share_3_4": [0.25, 0.0, 0.25],
        "share_more": [0.25, 0.0, 0.0],
        "active": [0.5, 0.004, 0.25],
    }


def pareto_table():
    # Throughput is batch x interactivity, as on one GPU; the rows are out of order on purpose.
    policy, batch = ["sieve"] * 3 + ["no_exp"] * 3, [64, 1, 8] * 2
    speed = np.array([100.0, 400.0, 300.0, 50.0, 390.0, 200.0])
    return {
        "policy": policy,
        "batch": batch,
        "interactivity_tok_s": speed,
        "throughput_per_gpu_tok_s": speed * batch,
    }


def roofline_table():
    # Apart by more than a factor of two, so that no two dots are merged.
    return {
        "arithmetic_intensity": [1.0, 3.0, 16.0, 64.0],
        "flops_per_s": [30e12, 32e12, 128e12, 512e12],
        "tokens": [1, 3, 16, 66],
        "runs_on": ["pim", "pim", "gpu", "gpu"],
    }


def draw(name, table, ax=None, **options):
    ax = ax or mp.figure()[1][0, 0]
    if name == "roofline":
        return mp.roofline(table, MACHINES, ax, **options)
    return getattr(mp, name)(table, ax, **options)


TABLES = {
    "expert_bins": bins_table,
    "throughput_interactivity": pareto_table,
    "roofline": roofline_table,
}
LABELS = {
    "expert_bins": ("Batch size (requests)", "Share of active experts (%)"),
    "throughput_interactivity": ("Interactivity (tok/s/user)", "Throughput (tok/s/GPU)"),
    "roofline": ("Arithmetic intensity (FLOP/B)", "Performance (TFLOP/s)"),
}
every_figure = pytest.mark.parametrize("name", TABLES)


@every_figure
def test_returns_axes_with_title_units_and_legend_outside(name):
    fig, axes = mp.figure()
    ax = draw(name, TABLES[name](), axes[0, 0], title="What is seen")
    assert ax is axes[0, 0]
    assert ax.get_title(loc="left") == "What is seen"
    assert (ax.get_xlabel(), ax.get_ylabel()) == LABELS[name]
    fig.canvas.draw()
    assert ax.get_legend().get_window_extent().x0 >= ax.get_window_extent().x1


@every_figure
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_saves_in_a_new_folder(name, suffix, tmp_path):
    fig, axes = mp.figure()
    draw(name, TABLES[name](), axes[0, 0])
    path = mp.save(fig, tmp_path / "new" / f"figure{suffix}", dpi=50)
    assert path.stat().st_size > 1000


def test_default_figure_is_1800_pixels_wide(tmp_path):
    fig, axes = mp.figure(1, 3)
    assert axes.shape == (1, 3)
    header = mp.save(fig, tmp_path / "f.png").read_bytes()[:24]
    assert int.from_bytes(header[16:20], "big") == 1800


@every_figure
def test_missing_column_is_named_with_the_nearest(name):
    for missing in TABLES[name]():
        table = TABLES[name]()
        table[missing + "s_"] = table.pop(missing)
        with pytest.raises(ValueError, match=f"no column '{missing}'; did you mean '.+'"):
            draw(name, table)


@every_figure
def test_empty_ragged_and_nonnumeric_tables(name):
    table = TABLES[name]()
    with pytest.raises(ValueError, match="empty"):
        draw(name, {column: [] for column in table})
    first = next(column for column in table if column != "policy")
    with pytest.raises(ValueError, match="unequal length"):
        draw(name, table | {first: list(table[first])[:-1]})
    with pytest.raises(ValueError, match=f"'{first}' holds"):
        draw(name, table | {first: ["many"] * len(table[first])})
    with pytest.raises(ValueError, match="1-D"):
        draw(name, table | {first: np.ones((2, 2))})


def test_bars_are_the_shares_in_order_of_batch():
    ax = draw("expert_bins", bins_table())
    drawn = np.array([[bar.get_height() for bar in bars] for bars in ax.containers])
    expected = 100 * np.array([[1, 0.5, 0.25], [0, 0.25, 0.25], [0, 0.25, 0.25], [0, 0, 0.25]])
    np.testing.assert_allclose(drawn, expected)
    tops = [bar.get_y() + bar.get_height() for bar in ax.containers[-1]]
    np.testing.assert_allclose(tops, 100)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "8", "64"]
    texts = [text.get_text() for text in ax.texts]
    assert {"<1", "25", "50"} <= set(texts)  # active
    assert "75" in texts  # at most four tokens at batch 64


def test_bins_that_are_no_shares():
    with pytest.raises(ValueError, match="share_1 = 25.0 at batch=64"):
        draw("expert_bins", bins_table() | {"share_1": [25.0, 1.0, 0.5]})
    with pytest.raises(ValueError, match="share_2 = nan at batch=1;"):
        draw("expert_bins", bins_table() | {"share_2": [0.25, np.nan, 0.25]})
    with pytest.raises(ValueError, match="add to 1.25 at batch=8"):
        draw("expert_bins", bins_table() | {"share_more": [0.25, 0.0, 0.25]})
    idle = {name: [0.0] for name in bins_table()} | {"batch": [1]}
    assert draw("expert_bins", idle)


def test_pareto_lines_are_the_table_on_log_axes():
    ax = draw("throughput_interactivity", pareto_table())
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    lines = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
    assert list(lines) == ["NoExp", "Sieve"]
    np.testing.assert_array_equal(lines["Sieve"].get_xdata(), [400, 300, 100])
    np.testing.assert_array_equal(lines["Sieve"].get_ydata(), [400, 2400, 6400])
    assert lines["Sieve"].get_color() == mp.policy_style("sieve").color
    assert sum(line.get_label() == "_batch" for line in ax.lines) == 3
    assert {"B=1", "B=64"} <= {text.get_text() for text in ax.texts}
    assert any("upper right is better" in text.get_text() for text in ax.texts)
    assert not ax.collections


def test_pareto_intervals_are_segments_between_both_bounds():
    table = pareto_table()
    for name in ("interactivity_tok_s", "throughput_per_gpu_tok_s"):
        table |= {f"{name}_low": 0.9 * table[name], f"{name}_high": 1.1 * table[name]}
    ax = draw("throughput_interactivity", table)
    segments = ax.collections[1].get_segments()  # NoExp is drawn first
    np.testing.assert_allclose(segments[0], [[360, 360], [440, 440]])
    assert any("95 %" in text.get_text() for text in ax.texts)


def test_pareto_leaves_failed_rows_out_and_says_so():
    table = pareto_table()
    table["interactivity_tok_s"][0] = np.nan
    ax = draw("throughput_interactivity", table)
    assert any("1 row without a number left out" in text.get_text() for text in ax.texts)
    sieve = next(line for line in ax.lines if line.get_label() == "Sieve")
    assert len(sieve.get_xdata()) == 2
    with pytest.raises(ValueError, match="no row has finite, positive interactivity_tok_s"):
        draw("throughput_interactivity", table | {"interactivity_tok_s": [np.nan] * 6})


@pytest.mark.parametrize(
    "name, keys", [("throughput_interactivity", ["policy", "batch"]), ("expert_bins", ["batch"])]
)
def test_two_rows_of_one_point(name, keys):
    table = TABLES[name]()
    twice = {column: [*values, values[0]] for column, values in table.items()}
    where = ", ".join(f"{key}={table[key][0]}" for key in keys)
    with pytest.raises(ValueError, match=f"2 rows with {where}"):
        draw(name, twice)


def test_roofline_dots_and_lines():
    ax = draw("roofline", roofline_table())
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    drawn = np.concatenate([dots.get_offsets() for dots in ax.collections])
    expected = [[16, 128], [64, 512], [1, 30], [3, 32]]
    np.testing.assert_allclose(drawn, expected)
    lines = {line.get_label(): line for line in ax.lines}
    for machine in MACHINES:
        x, y = lines["_" + machine["name"]].get_data()
        np.testing.assert_allclose(
            1e12 * y, np.minimum(machine["flops_per_s"], x * machine["bandwidth"])
        )
    ridges = [line.get_xdata()[0] for line in ax.lines if line.get_label() == "_ridge"]
    assert ridges == [250, 1]
    assert {"N=1", "N=66"} <= {text.get_text() for text in ax.texts}


def test_roofline_merges_dots_that_would_cover_each_other():
    table = {name: list(values) * 500 for name, values in roofline_table().items()}
    ax = draw("roofline", table)
    assert sum(len(dots.get_offsets()) for dots in ax.collections) == 4
    few = {name: [*values, values[0]] for name, values in roofline_table().items()}
    areas = draw("roofline", few).collections[-2].get_sizes()
    assert areas[0] > areas[1]  # two experts, and one
    assert any("2000 experts" in text.get_text() for text in ax.texts)


def test_roofline_bad_input():
    table = roofline_table()
    with pytest.raises(ValueError, match="unknown runs_on 'gpus'; did you mean 'gpu'"):
        draw("roofline", table | {"runs_on": ["gpus"] * 4})
    ax = mp.figure()[1][0, 0]
    with pytest.raises(ValueError, match="no machines"):
        mp.roofline(table, [], ax)
    with pytest.raises(ValueError, match="'GPU': bandwidth = 0.0"):
        mp.roofline(table, [MACHINES[0] | {"bandwidth": 0}], ax)
    with pytest.raises(ValueError, match="'bandwidth'; did you mean 'band_width'"):
        mp.roofline(table, [{"name": "x", "flops_per_s": 1, "band_width": 1}], ax)


def test_colors_belong_to_policies():
    assert len({style.color for style in POLICIES.values()}) == len(POLICIES)
    assert mp.policy_style("mine") == mp.policy_style("mine")
    assert mp.policy_style("mine").label == "mine"
    assert mp.policy_style("mine").color not in {style.color for style in POLICIES.values()}


def test_select_rows():
    table = pareto_table()
    rows = mp.select(table, policy="sieve", batch=8)
    assert rows["interactivity_tok_s"].tolist() == [300.0]
    with pytest.raises(ValueError, match="policy='seive'; did you mean 'sieve'"):
        mp.select(table, policy="seive")
    with pytest.raises(ValueError, match="no column 'polcy'; did you mean 'policy'"):
        mp.select(table, polcy="sieve")
    with pytest.raises(ValueError, match="empty"):
        mp.select({})


def test_shared_legend_has_each_label_once():
    fig, axes = mp.figure(1, 2)
    for ax in axes.flat:
        draw("throughput_interactivity", pareto_table(), ax, legend=False)
        assert ax.get_legend() is None
    legend = mp.shared_legend(fig, axes)
    assert [text.get_text() for text in legend.get_texts()] == ["NoExp", "Sieve"]
    with pytest.raises(ValueError, match="label"):
        mp.shared_legend(fig, mp.figure()[1])


def test_unknown_file_ending():
    with pytest.raises(ValueError, match=r"'figure.jpeg' must end in one of .png"):
        mp.save(SimpleNamespace(), "figure.jpeg")  # pyright: ignore[reportArgumentType]


def test_matplotlib_is_optional_and_pyplot_never_imported():
    program = """
import sys
import moejax.plot as mp
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
try:
    mp.figure()
except ValueError as error:
    assert str(error) == "figures need matplotlib: pip install moejax[plots]", error
else:
    raise AssertionError("no error")
del sys.modules["matplotlib"]
fig, axes = mp.figure()
mp.throughput_interactivity(
    dict(policy=["sieve"], batch=[1], interactivity_tok_s=[1.0], throughput_per_gpu_tok_s=[1.0]),
    axes[0, 0],
)
fig.canvas.draw()
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
