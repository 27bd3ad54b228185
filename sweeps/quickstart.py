"""What does splitting experts between GPU and HBM-PIM gain, and for whom?

Seven policies on the real routing of moejax's own model ("zoo", costed with the sizes of
Qwen3-30B-A3B, column `cost_model`) and on three production-size models, each on Sieve's system for
it (B200 with HBM-PIM), on the same with a decision that takes no time instead of the published
20 us, and on as many H200; batch sizes 1 to 256. Routing of the production models is synthetic,
calibrated to Sieve's published statistics. With `--trace FILE` it is drawn from a measured trace,
and the model is the trace's own. Policies and systems see the same draws, seed by seed, so ratios
are paired.

    moejax run sweeps/quickstart.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moejax as mj
from moejax import hardware, models, plot, routing, serving, zoo
from moejax.sweep import Axis, Sweep


ZOO_COST_MODEL = "qwen3-30b-a3b"
CASES = {  # GPUs as in Sieve
    "zoo": 1,
    "gpt-oss-120b": 4,
    "qwen3-30b-a3b": 1,
    "qwen3.5-397b-a17b": 8,
}
VARIANTS = {
    "b200": ("{}xb200-hbm-pim", {}),
    "b200, free decision": ("{}xb200-hbm-pim", {"scheduler_time": 0.0}),
    "h200": ("{}xh200-hbm-pim", {}),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512
SEEDS = 8
POLICIES = (
    "no_exp", "all_exp", "few_tokens", "pimoe_threshold", "pimoe_channel", "sieve",
    "sieve_no_attention",
)  # fmt: skip
SHOWN = (8, 64, 256)
BINS = ("share_1", "share_2", "share_3_4", "share_more", "active")
FRONT = ("interactivity_tok_s", "throughput_per_gpu_tok_s")


def SWEEP(*, trace: str | None = None) -> Sweep:
    """One call draws a batch of the largest size; systems, batch sizes and policies share it."""
    cases = {case["model"].name: case for case in _cases(trace)}
    measured = next(iter(cases.values()))["trace"] if trace else None
    return Sweep(
        [
            Axis("model", cases),
            Axis("variant", list(VARIANTS), inner=True),
            Axis("batch", _batches(measured), static=True, inner=True),
            Axis("policy", list(POLICIES), inner=True),
        ],
        reports,
        seeds=SEEDS,
        about=about,
        columns=columns,
        width=1,
    )


def _cases(path: str | None) -> list[dict[str, Any]]:
    """Model, trace or None, the systems stacked, and whose sizes it is costed with."""
    if path is None:
        return [_case(name, num_gpus) for name, num_gpus in CASES.items()]
    trace = routing.load(path)
    if trace.model not in models.MODELS:
        raise ValueError(f"{path}: no sizes known for its model, {trace.model or 'unnamed'}")
    model = models.get(trace.model)
    # Enough GPUs to leave half of an H200 to the cache.
    fits = lambda num_gpus: float(model.weight_bytes) / num_gpus < 70e9
    num_gpus = next(filter(fits, (1, 2, 4, 8)), 16)
    return [_study(model, num_gpus, trace, model.name)]


def _case(name: str, num_gpus: int) -> dict[str, Any]:
    if name != "zoo":
        return _study(models.get(name), num_gpus, None, name)
    # The zoo model's own experts are too small for a B200: it has as many as it has, of the sizes
    # of another model.
    trace, shapes = zoo.trace(), models.get(ZOO_COST_MODEL)
    model = shapes.replace(
        name=name,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        layers=shapes.layers[: trace.num_layers],
    )
    return _study(model, num_gpus, trace, ZOO_COST_MODEL)


def _study(model, num_gpus: int, trace, cost_model: str) -> dict[str, Any]:
    systems = hardware.stack(list(_systems(num_gpus).values()))
    return dict(model=model, trace=trace, systems=systems, cost_model=cost_model, gpus=num_gpus)


def _systems(num_gpus: int) -> dict[str, hardware.System]:
    made = {}
    for variant, (name, changes) in VARIANTS.items():
        made[variant] = hardware.get(name.format(num_gpus)).replace(**changes)
    return made


def _batches(trace: routing.RoutingTrace | None) -> list[int]:
    most = BATCHES[-1] if trace is None else int(np.count_nonzero(trace.valid))
    return [batch for batch in BATCHES if batch <= most]


def _workload(batch, max_batch: int, trace: routing.RoutingTrace | None) -> mj.Workload:
    reuse = trace is not None and trace.num_sequences < BATCHES[-1]
    return mj.Workload(batch, CONTEXT, max_batch=max_batch, routing=trace, reuse=reuse)


def about(model: dict[str, Any]) -> dict[str, Any]:
    """Where numbers come from: sizes, context, routing, the system and how much of its peaks it
    reaches, and whether times of its PIM are beyond what is known of it."""
    source = serving.routing_source(model["model"], _workload(1, 1, model["trace"]))
    names = [name.format(model["gpus"]) for name, _ in VARIANTS.values()]
    names = [
        f"{name}, free decision" if "free" in variant else name
        for variant, name in zip(VARIANTS, names)
    ]
    by_variant = lambda values: np.asarray(values).reshape(-1, 1, 1)
    gpu, pim = model["systems"].gpu, model["systems"].pim
    return dict(
        cost_model=model["cost_model"],
        context=CONTEXT,
        routing=source,
        system=by_variant(names),
        bandwidth_efficiency=by_variant(gpu.bandwidth_efficiency),
        compute_efficiency=by_variant(gpu.compute_efficiency),
        extrapolated=getattr(pim, "extrapolate", False),
    )


def reports(config: dict[str, Any], key) -> dict[str, Any]:
    """Reports [variants, batches, policies], and what routing looks like, [1, batches, 1].

    Systems and batch sizes are one flat axis, because every vmap is another pass over the program.
    The draw depends on neither, so it is made once.
    """
    case, batches, size = config["model"], jnp.array(config["batch"]), int(max(config["batch"]))
    model, trace, systems = case["model"], case["trace"], case["systems"]

    def report(system, batch):
        workload = _workload(batch, size, trace)
        return mj.compare(model, system, workload, config["policy"], key=key)

    def bins(batch):
        workload = _workload(batch, size, trace)
        expert_ids = serving.route(model, workload, key=key)
        counts = routing.tokens_per_expert(expert_ids, model.num_experts, workload.valid)
        return jax.tree.map(jnp.mean, routing.bimodality(counts)._asdict())

    grid = (len(config["variant"]), len(batches))
    repeated = jax.tree.map(lambda x: jnp.repeat(x, grid[1], axis=0), systems)
    by_name = jax.vmap(report)(repeated, jnp.tile(batches, grid[0]))
    found = [by_name[policy] for policy in config["policy"]]
    join = lambda *leaves: jnp.stack([leaf.reshape(*grid, *leaf.shape[1:]) for leaf in leaves], 2)
    shares = jax.tree.map(lambda x: x[None, :, None], jax.vmap(bins)(batches))
    return dict(report=jax.tree.map(join, *found), bins=shares)


def columns(result: dict[str, Any]) -> dict[str, np.ndarray]:
    """Times, rates and shares, with units in their names."""
    return serving.columns(result["report"]) | result["bins"]


def summary(table: dict[str, np.ndarray]) -> str:
    """Speed-up over NoExp by policy, mean over seeds with its 95 % interval."""
    # A short trace has no large batches.
    batches = [b for b in SHOWN if b in table["batch"]] or [max(table["batch"])]
    lines = ["", "tbt of no_exp over tbt of the policy, mean +- 95 % over seeds"]
    studies = zip(
        table["model"], table["cost_model"], table["system"], table["routing"], strict=True
    )
    for model, cost_model, system, source in dict.fromkeys(studies):
        sizes = "" if model == cost_model else f" with the sizes of {cost_model}"
        lines += ["", f"{model}{sizes} on {system}; routing: {source}"]
        lines.append(f"  {'policy':<20}" + "".join(f"{f'B={b}':>18}" for b in batches))
        for policy in POLICIES[1:]:
            cells = [_gain(table, model, system, policy, batch) for batch in batches]
            lines.append(f"  {policy:<20}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def _gain(table, model, system, policy, batch) -> str:
    pick = lambda name: plot.select(table, model=model, system=system, policy=name, batch=batch)
    ratio = pick("no_exp")["tbt_ms"] / pick(policy)["tbt_ms"]
    mean, half = serving.mean_and_interval(ratio)
    return f"{mean:.2f} +-{half:.2f}"


def figures(table: dict[str, np.ndarray], *, trace: str | None = None) -> dict[str, Any]:
    """Experts on the roofline, expert bins by batch size, throughput against interactivity."""
    models_shown = list(dict.fromkeys(table["model"]))
    width = 3.2 * len(models_shown)
    bins, bin_axes = plot.figure(1, len(models_shown), (width, 3.6))
    fronts, front_axes = plot.figure(2, len(models_shown), (width, 6.8))
    for i, name in enumerate(models_shown):
        of_model = plot.select(table, model=name)
        first, free = list(dict.fromkeys(of_model["system"]))[:2]
        shares = plot.select(of_model, system=first, policy="sieve")
        by_batch = serving.mean_by(shares, ["batch"], BINS)
        plot.expert_bins(by_batch, bin_axes[0, i], title=name, legend=False)
        for row, (system, title) in enumerate(((first, name), (free, "same, free decision"))):
            front = serving.mean_by(
                plot.select(of_model, system=system), ["policy", "batch"], FRONT
            )
            ax = front_axes[row, i]
            plot.throughput_interactivity(front, ax, title=title, legend=False)
    plot.shared_legend(bins, bin_axes)
    plot.shared_legend(fronts, front_axes)
    return {"roofline": _roofline(trace), "expert_bins": bins, "throughput": fronts}


def _roofline(path: str | None):
    case = _cases(path)[:2][-1]
    model, trace = case["model"], case["trace"]
    system = next(iter(_systems(case["gpus"]).values()))
    batch = min(64, _batches(trace)[-1])
    workload = _workload(batch, batch, trace)
    dots = serving.expert_rows(model, system, workload, "sieve", key=jax.random.key(0))
    gpu, pim = system.gpu, system.pim
    machines = [
        dict(name=gpu.name.upper(), flops_per_s=gpu.flops_per_s, bandwidth=gpu.hbm_bandwidth),
        dict(name="HBM-PIM", flops_per_s=pim.flops_per_s, bandwidth=pim.internal_bandwidth),
    ]
    figure, axes = plot.figure(1, 1, (9, 4.2))
    title = f"Experts of {model.name} where Sieve runs them, B = {batch}"
    plot.roofline(dots, machines, axes[0, 0], title=title)
    return figure
