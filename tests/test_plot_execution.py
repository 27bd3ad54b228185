"""Gantt charts, breakdowns and channel utilization: what is drawn, and what is refused."""

import re

import jax
import numpy as np
import pytest

from moejax import plot, serving
from moejax.serving import Execution, Workload
from tests.test_evaluate import GQA, made_up_trace, small_model, small_system


pytest.importorskip("matplotlib")


def raises(*words):
    return pytest.raises(ValueError, match=".*".join(re.escape(word) for word in words))


def one_axes():
    return plot.figure()[1][0, 0]


MODEL = small_model((GQA, GQA))
SYSTEM = small_system("2xb200-hbm-pim")
WORKLOAD = Workload(8, 100.0, routing=made_up_trace(MODEL))


@pytest.fixture(scope="module")
def drawn():
    dag, timeline = serving.layer_timeline(
        MODEL, SYSTEM, WORKLOAD, "sieve", key=jax.random.key(0), layer=1
    )
    return dag, timeline, serving.timeline_rows(dag, timeline)


def test_the_rows_of_a_timeline_are_the_tasks_that_take_time(drawn):
    dag, timeline, rows = drawn
    assert set(rows) == {"task", "machine", "lane", "start_us", "end_us", "critical"}
    assert np.all(rows["end_us"] > rows["start_us"])
    assert np.max(rows["end_us"]) == pytest.approx(1e6 * float(timeline.makespan))
    assert set(rows["machine"]) == {0, 1}
    # The projections hold arithmetic and bus; the decision holds nothing and has a lane of its own.
    held = {lane for task, lane in zip(rows["task"], rows["lane"], strict=True) if task == "qkv"}
    assert held == {"gpu", "hbm"}
    assert "decision" in rows["lane"] and "pim" in rows["lane"]
    # The critical path leaves no gap.
    on_path = rows["critical"]
    covered = {
        (round(s, 4), round(e, 4))
        for s, e in zip(*(rows[n][on_path] for n in ("start_us", "end_us")), strict=True)
    }
    assert sum(e - s for s, e in covered) == pytest.approx(np.max(rows["end_us"]), rel=1e-3)


def test_a_layer_that_is_not_there_and_overlap_without_order():
    call = lambda **options: serving.layer_timeline(
        MODEL, SYSTEM, WORKLOAD, "sieve", key=jax.random.key(0), **options
    )
    with raises("layer = 2", "0 to 1"):
        call(layer=2)
    with raises("Execution.overlap = 'ideal'", "fine or coarse"):
        call(execution=Execution())
    with raises("execution = 'coarse'", "None, Execution"):
        call(execution="coarse")
    with raises("efficiency = 'measured'", "None, GPUEfficiency"):
        call(efficiency="measured")


def test_a_policy_that_believes_pim_to_be_slow_gives_it_less(drawn):
    dag, known, _ = drawn
    slow = SYSTEM.replace(pim=dict(turn_time=1e-3))
    fields = dict(key=jax.random.key(0), layer=1, believed=slow)
    _, found = serving.layer_timeline(MODEL, SYSTEM, WORKLOAD, "sieve", **fields)
    experts = [i for i, name in enumerate(dag.names) if name.startswith("pim@")]
    busy = lambda timeline: np.asarray(timeline.end - timeline.start)[experts]
    # Nothing goes there, and nothing of the belief is in the time.
    assert np.all(busy(found) == 0) and np.sum(busy(known)) > 0
    assert float(found.makespan) < 1e-3


def test_a_gantt_chart_has_a_bar_for_every_row_of_its_machine(drawn):
    rows = drawn[2]
    ax = plot.gantt(rows, one_axes(), title="layer", machine=1)
    mine = rows["machine"] == 1
    assert len(ax.patches) == np.sum(mine)
    assert {text.get_text() for text in ax.get_yticklabels()} <= {
        "decision", "gpu", "hbm", "pim", "pim bus", "net",
    }  # fmt: skip
    with raises("machine 7", "no rows"):
        plot.gantt(rows, one_axes(), machine=7)
    with raises("no column 'lane'"):
        plot.gantt({name: x for name, x in rows.items() if name != "lane"}, one_axes())
    backwards = rows | {"end_us": rows["start_us"] - 1}
    with raises("before it starts"):
        plot.gantt(backwards, one_axes())


def test_bars_of_a_breakdown_stack_to_the_total():
    table = {"name": ["a", "b"], "compute_ms": [1.0, 2.0], "memory_ms": [3.0, 0.5]}
    ax = plot.breakdown(table, one_axes(), parts=("compute", "memory"))
    tops = [patch.get_y() + patch.get_height() for patch in ax.patches]
    assert sorted(tops) == [1.0, 2.0, 2.5, 4.0]
    assert {"4", "2.5"} <= {text.get_text() for text in ax.texts}
    with raises("no column 'pim_ms'"):
        plot.breakdown(table, one_axes(), parts=("pim",))
    with raises("parts is empty"):
        plot.breakdown(table, one_axes(), parts=())
    with raises("-1 ms", "0 or more"):
        plot.breakdown(table | {"memory_ms": [-1.0, 1.0]}, one_axes(), parts=("memory",))


def test_channel_utilization_has_a_line_for_every_policy():
    table = {
        "policy": ["sieve", "sieve", "pimoe_channel", "pimoe_channel"],
        "batch": [8, 64, 64, 8],
        "channel_utilization": [1.0, 1.0, 0.5, 0.25],
    }
    ax = plot.channel_utilization(table, one_axes())
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    assert lines["PIMoE channel"] == [[8, 25], [64, 50]]
    with raises("2 rows with policy=sieve, batch=8.0"):
        plot.channel_utilization(table | {"batch": [8, 8, 64, 8]}, one_axes())
