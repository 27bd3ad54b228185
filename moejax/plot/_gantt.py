"""Which task holds which resource when."""

from typing import TYPE_CHECKING

import numpy as np

from moejax.plot._style import INK, dress, require_matplotlib
from moejax.plot._table import Table, flags, read


if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Tasks by what they are about: the last word of their name decides.
KINDS = {
    "attention": ("#3B5BA5", ("qkv", "attention", "gpu_attention", "projection")),
    "routing and decision": ("#8A8F98", ("router", "all_gather", "metadata", "decide")),
    "exchange between GPUs": ("#009E73", ("all_reduce", "dispatch", "combine", "exchange")),
    "weights": ("#56B4E9", ("load", "load_shared", "load_early", "memory", "broadcast")),
    "experts on the GPU": ("#0072B2", ("gemm", "shared", "sum", "compute")),
    "experts on PIM": ("#C8453B", ("pim", "to_pim", "from_pim")),
}
OTHER = "#AEB7C0"
CRITICAL = "#D55E00"
LANES = ("decision", "gpu", "hbm", "pim", "pim_bus", "net")
SHORTEST_NAMED = 0.055  # of the time shown: shorter bars have no room for a name


def gantt(
    table: Table,
    ax: "Axes",
    *,
    title: str = "One layer",
    machine: int = 0,
    until: float | None = None,
    legend: bool = True,
) -> "Axes":
    """Draws one bar per task and resource, over time; the critical path has an orange rim.

    **Arguments:**

    - `table`: columns `task`, `machine`, `lane`, `start_us`, `end_us`; optionally `critical`.
        `moejax.serving.timeline_rows` makes one.
    - `title`: what is seen.
    - `machine`: whose resources to show.
    - `until`: end of the axis in us, for several pictures of one scale.
    - `legend`: whether to say below the axes what the colors mean.

    **Returns:** `ax`.

    **Raises:** `ValueError` for a missing column, an empty table, a task that ends before it
    starts, or a machine of which there is nothing.
    """
    owner = "gantt"
    require_matplotlib()
    rows = read(table, owner, floats=["machine", "start_us", "end_us"], names=["task", "lane"])
    critical = flags(table, "critical", len(rows["task"]), owner)
    if np.any(bad := ~(rows["end_us"] >= rows["start_us"])):
        name = rows["task"][bad][0]
        raise ValueError(f"{owner}: {name} ends at {rows['end_us'][bad][0]:g} us, before it starts")
    mine = rows["machine"] == machine
    if not np.any(mine):
        raise ValueError(f"{owner}: machine {machine}: the table has no rows of it")
    rows, critical = {name: values[mine] for name, values in rows.items()}, critical[mine]
    found = dict.fromkeys(rows["lane"])
    lanes = [lane for lane in LANES if lane in found] + [x for x in found if x not in LANES]
    last = float(np.max(rows["end_us"])) if until is None else until
    for task, lane, start, end, on_path in zip(
        rows["task"], rows["lane"], rows["start_us"], rows["end_us"], critical, strict=True
    ):
        _bar(ax, task, lanes.index(lane), start, end - start, bool(on_path), last)
    ax.set_xlim(0, last * 1.01 or 1)
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.set_yticks(range(len(lanes)), [lane.replace("_", " ") for lane in lanes])
    total = float(np.max(rows["end_us"]))
    subtitle = f"{total:.1f} us · orange rim: critical path"
    dress(ax, title=title, subtitle=subtitle, x="time_us", y="place")
    ax.grid(False, axis="y")
    if legend:
        _legend(ax)
    return ax


def _bar(ax: "Axes", task: str, lane: int, start: float, width: float, critical: bool, last: float):
    kind = task.rpartition(".")[2].partition(":")[0]
    color = next((color for color, names in KINDS.values() if kind in names), OTHER)
    ax.barh(
        lane,
        width,
        left=start,
        height=0.76,
        color=color,
        edgecolor=CRITICAL if critical else "white",
        linewidth=1.8 if critical else 0.5,
        zorder=3 if critical else 2,
    )
    if width > SHORTEST_NAMED * last:
        ax.text(
            start + width / 2,
            lane,
            task.replace("_", " "),
            ha="center",
            va="center",
            fontsize=6.5,
            color="white" if color not in ("#56B4E9", OTHER) else INK,
            clip_on=True,
            zorder=4,
        )


def _legend(ax: "Axes") -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=name) for name, (color, _) in KINDS.items()]
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.28),
        ncols=6,
        frameon=False,
        fontsize=7.5,
        labelcolor=INK,
        handlelength=1.2,
        columnspacing=1.2,
    )
