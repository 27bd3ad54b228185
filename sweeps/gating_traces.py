"""What do traces of real models lose when their tokens are routed for the machine's sake?

Routing of DeepSeek-V2-Lite and gpt-oss-20b on several tasks: speed-up of the MoE layers against the
part of the combine weight that was on choices which tokens lose. The published gate, its
coefficients scaled along their ray; ours, which keeps favorites, looks ahead at the batch, has a
soft makespan, compares the weight that a swap gives up, and pays for nodes that only one choice
needs; and a clairvoyant one that sees the whole batch and moves the lightest choices off the
busiest node one by one, in no time: about what can be had at all.

Times and lost weight add up over layers, so one price of time for all of them is right already, and
nothing is tuned: every gate is run at many prices. The traces store scores of the chosen experts
only, so the others get nothing, or what is left of 1 by the layer's popularity on another task,
each at most the token's smallest choice. gpt-oss stores a softmax over the chosen, which leaves
nothing: half is assumed to lie outside.

A seed draws tokens and deals experts to nodes. Machine as in `gating_pareto.py`.

    MOEJAX_DATA=traces moejax run sweeps/gating_traces.py
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax import gating, hardware, metrics, models, noc, placement, plot, routing
from moejax.sweep import Axis, Sweep


SYSTEM, BATCH, TOKENS = "nmp-4x4-5t-50g", 32, 128
GAMMA = 0.19
"""Simulated over estimated communication of DeepSeek-V2-Lite on 4 x 4, from the authors' logs."""
PUBLISHED = (-3e4, -0.025)
SPEEDUPS = (1.05, 1.1, 1.2)
# The first task of a model is that of popularity only.
TASKS = {
    "deepseek-v2-lite": ("esft-law", "esft-intent", "esft-translation", "esft-summary"),
    "gpt-oss-20b": ("decode-misc", "decode-gpqa", "decode-mmlu-pro"),
}
ALL_TASKS = [task for tasks in TASKS.values() for task in tasks[1:]]
RESTS = ("nothing", "popularity")
OUTSIDE = {"deepseek-v2-lite": 0.0, "gpt-oss-20b": 0.5}
SEEN = ("esft-intent", "esft-translation")  # of which seed 0 was looked at when ours was chosen
STRENGTHS = 12
# From and to how many score units a whole expert-token costs, where it is due, by model: raw scores
# for the published form (whose printed pair is 0.0346), else parts of a token's weight.
GATES = ("published", "ours", "clairvoyant")
PRICES = {"nothing": ((0.008, 0.065), (0.012, 0.15)), "popularity": ((0.0015, 0.035), (0.005, 0.1))}
WEIGHT_PRICES = (0.03, 0.22), (0.04, 0.4)
FORM = gating.GateForm(protect=1, chunk=2, ahead=True, soft=True)
SOFTNESS, VISIT_PRICE = 1.4, 0.004  # in times of a token; in weight for each node


@functools.cache
def trace(model: str, task: str):
    folder = os.environ.get("MOEJAX_DATA")
    if folder is None:
        raise ValueError("gating_traces reads several traces, from the folder MOEJAX_DATA")
    return routing.load(Path(folder) / model / f"{task}.npz")


@functools.cache
def scores_of(model: str, task: str, rest: str, seed: int):
    """Router scores [layers, batches, BATCH, experts] of tokens drawn from a trace."""
    of = trace(model, task)
    valid = np.flatnonzero(np.asarray(of.valid))
    picked = np.random.default_rng(seed).choice(valid, TOKENS, replace=False)
    ids, weights = (np.asarray(x)[:, picked] for x in (of.expert_ids, of.weights))
    weights = (1 - OUTSIDE[model]) * np.asarray(weights, np.float32)
    scores = np.zeros((*ids.shape[:2], of.num_experts), np.float32)
    np.put_along_axis(scores, ids, weights, axis=-1)
    if rest == "popularity":
        first = np.asarray(trace(model, TASKS[model][0]).expert_ids)
        counts = np.stack([np.bincount(np.ravel(x), minlength=of.num_experts) for x in first])
        popular = np.where(scores > 0, 0, counts[:, None].astype(np.float32))
        left = np.maximum(1 - weights.sum(-1, keepdims=True), 0)
        spread = left * popular / popular.sum(-1, keepdims=True)
        # Just below, so that the stored choice stays the choice.
        least = np.nextafter(weights.min(-1, keepdims=True), np.float32(0))
        scores = np.where(scores > 0, scores, np.minimum(spread, least))
    return scores.reshape(scores.shape[0], -1, BATCH, scores.shape[-1])


@functools.cache
def machine_of(model: str, seed: int):
    """(share [layers, experts, nodes], costs, network, bytes of a message)."""
    chip, sizes = hardware.get(SYSTEM), models.get(model)
    of = trace(model, TASKS[model][0])
    keys = jax.random.split(jax.random.key(seed), len(of.expert_ids))
    deal = lambda key: placement.expert_parallel(of.num_experts, chip.num_nodes, key=key)
    costs = gating.LayerCosts.published(
        sizes.hidden,
        sizes.moe_intermediate,
        top_k=sizes.top_k,
        flops_per_s=chip.flops_per_s,
        bandwidth=chip.link_bandwidth,
        gamma=GAMMA,
        gate_step_time=chip.gate_step_time,
    )
    network = noc.mesh(*chip.shape, bandwidth=chip.link_bandwidth)
    return jnp.stack(list(map(deal, keys))), costs, network, float(sizes.hidden)


def named(model: int, task: int, rest: int) -> tuple[str, str, str]:
    return list(TASKS)[model], ALL_TASKS[task], RESTS[rest]


def price_of(model: int, rest: int, gate: str, strength: int) -> float:
    ends = PRICES[RESTS[rest]] if gate == "published" else WEIGHT_PRICES
    return float([0.0, *np.geomspace(*ends[model], STRENGTHS - 1)][strength])


def prepare_trace(model: int, task: int, rest: int, seed: int):
    study = named(model, task, rest)
    share, costs, network, message = machine_of(study[0], seed)
    found = dict(scores=scores_of(*study, seed), share=share, costs=costs)
    return found | dict(network=network, message_bytes=message)


def prepare_gate(model: int, task: int, rest: int, seed: int, gate: str, strength: int):
    study, price = named(model, task, rest), price_of(model, rest, gate, strength)
    ids = np.zeros((*scores_of(*study, seed).shape[:-1], models.get(study[0]).top_k))
    if gate == "clairvoyant":
        moves = peeled(*study, seed)
        ids = np.array([[best(path, price) for path in layer] for layer in moves])
    return dict(price=price, ids=ids.astype(np.int32))


@functools.cache
def peeled(model: str, task: str, rest: str, seed: int):
    """For every layer and batch: (weight lost so far, largest load in tokens, choices) after each
    move, lightest choice of the busiest node first, to the idlest node."""
    share, costs, _, _ = machine_of(model, seed)
    nodes = np.argmax(np.asarray(share), axis=-1)
    scores = scores_of(model, task, rest, seed)
    return [[peel(s, node, costs.top_k) for s in layer] for layer, node in zip(scores, nodes)]


def peel(scores, node, top_k: int):
    ids = np.argsort(-scores, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    weights /= weights.sum(-1, keepdims=True)
    here, free = node[ids], np.arange(top_k) > 0  # favorites stay
    load = np.bincount(here.ravel(), minlength=node.max() + 1)
    free = np.broadcast_to(free, ids.shape).copy()
    path = [(0.0, load.max(), ids.copy())]
    while (movable := (here == (busy := load.argmax())) & free).any():
        token, rank = divmod(int(np.where(movable, weights, np.inf).argmin()), top_k)
        order = np.argsort(load[node], kind="stable")
        expert = next(e for e in order if e not in ids[token])
        if load[node[expert]] + 1 >= load[busy]:
            break
        load[busy] -= 1
        load[node[expert]] += 1
        ids[token, rank], here[token, rank], free[token, rank] = expert, node[expert], False
        path.append((path[-1][0] + weights[token, rank], load.max(), ids.copy()))
    return path


def best(path, price: float):
    """The choices where a token of makespan costs as much as the weight that it takes."""
    return min(path, key=lambda at: at[0] + price * at[1])[2]


def chosen(gate: str, scores, share, costs, price):
    """(choices of a batch, seconds that the gate takes)."""
    rate = price / costs.token_time
    if gate == "published":
        rates = gating.Coefficients(-rate, PUBLISHED[1] / PUBLISHED[0] * -rate, 0.0)
        found = gating.tuned_gate(scores, share, costs, rates, gating.GateForm())
        return found.expert_ids, costs.gate_time(BATCH, 1)
    rates = gating.Coefficients(-rate, 0.0, SOFTNESS * costs.token_time)
    extra = VISIT_PRICE * gating.own_visits(scores, share, costs.top_k)
    selection = gating.lost_weights(scores, costs.top_k)
    options = dict(selection_scores=selection, extra_cost=extra)
    found = gating.tuned_gate(scores, share, costs, rates, FORM, **options)
    return found.expert_ids, costs.gate_time(BATCH, FORM.chunk)


def gated(config, key):
    """Numbers of one gate on some batches of a trace."""
    costs = config["costs"]
    alone = dataclasses.replace(costs, visit_time=jnp.zeros(()))
    nodes = jnp.arange(config["share"].shape[-1])

    def layer_time(ids, share):
        options = dict(bytes_per_token=config["message_bytes"], max_messages=ids.size)
        messages = noc.expert_traffic(ids, share, nodes, **options)
        return alone.layer_time(ids, share) + noc.communication_time(config["network"], messages)

    def batch(scores, share, ids):
        weights, old = jax.lax.top_k(scores, costs.top_k)
        new, own = ids, 0.0
        if config["gate"] != "clairvoyant":
            new, own = chosen(config["gate"], scores, share, costs, config["price"])
        return layer_time(new, share) + own, layer_time(old, share), new, old, weights

    over = jax.vmap(jax.vmap(batch, (0, None, 0)))
    fast, slow, new, old, weights = over(config["scores"], config["share"], config["ids"])
    return dict(
        speedup=slow.sum() / fast.sum(),
        time_us=1e6 * fast.mean(1).sum(),
        mass=metrics.changed_weight_mass(old, weights, new),
        overlap=metrics.top_k_overlap(old, new),
        retention=metrics.top1_retention(old, new),
        changed=metrics.changed_ratio(old, new),
    )


SWEEP = Sweep(
    [
        # By number, so that whatever has one shape shares a program.
        Axis("model", {name: np.int32(i) for i, name in enumerate(TASKS)}),
        Axis("task", {name: np.int32(i) for i, name in enumerate(ALL_TASKS)}),
        Axis("rest", {name: np.int32(i) for i, name in enumerate(RESTS)}),
        Axis("gate", GATES, static=True),
        Axis("strength", range(STRENGTHS)),
    ],
    gated,
    seeds=3,
    prepare=(prepare_trace, prepare_gate),
    about=lambda model, rest, gate, strength: dict(price=price_of(model, rest, gate, strength)),
    where=lambda model, task: ALL_TASKS[task] in TASKS[list(TASKS)[model]],
    width=8,
)


def summary(table: dict[str, np.ndarray]) -> str:
    """Lost weight at equal speed-up, as a share of that of the published form."""
    lines = [
        "weight lost at a speed-up of the MoE layers, mean over seeds; (share of the published"
    ]
    lines += ["form's, lowest and highest of the seeds); overlap at 1.1; top-1 kept, * looked at"]
    studies = dict.fromkeys(zip(table["model"], table["task"], table["rest"]))
    for model, task, rest in studies:
        here = (table["model"] == model) & (table["task"] == task) & (table["rest"] == rest)
        lines += ["", f"{model}, {task}{'*' * (task in SEEN)}, other experts: {rest}"]
        base = losses(table, here & (table["gate"] == "published"))
        for gate in GATES:
            mine = here & (table["gate"] == gate)
            if not mine.any():
                continue
            found = losses(table, mine)
            cells = [cell(*pair) for pair in zip(found.T, base.T)]
            kept = f"{table['retention'][mine].min():>10.1%}"
            at = metrics.loss_at(table["speedup"][mine], 1 - table["overlap"][mine], 1.1)
            lines.append(f"  {gate:<13}" + "".join(cells) + f"{1 - at:>8.1%}" + kept)
    return "\n".join(lines)


def losses(table, rows) -> np.ndarray:
    """[seeds, speed-ups]."""
    of = [rows & (table["seed"] == seed) for seed in np.unique(table["seed"])]
    at = lambda rows, x: metrics.loss_at(table["speedup"][rows], table["mass"][rows], x)
    return np.array([[at(rows, x) for x in SPEEDUPS] for rows in of])


def cell(found, base) -> str:
    share = found / base
    return f"{found.mean():>9.4f} ({share.mean():3.0%}, {share.min():.0%}-{share.max():.0%})".rjust(
        26
    )


def figures(table: dict[str, np.ndarray]) -> dict[str, Any]:
    """Lost weight against speed-up, one panel for each model and its last task."""
    figure, axes = plot.figure(1, len(TASKS), (4.2 * len(TASKS), 3.6))
    for (model, tasks), ax in zip(TASKS.items(), axes[0]):
        keep = (table["model"] == model) & (table["task"] == tasks[-1]) & (table["seed"] == 0)
        keep &= (table["rest"] == "nothing") & (table["speedup"] > 0.99)
        of = {name: table[name][keep] for name in ("gate", "speedup", "mass")}
        if not keep.any():
            continue
        title = f"{model}, {tasks[-1]}"
        what = dict(loss="mass", label="Lost combine weight", title=title, legend=False)
        plot.speedup_fidelity(of, ax, **what)
    if not any(ax.has_data() for ax in axes[0]):
        return {}
    plot.shared_legend(figure, axes)
    return {"gating_traces": figure}
