"""The gating sweeps and their figures on small tables, one real run of the example."""

import importlib.util
import runpy
from pathlib import Path

import numpy as np
import pytest


REPOSITORY = Path(__file__).resolve().parent.parent
pytest.importorskip("matplotlib")


def load(name):
    path = REPOSITORY / "sweeps" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figures():
    from moejax.plot import _gating, figure

    return _gating, figure


def fake(sweep, **fixed):
    """A gate twice as good as the next, on the settings of which loss grows with speed."""
    rows = []
    for i, name in enumerate(reversed(sweep.FORMS)):
        for step in range(4):
            row = dict.fromkeys(sweep.NUMBERS, 0.9) | fixed
            row |= dict(gate=name, chunk=1, setting=float(step), per_layer=False, tuning_s=1.0)
            row |= dict(speedup=1 + 0.1 * step, time_us=10.0, kl=0.001 * step * 2**i)
            rows.append(row | dict(mass=0.01 * step * 2**i, r_comp=-1.0, r_comm=-0.5))
    return rows


def test_story_of_the_model():
    sweep = load("gating_pareto")
    rows = fake(sweep, study="zoo")
    text = sweep.summary(rows)
    assert "0.01600 (100%)" in text and "0.00800 ( 50%)" in text and "90.0%" in text
    pairs = [(-x, -y) for x in (1.0, 2.0) for y in (1.0, 2.0)]
    one = dict(rows[0], study="grid", gate="shared pair")
    grid = [dict(one, r_comp=x, r_comm=y, fit_mass=0.1, fit_speedup=1.1) for x, y in pairs]
    judged = (("best pair", 1.1, 0.002), ("each layer", 1.1, 0.001), ("each layer", 1.2, 0.003))
    grid += [dict(one, gate=gate, speedup=x, kl=kl) for gate, x, kl in judged]
    text = sweep.summary([*rows, *grid])
    assert "best of 4 shared pairs" in text
    assert "at KL 0.00200: pair 1.1000, layers 1.1500" in text
    assert set(sweep.figures([*rows, *grid])) == {"gating_pareto", "coefficients"}
    assert np.isnan(sweep.at_speedup(rows[:4], "kl", 2.0))
    # A setting that is slower and worse than another is not a way to a speed-up.
    worse = [dict(speedup=1.0, kl=0.0), dict(speedup=1.1, kl=9.0), dict(speedup=1.2, kl=0.2)]
    assert sweep.at_speedup(worse, "kl", 1.1) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="gating_traces"):
        next(sweep.rows(trace="x"))


def test_story_of_the_traces(monkeypatch):
    sweep = load("gating_traces")
    rows = fake(sweep, task="one", rest="nothing") + fake(sweep, task="two", rest="nothing")
    assert "0.04000 ( 50%)" in sweep.summary(rows)
    assert set(sweep.figures(rows)) == {"gating_traces"}
    monkeypatch.delenv("MOEJAX_DATA", raising=False)
    with pytest.raises(ValueError, match="MOEJAX_DATA"):
        next(sweep.rows())


def test_figures_draw_what_they_are_given():
    plots, figure = figures()
    _, axes = figure(1, 3)
    table = dict(gate=["a", "a", "b"], speedup=[1.0, 1.2, np.nan], kl=[0.0, 0.1, 0.2])
    ax = plots.speedup_fidelity(table | dict(published=[0, 1, 0]), axes[0, 0])
    labels = [line.get_label() for line in ax.get_lines()]
    assert labels[:2] == ["a", "_published"] and "1 row" in ax.texts[-1].get_text()
    pairs = dict(r_comp=[-1.0, -2, -1, -2], r_comm=[-3.0, -3, -4, -4], speedup=[1, 2, 3, np.nan])
    ax = plots.coefficient_map(pairs | dict(published=[0, 1, 0, 0]), axes[0, 1])
    np.testing.assert_array_equal(ax.images[0].get_array().filled(np.nan), [[1, 2], [3, np.nan]])
    choices = dict(load_us=[1, 2, 3], score=[0.1, 0.2, 0.3], original=[1, 1, 0], adjusted=[1, 0, 1])
    ax = plots.moved_choices(choices, axes[0, 2])
    assert [c.get_label() for c in ax.collections] == ["kept (1)", "lost (1)", "gained (1)"]


def test_figures_say_what_is_wrong():
    plots, figure = figures()
    ax = figure()[1][0, 0]
    with pytest.raises(ValueError, match="above 0"):
        plots.speedup_fidelity(dict(gate=["a"], speedup=[1.0], kl=[0.0]), ax)
    with pytest.raises(ValueError, match="no grid"):
        plots.coefficient_map(dict(r_comp=[-1.0, -2], r_comm=[-1.0, -2], speedup=[1.0, 2]), ax)
    with pytest.raises(ValueError, match="no column 'adjusted'"):
        plots.moved_choices(dict(load_us=[1.0], score=[0.1], original=[1]), ax)


def test_the_example_runs(capsys):
    runpy.run_path(str(REPOSITORY / "examples" / "gate_in_your_model.py"))
    text = capsys.readouterr().out
    assert "favorites kept: 100%" in text and "nats a byte" in text
