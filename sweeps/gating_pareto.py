"""What does a model lose when its tokens are routed for the machine's sake, and what can be saved?

The published gate, the same with every token's favorite kept, with a look ahead at the batch, and
with a soft makespan whose coefficients are tuned by gradient: speed-up of the MoE layers against
what it costs moejax's own model ("zoo", costed with the sizes of Qwen3-30B-A3B) in KL on
held-out text. Coefficients are fitted on the router scores of the first half of the held-out files
and judged on text of the second. `gating_traces.py` is the same for traces of other models.

4 x 4 mesh, 5 TFLOP/s and 50 GB/s, 32 tokens from different sequences at a time, whole experts dealt
to nodes. Times are of the busiest node and of simulated communication (dispatch as gather), and
every gate pays for its own sequential steps.

    moejax run sweeps/gating_pareto.py
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax import gating, hardware, metrics, models, noc, placement, plot, zoo


COST_MODEL = "qwen3-30b-a3b"
SYSTEM = "nmp-4x4-5t-50g"
BATCH = 32
GATE_STEP_TIME = 10e-9
"""s of one step of the gate: some ten cycles of a compare-and-select pipeline at 1 GHz."""
GAMMA = 0.19
"""Simulated over estimated communication of DeepSeek-V2-Lite on 4 x 4, from the authors' logs."""
PUBLISHED = (-3e4, -0.025)
SCALES = (0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 6.5, 9.0)
BUDGETS = (0.001, 0.002, 0.004, 0.007, 0.011, 0.016, 0.025)
LENGTH, CONTEXT = 128, 64  # bytes of a sequence, of which so many are run but not counted
FIT_TOKENS = 1024
STEPS = 40
GRID = 20
SPEEDUPS = (1.05, 1.1, 1.2)
CHUNKS, CHUNK_SCALE = (1, 2, 4, 8, 16, 32), 2.0

NUMBERS = (
    "speedup", "time_us", "kl", "ppl_ratio", "agreement", "mass", "overlap", "retention",
    "fit_speedup", "fit_mass",
)  # fmt: skip

FORMS = {
    "published": gating.GateForm(),
    "favorites kept": gating.GateForm(protect=1),
    "looking ahead": gating.GateForm(protect=1, ahead=True),
    "soft": gating.GateForm(protect=1, ahead=True, soft=True),
    "soft, chunks of 4": gating.GateForm(protect=1, chunk=4, ahead=True, soft=True),
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a batch costs. `share` [layers, experts, nodes]."""

    share: jax.Array
    costs: Any
    topology: Any
    message_bytes: float
    hosts: int = 1  # nodes that hold a part of an expert, at most

    @classmethod
    def of(cls, layers: int, experts: int, top_k: int) -> "Machine":
        system, sizes = hardware.get(SYSTEM), models.get(COST_MODEL)
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
        return cls(
            jnp.stack([deal(key) for key in jax.random.split(jax.random.key(0), layers)]),
            costs,
            noc.mesh(*system.shape, bandwidth=system.link_bandwidth),
            float(sizes.hidden),
        )

    def layer_time(self, expert_ids, share):
        """s of computation and communication, both ways, of one batch in one layer."""
        nodes = self.share.shape[-1]
        alone = dataclasses.replace(self.costs, visit_time=jnp.zeros(()))
        messages = noc.expert_traffic(
            expert_ids,
            share,
            jnp.arange(nodes),
            bytes_per_token=self.message_bytes,
            max_messages=self.hosts * expert_ids.size,
        )
        return alone.layer_time(expert_ids, share) + noc.communication_time(self.topology, messages)


def routed(scores, machine: Machine, coefficients, form):
    """Choices [batches, batch, top_k] of one layer for scores [batches, batch, experts], and sums
    of times over batches: (with this gate and its steps, original)."""

    def one(scores, share, coefficients):
        result = gating.tuned_gate(scores, share, machine.costs, coefficients, form)
        ids = jax.lax.top_k(scores, machine.costs.top_k)[1]
        gate = machine.costs.gate_time(scores.shape[0], form.chunk)
        times = machine.layer_time(result.expert_ids, share), machine.layer_time(ids, share)
        return result, ids, times[0] + gate, times[1]

    return jax.vmap(one, (0, None, None))(scores, machine.share, coefficients)


def rows(*, trace: str | None = None, progress=None) -> Iterator[list[dict[str, Any]]]:
    """One row per study, gate and coefficients."""
    if trace is not None:
        raise ValueError("gating_pareto gates a model on text: see gating_traces for traces")
    real = os.environ.get("MOEJAX_DATA")
    parts = [functools.partial(_zoo, name) for name in FORMS]
    parts += [_grid] + (
        [functools.partial(_real, Path(real), name) for name in FORMS] if real else []
    )
    for done, part in enumerate(parts):
        if progress is not None:
            progress(done, len(parts))
        yield part()
    if progress is not None:
        progress(len(parts), len(parts))


@functools.cache
def _text():
    """(fit, held-out) windows [BATCH, LENGTH], of files in the first and the second half."""
    text = zoo.heldout()
    half = len(text) // 2
    cut = lambda low, high: np.linspace(low, high - LENGTH, BATCH).astype(int)
    windows = lambda starts: jnp.asarray(np.stack([text[s : s + LENGTH] for s in starts]))
    return windows(cut(0, half)), windows(cut(half, len(text)))


@functools.cache
def _zoo_machine() -> Machine:
    config = zoo.load().config
    return Machine.of(len(config.windows), config.num_experts, config.top_k)


@functools.cache
def _original(which: int):
    """The model's own (logits, scores of counted tokens [layers, tokens, experts])."""
    record = eqx.filter_jit(lambda model, x: model.forward(x))(zoo.load(), _text()[which])
    scores = jax.nn.softmax(record.router_logits, axis=-1)
    return record.logits, scores[:, np.flatnonzero(_counted())]


def _counted() -> np.ndarray:
    return np.tile(np.arange(LENGTH) >= CONTEXT, BATCH)


@functools.cache
def _in_model(form, hosts: int = 1):
    """Jitted (coefficients [layers], text [BATCH, LENGTH]) -> numbers of the gated zoo model."""
    machine = dataclasses.replace(_zoo_machine(), hosts=hosts)

    @eqx.filter_jit
    def run(model, coefficients, text, original, share):
        seen = []

        def gate(logits):
            layer = len(seen)
            here = jax.tree.map(lambda x: x[layer], coefficients)
            placed = dataclasses.replace(machine, share=share[layer])
            # All sequences at one position are a batch.
            scores = jax.nn.softmax(logits.reshape(BATCH, LENGTH, -1).swapaxes(0, 1), axis=-1)
            result, ids, time, before = routed(scores, placed, here, form)
            counted = lambda x: x[CONTEXT:]
            kept = metrics.changed_weight_mass, metrics.top_k_overlap
            weights = jnp.take_along_axis(scores, ids, axis=-1)
            new, old = counted(result.expert_ids), counted(ids)
            seen.append(
                dict(
                    time=counted(time).mean(),
                    before=counted(before).mean(),
                    mass=kept[0](old, counted(weights), new),
                    overlap=kept[1](old, new),
                    retention=metrics.top1_retention(old, new),
                )
            )
            back = lambda x: x.swapaxes(0, 1).reshape(BATCH * LENGTH, -1)
            return back(result.expert_ids), back(result.weights)

        adjusted = model.forward(text, gate).logits
        mask, targets = jnp.asarray(_counted()), jnp.roll(text, -1, axis=1).ravel()
        scored = mask & (jnp.arange(text.size) % LENGTH < LENGTH - 1)
        total = lambda name: sum(layer[name] for layer in seen)
        return dict(
            speedup=total("before") / total("time"),
            time_us=1e6 * total("time"),
            kl=metrics.kl(original, adjusted, mask),
            ppl_ratio=metrics.ppl_ratio(original, adjusted, targets, scored),
            agreement=metrics.top1_agreement(original, adjusted, mask),
            mass=total("mass") / len(seen),
            overlap=total("overlap") / len(seen),
            retention=total("retention") / len(seen),
        )

    given = lambda which: (_text()[which], _original(which)[0])
    return lambda c, which, share=machine.share: run(zoo.load(), c, *given(which), share)


def _on_ray(scale: float, layers: int) -> gating.Coefficients:
    full = lambda x: jnp.full(layers, x)
    r_comp, r_comm = (scale * r for r in PUBLISHED)
    return gating.Coefficients(full(r_comp), full(r_comm), full(0.0))


def _candidates(form, scores, machine: Machine):
    """(label, scale or budget, per layer, coefficients, seconds) of a form's settings."""
    layers = machine.share.shape[0]
    if not form.soft:
        return [(scale, _on_ray(scale, layers), False, 0.0) for scale in SCALES]
    on = scores, machine.share, machine.costs, BUDGETS
    kinds = dict(batch=BATCH, key=jax.random.key(1), form=form, ray=PUBLISHED, steps=STEPS)
    found, spent = _timed(lambda: gating.tune(*on, **kinds))
    pick = lambda i: jax.tree.map(lambda x: x[i], found.coefficients)
    tuned = [(budget, pick(i), True, spent) for i, budget in enumerate(BUDGETS)]
    return [(0.0, _on_ray(0.0, layers)._replace(softness=pick(0).softness), True, 0.0), *tuned]


def _row(study, name, form, setting, coefficients, per_layer, spent, numbers) -> dict[str, Any]:
    row = dict(study=study, gate=name, chunk=form.chunk, setting=float(setting))
    row |= dict(per_layer=per_layer, tuning_s=float(spent))
    row |= dict(r_comp=float(coefficients.r_comp.mean()), r_comm=float(coefficients.r_comm.mean()))
    unknown = dict.fromkeys(NUMBERS, float("nan"))
    return row | unknown | {key: float(value) for key, value in numbers.items()}


def _zoo(name: str) -> list[dict[str, Any]]:
    form, machine = FORMS[name], _zoo_machine()
    scores = _original(0)[1][:, :: max(1, BATCH * (LENGTH - CONTEXT) // FIT_TOKENS)]
    run = _in_model(form)
    found = []
    for setting, coefficients, per_layer, spent in _candidates(form, scores, machine):
        numbers = run(coefficients, 1)
        found.append(_row("zoo", name, form, setting, coefficients, per_layer, spent, numbers))
    return found


def _chunks() -> list[dict[str, Any]]:
    """The published gate with tokens in chunks: fewer steps of the gate, and more blindness."""
    layers = _zoo_machine().share.shape[0]
    found = []
    for chunk in CHUNKS:
        form, given = gating.GateForm(chunk=chunk), _on_ray(CHUNK_SCALE, layers)
        numbers = _in_model(form)(given, 1)
        found.append(_row("chunk", "published", form, CHUNK_SCALE, given, False, 0.0, numbers))
    return found


def _split(machine: Machine, scores) -> jax.Array:
    """The placement with each layer's busier half of experts in halves, each on a second node."""
    top = jax.lax.top_k(scores, machine.costs.top_k)[1]
    counts = jax.nn.one_hot(top, scores.shape[-1]).sum((1, 2))
    busy = counts > jnp.median(counts, axis=-1, keepdims=True)
    second = jnp.roll(machine.share, 5, axis=-1)
    return jnp.where(busy[..., None], (machine.share + second) / 2, machine.share)


def _kl_of_layers(run, share) -> jax.Array:
    """KL for each unit of weight lost in each layer, on fit text and relative to all together."""
    layers = share.shape[0]
    only = lambda i: jax.tree.map(lambda x: x * (jnp.arange(layers) == i), _on_ray(2.0, layers))
    found = [run(only(layer), 0, share) for layer in range(layers)]
    price = jnp.stack([numbers["kl"] / numbers["mass"] for numbers in found])
    return price / price.sum()


def _timed(run):
    since = time.monotonic()
    return jax.block_until_ready(run()), time.monotonic() - since


def _grid() -> list[dict[str, Any]]:
    """Both coefficients over a dense grid, shared by all layers, against tuning each layer's.

    With split experts, for else r_comm would change nothing. Both are chosen on the fit scores;
    what a budget chooses is run in the model on held-out text.
    """
    machine, form = _zoo_machine(), FORMS["favorites kept"]
    fit = _original(0)[1][:, :: BATCH * (LENGTH - CONTEXT) // FIT_TOKENS]
    share, layers = _split(machine, fit), machine.share.shape[0]
    run = _in_model(form, 2)
    options = dict(batch=BATCH, key=jax.random.key(2), form=form)
    options |= dict(layer_weight=_kl_of_layers(run, share))
    comp, comm = (r * np.geomspace(0.02, 8, GRID) for r in PUBLISHED)
    pairs = [x.reshape(-1, 1) for x in np.meshgrid(comp, comm)]
    shared = gating.Coefficients(*pairs, np.zeros_like(pairs[0]))
    on = fit, share, machine.costs
    judged, spent = _timed(lambda: gating.judge(*on, shared, **options))
    options |= dict(ray=PUBLISHED, steps=STEPS)
    tuned, tuning = _timed(lambda: gating.tune(*on, BUDGETS, **options))
    found = []

    def add(name, setting, given, fitted, spent, **extra):
        full = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), layers), given)
        numbers = dict(fit_speedup=fitted[0], fit_mass=fitted[1])
        numbers |= run(full, 1, share) if extra else {}
        found.append(_row("grid", name, form, setting, full, name == "each layer", spent, numbers))

    fast, lost = np.asarray(judged.speedup), np.asarray(judged.loss)
    for i in range(len(fast)):
        given = jax.tree.map(lambda x, i=i: x[i], shared)
        add("shared pair", i, given, (fast[i], lost[i]), spent)
    for i, budget in enumerate(BUDGETS):
        given = jax.tree.map(lambda x, i=i: x[i], tuned.coefficients)
        fitted = tuned.fit.speedup[i], tuned.fit.loss[i]
        add("each layer", budget, given, fitted, tuning, model=True)
        fits = np.where(lost <= budget, fast, 0)
        if fits.any():
            best = int(np.argmax(fits))
            given = jax.tree.map(lambda x, best=best: x[best], shared)
            add("best pair", budget, given, (fast[best], lost[best]), spent, model=True)
    return found


def at_speedup(rows: list[dict[str, Any]], loss: str, speedup: float) -> float:
    """The loss where a gate's best settings, joined by lines, reach a speed-up; NaN beyond them."""
    points = sorted((row["speedup"], row[loss]) for row in rows)
    front = [p for i, p in enumerate(points) if all(p[1] <= q[1] for q in points[i + 1 :])]
    x, y = zip(*front)
    return float(np.interp(speedup, x, y, right=np.nan))


def summary(rows: list[dict[str, Any]]) -> str:
    """Losses at equal speed-up, gate by gate, and how the dense grid compares with tuning."""
    lines = []
    for study in dict.fromkeys(row["study"] for row in rows if row["study"] == "zoo"):
        of = [row for row in rows if row["study"] == study]
        loss, what = ("kl", "KL in nats") if study == "zoo" else ("mass", "lost weight")
        lines += ["", f"{study}: {what} at a speed-up of the MoE layers, share of published"]
        lines.append(f"  {'gate':<22}" + "".join(f"{x:>18.2f}" for x in SPEEDUPS) + "   top-1 kept")
        gates = {name: [row for row in of if row["gate"] == name] for name in FORMS}
        base = [at_speedup(gates["published"], loss, x) for x in SPEEDUPS]
        for name, mine in gates.items():
            found = [at_speedup(mine, loss, x) for x in SPEEDUPS]
            cells = [f"{y:.5f} ({y / b:4.0%})" if y == y else "-" for y, b in zip(found, base)]
            kept = min(row["retention"] for row in mine)
            lines.append(f"  {name:<22}" + "".join(f"{c:>18}" for c in cells) + f"{kept:>12.1%}")
    for row in (row for row in rows if row["study"] == "chunk"):
        lines.append(
            f"  published x {row['setting']:g}, chunks of {row['chunk']:>2}: speed-up "
            f"{row['speedup']:.3f}, KL {row['kl']:.5f}"
        )
    return "\n".join(lines + _grid_summary([row for row in rows if row["study"] == "grid"]))


def _grid_summary(rows: list[dict[str, Any]]) -> list[str]:
    by = {name: [r for r in rows if r["gate"] == name] for name in ("best pair", "each layer")}
    if not all(by.values()):
        return []
    number = sum(row["gate"] == "shared pair" for row in rows)
    times = [by[name][0]["tuning_s"] for name in by]
    lines = [
        "",
        f"best of {number} shared pairs ({times[0]:.1f} s on scores) and each layer tuned by",
    ]
    lines[-1] += f" gradient ({times[1]:.1f} s), on held-out text:"
    for name, mine in by.items():
        cells = [f"{row['speedup']:.3f} at KL {row['kl']:.5f}" for row in mine]
        lines.append(f"  {name:<12}" + ", ".join(cells))
    for pair in by["best pair"]:
        points = sorted((row["kl"], row["speedup"]) for row in by["each layer"])
        same = np.interp(pair["kl"], *zip(*points))
        lines.append(f"  at KL {pair['kl']:.5f}: pair {pair['speedup']:.4f}, layers {same:.4f}")
    return lines


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Loss against speed-up of every study, and the map of both coefficients."""
    studies = list(dict.fromkeys(row["study"] for row in rows if row["study"] == "zoo"))
    fronts, axes = plot.figure(1, len(studies), (4.4 * len(studies), 3.6))
    for study, ax in zip(studies, axes[0]):
        of = [row for row in rows if row["study"] == study]
        table = {name: np.array([row[name] for row in of]) for name in of[0]}
        table["published"] = (table["gate"] == "published") & (table["setting"] == 1)
        loss = ("kl", "KL (nats)") if study == "zoo" else ("mass", "Lost combine weight")
        plot.speedup_fidelity(table, ax, loss=loss[0], label=loss[1], title=study, legend=False)
    plot.shared_legend(fronts, axes)
    made = {"gating_pareto": fronts}
    grid = [row for row in rows if row["gate"] == "shared pair"]
    if grid:
        table = {name: np.array([row[name] for row in grid]) for name in grid[0]}
        made["coefficients"], axes = plot.figure(1, 2, (9, 3.6))
        plot.coefficient_map(table, axes[0, 0], value="fit_speedup", label="Speed-up")
        plot.coefficient_map(table, axes[0, 1], value="fit_mass", label="Lost weight", title="")
    return made
