"""If a router may be trained for the machine, which training loses least?

moejax's own model is fine-tuned three ways from the shipped weights: with the usual load-balance
loss, with `hardware_penalty`, and with the gate in the loop, where every step routes as the gate
will. All see the same text in the same order. Then each is run with the gate looking ahead at
several strengths, and they are compared in loss on held-out text at equal speed-up of the MoE
layers over the shipped model as it is. Machine and costs are those of `gating_pareto.py`, with
estimated communication.

    moejax run sweeps/gating_training.py
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from moejax import gating, hardware, metrics, models, placement, plot, zoo
from moejax.sweep import Axis, Sweep


COST_MODEL, SYSTEM = "qwen3-30b-a3b", "nmp-4x4-5t-50g"
BATCH, GAMMA = 32, 0.19
PUBLISHED = (-3e4, -0.025)
SEQUENCES, LENGTH, CONTEXT = 4, 256, 128
STEPS, LEARNING_RATE = 120, 5e-5
WEIGHTS = {"shipped": 0.0, "load balance": 0.1, "hardware penalty": 0.1, "gate in the loop": 0.0}
SCALES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
FORM = gating.GateForm(protect=1, ahead=True)
SPEEDUPS = (1.05, 1.1, 1.2)


@functools.cache
def _machine():
    """(costs, placement [layers, experts, nodes])."""
    system, sizes, config = hardware.get(SYSTEM), models.get(COST_MODEL), zoo.load().config
    deal = lambda key: placement.expert_parallel(config.num_experts, system.num_nodes, key=key)
    costs = gating.LayerCosts.published(
        sizes.hidden,
        sizes.moe_intermediate,
        top_k=config.top_k,
        flops_per_s=system.flops_per_s,
        bandwidth=system.link_bandwidth,
        gamma=GAMMA,
        gate_step_time=system.gate_step_time,
    )
    return costs, jnp.stack(
        list(map(deal, jax.random.split(jax.random.key(0), len(config.windows))))
    )


def _gate(scale, order, seen):
    """A gate for `ByteMoE.forward` that deals tokens to batches in this order."""
    costs, share = _machine()

    def gate(logits):
        scores = jax.nn.softmax(logits, axis=-1)
        here = share[len(seen)]
        rates = gating.Coefficients(*(scale * r for r in PUBLISHED), 0.0)

        def batch(scores):
            chosen = gating.tuned_gate(scores, here, costs, rates, FORM)
            plain = jax.lax.top_k(scores, costs.top_k)[1]
            time = costs.layer_time(chosen.expert_ids, here) + costs.gate_time(BATCH, FORM.chunk)
            return chosen.expert_ids, chosen.weights, time, costs.layer_time(plain, here)

        ids, weights, time, before = jax.vmap(batch)(scores[order].reshape(-1, BATCH, len(here)))
        seen.append((time.mean(), before.mean()))
        back = lambda x: x.reshape(len(order), -1)[jnp.argsort(order)]
        return back(ids), back(weights)

    return gate


def _windows(split: str, number: int, seed: int) -> np.ndarray:
    text = np.frombuffer(b"\0".join(d.data for d in zoo.read(split).documents), np.uint8)
    starts = np.random.default_rng(seed).integers(0, len(text) - LENGTH - 1, number)
    return np.stack([text[s : s + LENGTH + 1] for s in starts]).astype(np.int32)


def _losses(record, targets):
    chosen = jnp.take_along_axis(record.logits, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(record.logits, axis=-1) - chosen


def _balance(record):
    """Experts x share of choices x mean probability, one if even (Switch, arXiv 2101.03961)."""
    p = jax.nn.softmax(record.router_logits, axis=-1)
    chosen = jax.nn.one_hot(record.expert_ids, p.shape[-1]).mean((1, 2))
    return p.shape[-1] * (chosen * p.mean(1)).sum(-1).mean()


def _penalty(record):
    costs, share = _machine()
    one = lambda logits, share: gating.hardware_penalty(logits, share, costs, temperature=0.5)[0]
    return jax.vmap(one)(record.router_logits, share).mean()


def _trained(way: str):
    """The model after training this way; the shipped one for no training."""
    _machine()  # made before anything is traced, and kept
    model = zoo.load()
    if way == "shipped":
        return model
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS, 0.1))
    state = optimizer.init(jax.tree.leaves(model))

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, state):
        tokens, order = inputs

        def objective(model):
            gate = _gate(2.0, order, []) if way == "gate in the loop" else None
            record = model.forward(tokens[:, :-1], gate)
            aux = {"load balance": _balance, "hardware penalty": _penalty}.get(way)
            loss = _losses(record, tokens[:, 1:].ravel()).mean()
            return loss + (0 if aux is None else WEIGHTS[way] * aux(record))

        slope = eqx.filter_grad(objective)(model)
        update, state = optimizer.update(jax.tree.leaves(slope), state)
        return eqx.apply_updates(
            model, jax.tree.unflatten(jax.tree.structure(model), update)
        ), state

    model = jax.tree.map(jnp.copy, model)
    texts = _windows("train", STEPS * SEQUENCES, 0).reshape(STEPS, SEQUENCES, -1)
    for number, text in enumerate(texts):
        order = jax.random.permutation(jax.random.key(number), SEQUENCES * LENGTH)
        model, state = step((jnp.asarray(text), order), model, state)
    return model


def prepare(training: str) -> dict[str, Any]:
    text = _windows("heldout", BATCH, 1)
    return dict(model=_trained(training), shipped=zoo.load(), heldout=text)


def judged(config, key):
    """Loss of a model on held-out text, and speed-up over the shipped one as it is."""
    text = config["heldout"]
    # Position by position: a batch is one token of each of so many sequences.
    order = jnp.arange(text.shape[0] * LENGTH).reshape(-1, LENGTH).T.ravel()

    def run(model, scale):
        seen = []
        record = model.forward(text[:, :-1], _gate(scale, order, seen))
        return record, sum(s[0] for s in seen), sum(s[1] for s in seen)

    record, time, _ = run(config["model"], config["scale"])
    before = run(config["shipped"], 0.0)[2]
    losses = _losses(record, text[:, 1:].ravel()).reshape(-1, LENGTH)[:, CONTEXT:]
    return dict(loss_nats=losses.mean(), time_us=1e6 * time, speedup=before / time)


SWEEP = Sweep(
    [Axis("training", tuple(WEIGHTS), static=True), Axis("scale", SCALES)],
    judged,
    prepare=prepare,
    about=lambda training: dict(steps=0 if training == "shipped" else STEPS),
    width=3,
)


def summary(table: dict[str, np.ndarray]) -> str:
    """Held-out loss at equal speed-up, by training."""
    lines = ["", "nats per byte on held-out text at a speed-up of the MoE layers"]
    lines.append(f"  {'training':<20}" + "".join(f"{x:>10.2f}" for x in SPEEDUPS) + "   gate off")
    for way in dict.fromkeys(table["training"]):
        rows = table["training"] == way
        speed, loss = table["speedup"][rows], table["loss_nats"][rows]
        found = [metrics.loss_at(speed, loss, x) for x in SPEEDUPS]
        cells = "".join(f"{v:>10.4f}" if v == v else f"{'-':>10}" for v in found)
        off = rows & (table["scale"] == 0)
        loss, speed = (table[name][off][0] for name in ("loss_nats", "speedup"))
        lines.append(f"  {way:<20}{cells}{loss:>9.4f} at {speed:.3f}")
    return "\n".join(lines)


def figures(table: dict[str, np.ndarray]) -> dict[str, Any]:
    """Held-out loss against speed-up, by training."""
    figure, axes = plot.figure(1, 1, (7, 3.6))
    label, title = "Held-out loss (nats per byte)", "Fine-tuned three ways"
    of = table | dict(gate=table["training"])
    plot.speedup_fidelity(of, axes[0, 0], loss="loss_nats", label=label, title=title)
    return {"gating_training": figure}
