"""The gating sweeps and their figures on small tables, one real run of the example."""

import runpy

import numpy as np
import pytest

from moejax import routing, sweep
from tests.compilation import quick_compilation as quick_compilation
from tests.conftest import REPOSITORY


pytest.importorskip("matplotlib")


def load(name):
    return sweep.load_file(REPOSITORY / "sweeps" / f"{name}.py")[1]


def figures():
    from moejax.plot import _gating, figure

    return _gating, figure


def table(gates, *, seeds=1, **fixed):
    """Gates each twice as good as the one before: loss grows with speed."""
    rows = []
    for i, name in enumerate(gates):
        for strength in range(4):
            for seed in range(seeds):
                row = fixed | dict(gate=name, strength=strength, seed=seed, text=seed)
                row |= dict(speedup=1 + 0.1 * strength, time_us=10.0, gate_us=1.0, setting=strength)
                row |= dict(kl=0.008 * strength / 2**i, mass=0.08 * strength / 2**i)
                rows.append(row | dict(overlap=0.75, retention=0.9, chunk=1))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def joined(*tables):
    return {name: np.concatenate([of[name] for of in tables]) for name in tables[0]}


def test_story_of_the_model():
    story = load("gating_pareto")
    gates = ("published", "favorites kept", "soft, tuned")
    rows = table(gates, seeds=2, system=story.SYSTEM)
    chunks = table(("published",), seeds=2, system=story.SYSTEM)
    chunks |= dict(chunk=np.full(8, 4), kl=chunks["kl"] / 2)
    text = story.summary(joined(rows, chunks))
    assert "0.01600 (100%, 100%-100%)" in text and "0.00400 (25%, 25%-25%)" in text
    assert "published          4   0.00200   0.00400   0.00800     10.0%" in text


def test_the_gated_model_itself():
    """No penalty changes nothing, and its steps take time; the strongest moves most choices."""
    story = load("gating_pareto")
    small = story.SWEEP.set(dict(gate=["published"], chunk=[1], text=[1], strength=[0, 11]))
    columns = sweep.run(small, progress=False).columns
    off, strong = ({name: column[i] for name, column in columns.items()} for i in range(2))
    assert off["status"] == "ok" and off["overlap"] == 1 and abs(off["kl"]) < 1e-6
    # Without moves, the gate's own steps are all that the layers take longer.
    assert off["speedup"] == pytest.approx(1 - off["gate_us"] / off["time_us"], rel=1e-5)
    layers, steps = 4, story.BATCH
    assert off["gate_us"] == pytest.approx(layers * steps * 1e-2, rel=1e-5)
    assert strong["speedup"] > 1.2 and strong["kl"] > 1e-3 and strong["ppl_ratio"] > 0.99
    assert strong["r_comp"] == -9 * 3e4 and strong["overlap"] < 0.9 and strong["retention"] < 1
    moved = story.moved(story.GATES["looking ahead"].form)
    before, after = moved["original"] > 0, moved["adjusted"] > 0
    lost, gained = before & ~after, after & ~before
    assert lost.sum() == gained.sum() > 0
    assert moved["load_us"][lost].mean() > moved["load_us"][gained].mean()


def test_story_of_tuning():
    story = load("gating_tuning")
    rows = table(story.GATES, seeds=2, system=story.SYSTEMS[0])
    spent = dict(first_search_s=9.0, search_s=2.0, search_cpu_s=1.0)
    rows |= {name: np.full(16, value) for name, value in spent.items()}
    text = story.summary(rows)
    assert "grid in 9.0 s, compiled 2.0 s (1.0 s of CPU)" in text
    # A pair's loss at 1.1 is what layers lose at 1.2, and nothing is known beyond.
    assert "KL 0.00800: 1.1000, 1.2000" in text and "layers better at 1 of 1, +0.1000" in text
    assert set(story.figures(rows)) == {"gating_tuning"}


def test_story_of_the_traces(monkeypatch):
    story = load("gating_traces")
    models = [(model, tasks[-1]) for model, tasks in story.TASKS.items()]
    rows = joined(
        *(table(story.GATES, seeds=2, model=m, task=task, rest="nothing") for m, task in models)
    )
    text = story.summary(rows)
    assert "0.0800 (50%, 50%-50%)" in text and "esft-summary, other" in text
    assert set(story.figures(rows)) == {"gating_traces"}
    monkeypatch.delenv("MOEJAX_DATA", raising=False)
    with pytest.raises(ValueError, match="MOEJAX_DATA"):
        story.trace("deepseek-v2-lite", "esft-law")


def test_scores_that_a_trace_does_not_store(monkeypatch):
    """What is left of 1 by popularity, and never as much as the smallest choice."""
    story = load("gating_traces")
    ids = np.tile([[0, 1]], (1, story.TOKENS, 1))
    weights = np.tile([[0.5, 0.25]], (1, story.TOKENS, 1))
    made = routing.RoutingTrace(expert_ids=ids, num_experts=5, weights=weights)
    first = routing.RoutingTrace(expert_ids=np.array([[[2, 0], [2, 1], [3, 2]]]), num_experts=5)
    monkeypatch.setattr(story, "trace", lambda model, task: first if task == "esft-law" else made)
    bare, filled = (
        story.scores_of("deepseek-v2-lite", "esft-intent", rest, 0)[0, 0, 0] for rest in story.RESTS
    )
    np.testing.assert_allclose(bare, [0.5, 0.25, 0, 0, 0])
    # Experts 2 and 3 were wanted three times and once: 3/4 and 1/4 of what is left, 1/4.
    np.testing.assert_allclose(filled, [0.5, 0.25, 3 / 16, 1 / 16, 0])


def test_the_clairvoyant_moves_the_lightest_off_the_busiest():
    story = load("gating_traces")
    scores = np.array([[0.6, 0.3, 0, 0], [0, 0.4, 0.5, 0], [0.7, 0.2, 0, 0]], np.float32)
    node = np.array([0, 1, 1, 2])  # of experts: the middle two share a node
    path = story.peel(scores, node, 2)
    # Favorites stay. Expert 1 gives way to the idle node's: of the third token, then of the first;
    # then the first node is as busy, with favorites only.
    np.testing.assert_allclose([at[0] for at in path], [0, 2 / 9, 5 / 9], rtol=1e-6)
    assert [at[1] for at in path] == [4, 3, 2]
    assert path[2][2].tolist() == [[0, 3], [2, 1], [0, 3]]
    assert story.best(path, 0.1) is path[0][2] and story.best(path, 0.3) is path[1][2]


def test_story_of_training():
    story = load("gating_training")
    rows = table(tuple(story.WEIGHTS))
    rows |= dict(training=rows["gate"], scale=rows["strength"], loss_nats=rows["kl"])
    text = story.summary(rows)
    assert "0.0080" in text and "0.0000 at 1.000" in text
    assert set(story.figures(rows)) == {"gating_training"}


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
