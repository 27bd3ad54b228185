"""What does a model lose when its tokens are routed for the machine's sake, and what can be saved?

The published gate, the same with every token's favorite kept, with a look ahead at the batch, and
with a soft makespan whose coefficients are tuned by gradient: speed-up of the MoE layers against
what it costs moejax's own model ("zoo", costed with the sizes of Qwen3-30B-A3B) in KL on held-out
text, also with tokens taken in chunks. Coefficients are fitted on text of the first half of the
held-out files (router scores, and KL to second order by `weight_slopes`) and judged in the running
model on text of the second half. `gating_tuning.py` has the dense grid against tuning each layer,
`gating_traces.py` other models.

4 x 4 mesh, 32 tokens from different sequences at a time. Times are of the busiest node and of
simulated communication (dispatch as gather); every gate pays for its own sequential steps.

    moejax run sweeps/gating_pareto.py
"""

import dataclasses
import functools
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax import gating, hardware, metrics, models, noc, placement, plot, zoo
from moejax.sweep import Axis, Sweep


COST_MODEL = "qwen3-30b-a3b"
SYSTEM = "nmp-4x4-5t-50g"
BATCH, LENGTH, CONTEXT = 32, 128, 64  # sequences; bytes of one; those run but not counted
PUBLISHED = (-3e4, -0.025)
SCALES = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0, 1.4, 2.0, 2.8, 4.0, 6.0, 9.0)
BUDGETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.0032)
GRID = 33
STEPS = dict(steps=40, batches_per_step=8, learning_rate=0.1)
SPEEDUPS = (1.05, 1.1, 1.2)
CHUNKS = (1, 2, 4, 8, 16, 32)
TEXTS, FIT = (0, 1, 2), (0,)


class Gate(NamedTuple):
    """Form of a gate (but for chunks), whether experts are split, how coefficients are found."""

    form: gating.GateForm
    split: bool
    by: str


GATES = {
    "published": Gate(gating.GateForm(), False, "ray"),
    "favorites kept": Gate(gating.GateForm(protect=1), False, "ray"),
    "looking ahead": Gate(gating.GateForm(protect=1, ahead=True), False, "ray"),
    "soft, tuned": Gate(gating.GateForm(protect=1, ahead=True, soft=True), False, "tune"),
    "best pair": Gate(gating.GateForm(protect=1), True, "grid"),
    "each layer": Gate(gating.GateForm(protect=1), True, "tune"),
}
CHUNKED = ("published", "soft, tuned")


class Machine(NamedTuple):
    """What a batch costs."""

    share: jax.Array  # [layers, experts, nodes]
    costs: gating.LayerCosts
    topology: noc.Topology
    message_bytes: float

    def layer_time(self, expert_ids, share, hosts: int):
        """s of computation and communication, both ways, of one batch in one layer. No expert lies
        on more than `hosts` nodes."""
        alone = dataclasses.replace(self.costs, visit_time=jnp.zeros(()))
        return alone.layer_time(expert_ids, share) + self.sent_time(expert_ids, share, hosts)

    def sent_time(self, expert_ids, share, hosts: int):
        options = dict(bytes_per_token=self.message_bytes, max_messages=hosts * expert_ids.size)
        messages = noc.expert_traffic(expert_ids, share, jnp.arange(share.shape[-1]), **options)
        return noc.communication_time(self.topology, messages)


class Text(NamedTuple):
    """Windows of bytes, and what the model makes of them as it is."""

    bytes: jax.Array  # [BATCH, LENGTH]
    logits: jax.Array  # [BATCH * LENGTH, 256]
    scores: jax.Array  # [layers, BATCH * LENGTH, experts]


def sizes_of_model() -> tuple[int, int, int]:  # layers, experts, top_k
    config = zoo.load().config
    return len(config.windows), config.num_experts, config.top_k


COUNTED = np.tile(np.arange(LENGTH) >= CONTEXT, BATCH)


@functools.cache
def read(half: int, shift: int) -> Text:
    """Windows from all over one half of the held-out text; each shift has windows of its own."""
    text = zoo.heldout()
    low, high = ((0, len(text) // 2), (len(text) // 2, len(text)))[half]
    starts = np.linspace(low, high - LENGTH * (len(TEXTS) + 1), BATCH).astype(int) + shift * LENGTH
    windows = jnp.asarray(np.stack([text[s : s + LENGTH] for s in starts]))
    record = eqx.filter_jit(lambda model, x: model.forward(x))(zoo.load(), windows)
    return Text(windows, record.logits, jax.nn.softmax(record.router_logits, axis=-1))


def fit_scores():
    """Router scores of the counted bytes that coefficients are fitted on."""
    counted = [read(0, shift).scores[:, np.flatnonzero(COUNTED)] for shift in FIT]
    return jnp.concatenate(counted, axis=1)


@functools.cache
def fit_slopes():
    """What `weight_slopes` finds for them."""
    layers, experts, top_k = sizes_of_model()

    @eqx.filter_jit
    def slopes(model, windows, key):
        def logits(extra):
            left = iter(extra)

            def gate(logits):
                scores = jax.nn.softmax(logits, axis=-1)
                ids = jax.lax.top_k(jax.lax.stop_gradient(scores), top_k)[1]
                chosen = scores * jax.nn.one_hot(ids, experts).sum(-2)
                weights = chosen / chosen.sum(-1, keepdims=True) + next(left)
                everyone = jnp.arange(experts, dtype=jnp.int32)
                return jnp.broadcast_to(everyone, weights.shape), weights

            return model.forward(windows, gate).logits

        return gating.weight_slopes(logits, (layers, windows.size, experts), key=key)

    one = lambda shift: slopes(zoo.load(), read(0, shift).bytes, jax.random.key(7 + shift))
    return jnp.concatenate([one(s)[:, :, np.flatnonzero(COUNTED)] for s in FIT], axis=2)


@functools.cache
def build(system: str, split: bool) -> Machine:
    """The machine with its placement: whole experts dealt to nodes, or the busier half of them in
    halves on two nodes, without which r_comm would not matter. Estimated communication, which
    tuning goes by, is scaled to the simulated one of the fit text."""
    chip, sizes = hardware.get(system), models.get(COST_MODEL)
    layers, experts, top_k = sizes_of_model()
    keys = jax.random.split(jax.random.key(0), layers)
    share = jnp.stack([placement.expert_parallel(experts, chip.num_nodes, key=k) for k in keys])
    ids = jax.lax.top_k(fit_scores(), top_k)[1]
    if split:
        counts = jax.nn.one_hot(ids, experts).sum((1, 2))
        busy = counts > jnp.median(counts, axis=-1, keepdims=True)
        share = jnp.where(busy[..., None], (share + jnp.roll(share, 5, axis=-1)) / 2, share)
    rates = dict(flops_per_s=chip.flops_per_s, bandwidth=chip.link_bandwidth)
    rates |= dict(gate_step_time=chip.gate_step_time, top_k=top_k)
    costs = gating.LayerCosts.published(sizes.hidden, sizes.moe_intermediate, **rates)
    network = noc.mesh(*chip.shape, bandwidth=chip.link_bandwidth)
    machine = Machine(share, costs, network, float(sizes.hidden))
    return machine._replace(costs=dataclasses.replace(costs, visit_time=visit_time(machine, ids)))


@eqx.filter_jit
def visit_time(machine: Machine, ids):
    """s of a visit with which the estimate has the mean of the simulation."""
    batches = ids.reshape(ids.shape[0], -1, BATCH, ids.shape[-1])
    only = dataclasses.replace(machine.costs, token_time=jnp.zeros(()))
    over = lambda f: jax.vmap(jax.vmap(f, (0, None)))(batches, machine.share).mean()
    simulated, estimated = over(lambda i, s: machine.sent_time(i, s, 2)), over(only.layer_time)
    return machine.costs.visit_time * simulated / estimated


def settings(gate: str, chunk: int) -> tuple[float, ...]:
    """Scales of the published coefficients, or budgets of nats; 0 is no penalty."""
    tuned = GATES[gate].by != "ray"
    values = (0.0, *BUDGETS) if tuned else SCALES
    return values if chunk == 1 else values[1::2] if tuned else values[3::2]


def fitted_on(machine: Machine, form):
    options = dict(batch=BATCH, key=jax.random.key(1), form=form)
    options |= dict(measure="model_kl", slopes=fit_slopes())
    return (fit_scores(), machine.share, machine.costs), options


def grid():
    """Both coefficients over GRID x GRID values, around what budgets choose."""
    comp = PUBLISHED[0] * np.geomspace(0.05, 30, GRID)
    comm = PUBLISHED[1] * np.geomspace(0.01, 10, GRID)
    pairs = [x.reshape(-1, 1).astype(np.float32) for x in np.meshgrid(comp, comm)]
    return gating.Coefficients(*pairs, np.zeros_like(pairs[0]))


@functools.cache
def found(gate: str, system: str):
    """(coefficients of each budget [layers], seconds with compilation, without, CPU without)."""
    form, machine = GATES[gate].form, build(system, GATES[gate].split)
    on, options = fitted_on(machine, form)

    def run():
        if GATES[gate].by == "tune":
            tuned = gating.tune(*on, BUDGETS, ray=PUBLISHED, **STEPS, **options)
            return tuned.coefficients
        pairs = grid()
        judged = gating.judge(*on, pairs, **options)
        fast, lost = np.asarray(judged.speedup), np.asarray(judged.loss)
        best = [int(np.argmax(np.where(lost <= budget, fast, 0))) for budget in BUDGETS]
        whole = lambda x: np.broadcast_to(x[best], (len(best), machine.share.shape[0]))
        return jax.tree.map(whole, pairs)

    spent = []
    for _ in range(2 if GATES[gate].split else 1):  # where it is compared, also compiled
        since = time.monotonic(), time.process_time()
        coefficients = jax.block_until_ready(run())
        spent.append((time.monotonic() - since[0], time.process_time() - since[1]))
    return jax.tree.map(np.asarray, coefficients), spent[0][0], *spent[-1]


def coefficients_of(gate: str, chunk: int, strength: int, system: str):
    """(coefficients [layers], what finding them took)."""
    layers = sizes_of_model()[0]
    setting = settings(gate, chunk)[strength]
    full = lambda x: np.full(layers, x, np.float32)
    if GATES[gate].by == "ray" or setting == 0:
        softness = 1e-6 if GATES[gate].form.soft else 0.0
        ray = gating.Coefficients(*(full(setting * r) for r in PUBLISHED), full(softness))
        return ray, (0.0, 0.0, 0.0)
    # Chunks take what was found without: their settings are other points of much the same line.
    coefficients, *spent = found(gate, system)
    return jax.tree.map(lambda x: x[BUDGETS.index(setting)], coefficients), tuple(spent)


def prepare_machine(gate: str, system: str):
    return dict(machine=build(system, GATES[gate].split))


def prepare_gate(gate: str, chunk: int, strength: int, system: str):
    return dict(coefficients=coefficients_of(gate, chunk, strength, system)[0])


def prepare_text(text: int):
    return dict(windows=read(1, text), model=zoo.load())


def about(gate: str, chunk: int, strength: int, system: str) -> dict[str, Any]:
    given, (whole, run, cpu) = coefficients_of(gate, chunk, strength, system)
    row = dict(setting=settings(gate, chunk)[strength], cost_model=COST_MODEL)
    row |= dict(r_comp=float(given.r_comp.mean()), r_comm=float(given.r_comm.mean()))
    return row | dict(first_search_s=whole, search_s=run, search_cpu_s=cpu)


def wanted(gate: str, chunk: int, strength: int) -> bool:
    return (chunk == 1 or gate in CHUNKED) and strength < len(settings(gate, chunk))


def gated(config, key):
    """Numbers of the gated model on one text."""
    form = GATES[config["gate"]].form._replace(chunk=config["chunk"])
    hosts = 2 if GATES[config["gate"]].split else 1
    machine, text = config["machine"], config["windows"]
    seen = []

    def gate(logits):
        share = machine.share[len(seen)]
        rates = jax.tree.map(lambda x: x[len(seen)], config["coefficients"])
        # All sequences at one position are a batch.
        scores = jax.nn.softmax(logits.reshape(BATCH, LENGTH, -1).swapaxes(0, 1), axis=-1)
        run = lambda scores: gating.tuned_gate(scores, share, machine.costs, rates, form)
        chosen = jax.vmap(run)(scores)
        original = jax.lax.top_k(scores, machine.costs.top_k)
        seen.append((chosen.expert_ids[CONTEXT:], *(x[CONTEXT:] for x in original)))
        back = lambda x: x.swapaxes(0, 1).reshape(BATCH * LENGTH, -1)
        return back(chosen.expert_ids), back(chosen.weights)

    adjusted = config["model"].forward(text.bytes, gate).logits
    new, weights, old = (jnp.stack(x) for x in zip(*seen))
    one = lambda ids, share: machine.layer_time(ids, share, hosts)
    time = lambda ids: jax.vmap(jax.vmap(one, (0, None)))(ids, machine.share).mean(1).sum()
    steps = new.shape[0] * machine.costs.gate_time(BATCH, form.chunk)
    slow, fast = time(old), time(new) + steps
    mask, targets = jnp.asarray(COUNTED), jnp.roll(text.bytes, -1, axis=1).ravel()
    scored = mask & (jnp.arange(text.bytes.size) % LENGTH < LENGTH - 1)
    both = text.logits, adjusted
    return dict(
        speedup=slow / fast,
        time_us=1e6 * fast,
        gate_us=1e6 * steps,
        kl=metrics.kl(*both, mask),
        ppl_ratio=metrics.ppl_ratio(*both, targets, scored),
        agreement=metrics.top1_agreement(*both, mask),
        rms_shift=metrics.rms_shift(*both, targets, scored),
        mass=metrics.changed_weight_mass(old, weights, new),
        overlap=metrics.top_k_overlap(old, new),
        retention=metrics.top1_retention(old, new),
    )


SWEEP = Sweep(
    [
        Axis("gate", [name for name, of in GATES.items() if not of.split], static=True),
        Axis("chunk", CHUNKS, static=True),
        Axis("system", [SYSTEM], static=True),
        Axis("text", TEXTS),
        Axis("strength", range(max(len(SCALES), len(BUDGETS) + 1))),
    ],
    gated,
    prepare=(prepare_machine, prepare_gate, prepare_text),
    about=about,
    where=wanted,
    width=4,
)


def settings_of(table: dict[str, np.ndarray], rows: np.ndarray):
    """(speed-up, KL) of each setting among `rows`, means over texts."""
    strengths = [rows & (table["strength"] == s) for s in np.unique(table["strength"][rows])]
    return tuple(np.array([table[n][s].mean() for s in strengths]) for n in ("speedup", "kl"))


def summary(table: dict[str, np.ndarray]) -> str:
    """KL at equal speed-up by gate and by chunk."""
    lines = ["KL in nats on held-out text at a speed-up (share of published's; of single texts)"]
    lines.append(f"  {'gate':<16}" + "".join(f"{x:>26.2f}" for x in SPEEDUPS) + "   top-1 kept")
    gate, whole = table["gate"], table["chunk"] == 1
    for name in dict.fromkeys(table["gate"]):
        mine = whole & (gate == name)
        if not mine.any():
            continue
        cells = [shares(table, mine, whole & (gate == "published"), x) for x in SPEEDUPS]
        kept = table["retention"][mine].min()
        lines.append(f"  {name:<16}" + "".join(f"{c:>26}" for c in cells) + f"{kept:>12.1%}")
    return "\n".join(lines + chunk_summary(table))


def shares(table, mine, base, speedup: float) -> str:
    """The loss at a speed-up, its share of another's, and that of the texts one by one."""
    at = lambda rows: metrics.loss_at(*settings_of(table, rows), speedup) if rows.any() else np.nan
    texts = [table["text"] == text for text in np.unique(table["text"])]
    (loss, other), each = (at(mine), at(base)), [at(mine & t) / at(base & t) for t in texts]
    return f"{loss:.5f} ({loss / other:.0%}, {min(each):.0%}-{max(each):.0%})"


def chunk_summary(table) -> list[str]:
    lines = [
        "",
        "in chunks of so many tokens: KL at a speed-up, and the gate's own share of the time",
    ]
    for name in CHUNKED:
        for size in CHUNKS:
            mine = (table["gate"] == name) & (table["chunk"] == size)
            if mine.any():
                points = settings_of(table, mine)
                cells = "".join(f"{metrics.loss_at(*points, x):>10.5f}" for x in SPEEDUPS)
                own = (table["gate_us"][mine] / table["time_us"][mine]).mean()
                lines.append(f"  {name:<16}{size:>4}{cells}{own:>10.1%}")
    return lines


def figures(table: dict[str, np.ndarray]) -> dict[str, Any]:
    """Loss against speed-up, the map of both coefficients, and the choices that a gate moves."""
    keep = (table["chunk"] == 1) & (table["setting"] > 0)
    points, made = dict(gate=[], published=[], speedup=[], kl=[]), {}
    for name in dict.fromkeys(table["gate"]):
        for strength in np.unique(table["strength"][keep & (table["gate"] == name)]):
            rows = keep & (table["gate"] == name) & (table["strength"] == strength)
            star = name == "published" and table["setting"][rows][0] == 1
            means = (table[column][rows].mean() for column in ("speedup", "kl"))
            for column, value in zip(points, (name, star, *means)):
                points[column].append(value)
    made["gating_pareto"], axes = plot.figure(1, 1, (6.4, 3.8))
    plot.speedup_fidelity(points, axes[0, 0], title="What speed costs the zoo model")
    on, options = fitted_on(build(SYSTEM, True), GATES["best pair"].form)
    pairs = grid()
    judged = gating.judge(*on, pairs, **options)
    values = dict(r_comp=pairs.r_comp[:, 0], r_comm=pairs.r_comm[:, 0], speedup=judged.speedup)
    near = sum(abs(np.log(values[n] / r)) for n, r in zip(("r_comp", "r_comm"), PUBLISHED))
    values |= dict(kl=np.log10(np.maximum(judged.loss, 1e-6)), published=near == near.min())
    made["gating_coefficients"], axes = plot.figure(1, 2, (9, 3.6))
    plot.coefficient_map(values, axes[0, 0], title="Speed-up of a shared pair")
    plot.coefficient_map(values, axes[0, 1], value="kl", label="log10 KL (nats)", title="Its KL")
    made["gating_moved"], axes = plot.figure(1, 2, (9, 3.6))
    for name, ax in zip(("published", "looking ahead"), axes[0]):
        plot.moved_choices(moved(GATES[name].form), ax, title=f"{name}: choices that moved")
    return made


def moved(form, layer: int = 2) -> dict[str, np.ndarray]:
    """Choices of one batch of held-out text, with the load of their node with original choices."""
    machine, scores = build(SYSTEM, False), read(1, 0).scores[layer]
    scores = scores.reshape(BATCH, LENGTH, -1)[:, CONTEXT]
    rates = gating.Coefficients(*(4 * r for r in PUBLISHED), 0.0)
    new = gating.tuned_gate(scores, machine.share[layer], machine.costs, rates, form).expert_ids
    old = jax.lax.top_k(scores, machine.costs.top_k)[1]
    chosen = lambda ids: np.asarray(jax.nn.one_hot(ids, scores.shape[-1]).sum(1))
    load = chosen(old).sum(0) @ machine.share[layer] * machine.costs.token_time
    load = np.broadcast_to(machine.share[layer] @ load, scores.shape)
    columns = (1e6 * load, scores, chosen(old), chosen(new))
    names = ("load_us", "score", "original", "adjusted")
    return {name: np.ravel(column) for name, column in zip(names, columns)}
