"""What do the traces of a real model lose when its tokens are routed for the machine's sake?

DeepSeek-V2-Lite on three tasks: coefficients are fitted on one and judged on the others, in the
combine weight of the choices that tokens lose, against the speed-up of the MoE layers. The traces
store router scores of the chosen experts only, so the others get either nothing, or what is left of
1 by popularity. The machine and the gates are those of `gating_pareto.py`, the published
coefficients are the one pair printed for this model.

The folder of traces is that of `MOEJAX_DATA`.

    MOEJAX_DATA=traces moejax run sweeps/gating_traces.py
"""

import dataclasses
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax import gating, hardware, metrics, models, noc, placement, plot, routing


MODEL = "deepseek-v2-lite"
SYSTEM = "nmp-4x4-5t-50g"
BATCH = 32
GATE_STEP_TIME = 10e-9
"""s of one step of the gate: some ten cycles of a compare-and-select pipeline at 1 GHz."""
GAMMA = 0.19
"""Simulated over estimated communication of this model on 4 x 4, from the authors' logs."""
PUBLISHED = (-3e4, -0.025)
SCALES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 0.7, 0.85, 1.0, 1.5, 2.0, 3.0)
BUDGETS = (0.002, 0.005, 0.01, 0.02)
TOKENS = 512
STEPS = 20
SPEEDUPS = (1.05, 1.1, 1.2)
TASKS = ("esft-law", "esft-intent", "esft-translation")  # the first is fitted on
FILLS = ("popularity", "nothing")  # the first is fitted on

# Form of the gate, and whether it compares lost weights instead of scores.
FORMS = {
    "published": (gating.GateForm(), False),
    "looking ahead": (gating.GateForm(protect=1, ahead=True), False),
    "ahead, by weight": (gating.GateForm(protect=1, ahead=True), True),
    "soft, by weight": (gating.GateForm(protect=1, chunk=2, ahead=True, soft=True), True),
}
NUMBERS = ("speedup", "time_us", "mass", "overlap", "retention")


def rows(*, trace: str | None = None, progress=None) -> Iterator[list[dict[str, Any]]]:
    """One row per task, fill, gate and coefficients."""
    if trace is not None or "MOEJAX_DATA" not in os.environ:
        raise ValueError("gating_traces reads several traces, from the folder MOEJAX_DATA")
    folder = Path(os.environ["MOEJAX_DATA"]) / MODEL
    for done, name in enumerate(FORMS):
        if progress is not None:
            progress(done, len(FORMS))
        yield _gate(folder, name)
    if progress is not None:
        progress(len(FORMS), len(FORMS))


@functools.cache
def _scores(folder: Path, task: str, fill: str):
    """Router scores [layers, tokens, experts] of a trace, which stores those of the chosen only.

    The others get nothing, or share what is left of 1 by how popular they are with the layer on
    the task that is fitted on, but never more than the token's smallest chosen.
    """
    trace = routing.load(folder / f"{task}.npz")
    valid = np.flatnonzero(np.asarray(trace.valid))
    picked = np.random.default_rng(0).choice(valid, TOKENS, replace=False)
    ids, weights = (np.asarray(x)[:, picked] for x in (trace.expert_ids, trace.weights))
    scores = np.zeros((*ids.shape[:2], trace.num_experts), np.float32)
    np.put_along_axis(scores, ids, weights, axis=-1)
    if fill == "popularity":
        first = routing.load(folder / f"{TASKS[0]}.npz").expert_ids
        counts = [np.bincount(np.ravel(x), minlength=trace.num_experts) for x in np.asarray(first)]
        popular = np.where(scores > 0, 0, np.asarray(counts, float)[:, None])
        left = np.maximum(1 - weights.sum(-1, keepdims=True), 0)
        spread = left * popular / popular.sum(-1, keepdims=True)
        # Just below, so that the stored choice stays the choice.
        least = np.nextafter(weights.min(-1, keepdims=True).astype(np.float32), np.float32(0))
        scores = np.where(scores > 0, scores, np.minimum(spread, least))
    return jnp.asarray(scores, jnp.float32)


@functools.cache
def _machine(layers: int, experts: int, top_k: int):
    """(costs, topology, placement [layers, experts, nodes], bytes of a message)."""
    system, sizes = hardware.get(SYSTEM), models.get(MODEL)
    deal = lambda key: placement.expert_parallel(experts, system.num_nodes, key=key)
    costs = gating.LayerCosts.published(
        sizes.hidden,
        sizes.moe_intermediate,
        top_k=top_k,
        flops_per_s=system.flops_per_s,
        bandwidth=system.link_bandwidth,
        gamma=GAMMA,
        gate_step_time=GATE_STEP_TIME,
    )
    network = noc.mesh(*system.shape, bandwidth=system.link_bandwidth)
    share = jnp.stack([deal(key) for key in jax.random.split(jax.random.key(0), layers)])
    return costs, network, share, float(sizes.hidden)


def _gate(folder: Path, name: str) -> list[dict[str, Any]]:
    (form, by_weight), found = FORMS[name], []
    fit = _scores(folder, TASKS[0], FILLS[0])
    costs, network, share, size = _machine(fit.shape[0], fit.shape[2], models.get(MODEL).top_k)
    candidates = _candidates(form, by_weight, fit, costs, share)
    for task in TASKS[1:]:
        for fill in FILLS:
            scores = _scores(folder, task, fill)
            for setting, coefficients, spent in candidates:
                numbers = _judged(
                    coefficients, scores, share, costs, network, size, form, by_weight
                )
                row = dict(task=task, rest=fill, gate=name, chunk=form.chunk, setting=setting)
                row |= dict(r_comp=float(coefficients.r_comp.mean()), tuning_s=spent)
                found.append(row | {key: float(numbers[key]) for key in NUMBERS})
    return found


def _candidates(form, by_weight, fit, costs, share):
    """(scale or budget, coefficients [layers], seconds of tuning)."""
    full = lambda x: jnp.full(share.shape[0], x)
    ray = lambda scale: gating.Coefficients(*(full(scale * r) for r in PUBLISHED), full(0.0))
    if not form.soft:
        return [(scale, ray(scale), 0.0) for scale in SCALES]
    since = time.monotonic()
    options = dict(batch=BATCH, key=jax.random.key(1), form=form, ray=PUBLISHED, steps=STEPS)
    if by_weight:
        options |= dict(selection=functools.partial(gating.lost_weights, top_k=costs.top_k))
    found = jax.block_until_ready(gating.tune(fit, share, costs, BUDGETS, **options)).coefficients
    spent = time.monotonic() - since
    pick = lambda i: jax.tree.map(lambda x: x[i], found)
    tuned = [(budget, pick(i), spent) for i, budget in enumerate(BUDGETS)]
    return [(0.0, ray(0.0)._replace(softness=pick(0).softness), spent), *tuned]


@functools.partial(jax.jit, static_argnames=("size", "form", "by_weight"))
def _judged(coefficients, scores, share, costs, network, size, form, by_weight):
    nodes = share.shape[-1]
    alone = dataclasses.replace(costs, visit_time=jnp.zeros(()))

    def layer_time(ids, share):
        messages = noc.expert_traffic(
            ids, share, jnp.arange(nodes), bytes_per_token=size, max_messages=ids.size
        )
        return alone.layer_time(ids, share) + noc.communication_time(network, messages)

    def batch(scores, share, coefficients):
        selection = gating.lost_weights(scores, costs.top_k) if by_weight else scores
        options = dict(form=form, selection_scores=selection)
        new = gating.tuned_gate(scores, share, costs, coefficients, **options).expert_ids
        old = jax.lax.top_k(scores, costs.top_k)[1]
        time = layer_time(new, share) + costs.gate_time(BATCH, form.chunk)
        return time, layer_time(old, share), new, old, jnp.take_along_axis(scores, old, axis=-1)

    batches = scores.reshape(scores.shape[0], -1, BATCH, scores.shape[-1])
    over = jax.vmap(jax.vmap(batch, (0, None, None)))
    time, before, new, old, weights = over(batches, share, coefficients)
    return dict(
        speedup=before.sum() / time.sum(),
        time_us=1e6 * time.mean(1).sum(),
        mass=metrics.changed_weight_mass(old, weights, new),
        overlap=metrics.top_k_overlap(old, new),
        retention=metrics.top1_retention(old, new),
    )


def at_speedup(rows: list[dict[str, Any]], loss: str, speedup: float) -> float:
    """The loss of a gate where its settings, joined by straight lines, reach a speed-up; NaN where
    none is so fast."""
    points = sorted((row["speedup"], row[loss]) for row in rows)
    # What is slower and loses more is never used.
    front = [p for i, p in enumerate(points) if all(p[1] <= q[1] for q in points[i + 1 :])]
    x, y = zip(*front)
    return float(np.interp(speedup, x, y, right=np.nan))


def summary(rows: list[dict[str, Any]]) -> str:
    """Lost combine weight at equal speed-up, gate by gate."""
    lines = []
    for task, fill in dict.fromkeys((row["task"], row["rest"]) for row in rows):
        of = [row for row in rows if (row["task"], row["rest"]) == (task, fill)]
        lines += [
            "",
            f"{task}, other experts' scores: {fill}; lost weight at a speed-up of the MoE",
        ]
        lines[-1] += " layers, share of published"
        lines.append(f"  {'gate':<22}" + "".join(f"{x:>18.2f}" for x in SPEEDUPS) + "   top-1 kept")
        gates = {name: [row for row in of if row["gate"] == name] for name in FORMS}
        base = [at_speedup(gates["published"], "mass", x) for x in SPEEDUPS]
        for name, mine in gates.items():
            found = [at_speedup(mine, "mass", x) for x in SPEEDUPS]
            cells = [f"{y:.5f} ({y / b:4.0%})" if y == y else "-" for y, b in zip(found, base)]
            kept = min(row["retention"] for row in mine)
            lines.append(f"  {name:<22}" + "".join(f"{c:>18}" for c in cells) + f"{kept:>12.1%}")
    return "\n".join(lines)


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Lost weight against speed-up, one panel for each task and fill."""
    studies = list(dict.fromkeys((row["task"], row["rest"]) for row in rows))
    figure, axes = plot.figure(1, len(studies), (4.0 * len(studies), 3.6))
    for (task, fill), ax in zip(studies, axes[0]):
        of = [row for row in rows if (row["task"], row["rest"]) == (task, fill)]
        table = {name: np.array([row[name] for row in of]) for name in of[0]}
        table["published"] = (table["gate"] == "published") & (table["setting"] == 1)
        title = f"{task}, rest: {fill}"
        plot.speedup_fidelity(
            table, ax, loss="mass", label="Lost combine weight", title=title, legend=False
        )
    plot.shared_legend(figure, axes)
    return {"gating_traces": figure}
