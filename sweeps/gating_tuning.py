"""Are coefficients tuned for each layer by gradient worth it, against a dense grid of pairs?

On a placement with split experts (else r_comm would not matter), on three machines: the best pair
that all layers share, of GRID x GRID, against a pair for each layer, tuned by gradient. Both go by
the same numbers of the same text: estimated time, and KL to second order, from router scores and
`weight_slopes`; both get the same budgets of KL. What they choose is judged in the running zoo
model, with simulated communication, on other text. The model, the machine and the gate (published,
but favorites stay) are those of `gating_pareto.py`.

    moejax run sweeps/gating_tuning.py
"""

from pathlib import Path
from typing import Any

import numpy as np

from moejax import metrics, plot
from moejax.sweep import Axis, Sweep, load_file


_, zoo_gate = load_file(Path(__file__).with_name("gating_pareto.py"))
zoo_gate.FIT = (0, 1)  # twice the text: there are more coefficients to find
zoo_gate.BUDGETS = (0.00015, 0.0003, 0.0006, 0.0012, 0.002, 0.003, 0.0045, 0.0065)

SYSTEMS = ("nmp-4x4-2.5t-75g", "nmp-4x4-5t-50g", "nmp-4x4-10t-25g")
GATES = ("best pair", "each layer")

SWEEP = Sweep(
    [
        Axis("gate", GATES, static=True),
        Axis("chunk", [1], static=True),
        Axis("system", SYSTEMS, static=True),
        Axis("text", zoo_gate.TEXTS),
        Axis("strength", range(1, 1 + len(zoo_gate.BUDGETS))),
    ],
    zoo_gate.gated,
    prepare=(zoo_gate.prepare_machine, zoo_gate.prepare_gate, zoo_gate.prepare_text),
    about=zoo_gate.about,
    width=4,
)


def curves(table: dict[str, np.ndarray], system: str):
    """(speed-up, KL) of the grid's best pairs, and of the tuned layers."""
    return [
        metrics.best_settings(
            *zoo_gate.settings_of(table, (table["system"] == system) & (table["gate"] == gate))
        )
        for gate in GATES
    ]


def summary(table: dict[str, np.ndarray]) -> str:
    """Speed-up at equal KL, and what both searches took."""
    number = zoo_gate.GRID
    lines = [
        f"speed-up on held-out text at the KL of a pair: of {number} x {number}, and of layers"
    ]
    for system in dict.fromkeys(table["system"]):
        pairs, layers = curves(table, system)
        gains = [metrics.speedup_at(*layers, loss) - speed for speed, loss in zip(*pairs)]
        lines += ["", f"{system}: {spent(table, system)}"]
        for speed, loss, gain in zip(*pairs, gains):
            lines.append(f"  KL {loss:.5f}: {speed:.4f}, {speed + gain:.4f}")
        known = np.array(gains)[np.isfinite(gains)]
        lines.append(f"  layers better at {(known > 0).sum()} of {len(known)}, {known.mean():+.4f}")
    return "\n".join(lines)


def spent(table, system: str) -> str:
    names = ("first_search_s", "search_s", "search_cpu_s")
    rows = [(table["system"] == system) & (table["gate"] == gate) for gate in GATES]
    times = [[table[name][of][0] for name in names] for of in rows]
    words = [f"{a:.1f} s, compiled {b:.1f} s ({c:.1f} s of CPU)" for a, b, c in times]
    return f"grid in {words[0]}, layers in {words[1]}"


def figures(table: dict[str, np.ndarray]) -> dict[str, Any]:
    """KL against speed-up, a panel for each machine."""
    systems = list(dict.fromkeys(table["system"]))
    figure, axes = plot.figure(1, len(systems), (4 * len(systems), 3.4))
    for system, ax in zip(systems, axes[0]):
        points: dict[str, list] = dict(gate=[], speedup=[], kl=[])
        for gate, found in zip(GATES, curves(table, system)):
            points["gate"] += [gate] * len(found[0])
            points["speedup"] += list(found[0])
            points["kl"] += list(found[1])
        plot.speedup_fidelity(points, ax, title=system, legend=False)
    plot.shared_legend(figure, axes)
    return {"gating_tuning": figure}
