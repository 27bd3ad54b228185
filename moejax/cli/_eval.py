"""`moejax eval`: one model on one system, one row per policy."""

import argparse
import ast
from pathlib import Path

import jax
import numpy as np

from moejax import hardware, models, routing
from moejax._checks import lookup
from moejax._status import Status
from moejax.cli._format import table, use_cache
from moejax.hardware import System, load_pim_table, set_fields
from moejax.models import MoEModel
from moejax.serving import (
    POLICIES,
    Workload,
    columns,
    compare,
    mean_and_interval,
    routing_source,
)


BASELINE = "no_exp"

EXAMPLES = """\
examples:
  moejax eval --model gpt-oss-120b --system 4xb200-hbm-pim --batch 64 --context 2048 --policy all
  moejax eval --model qwen3-30b-a3b --system 1xb200-hbm-pim --batch 32 --context 512 \\
      --policy sieve,pimoe_channel --set pim.macs_per_unit=32 --set pim.contention=1
  moejax eval --model config.json --system 8xh200-hbm-pim --batch 64 --context 1024 \\
      --precision native --set model.precision.kv_bits=8

Every number of a system can be set: moejax list hardware NAME shows them. Keys that start with
model. set fields of the model."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="one model on one system, one row per policy",
        description="Times one decode iteration. Ratios are paired over seeds of the routing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a name, or a Hugging Face config.json")
    parser.add_argument("--system", required=True, help="a name such as 4xb200-hbm-pim")
    parser.add_argument("--batch", required=True, type=int, help="requests in the whole system")
    parser.add_argument("--context", required=True, type=float, help="tokens in each cache")
    parser.add_argument("--policy", default="all", help="all, or names with commas between")
    parser.add_argument("--precision", default="bf16", help="bf16 (default), native, fp8, mxfp4")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="changes")
    parser.add_argument("--trace", metavar="FILE", help="draw the routing from this trace")
    parser.add_argument("--reuse", action="store_true", help="several tokens of one sequence")
    parser.add_argument(
        "--correlation", type=float, default=0.0, help="of synthetic tokens, [0, 1)"
    )
    parser.add_argument("--pim-table", metavar="CSV", help="measured GEMV times of your PIM")
    parser.add_argument("--seeds", type=int, default=16, help="draws of the routing (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="first of them (default 0)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints one table with units, what limits, and where routing and efficiency come from."""
    if options.seeds < 1:
        raise ValueError(f"--seeds {options.seeds}: allowed is 1 or more")
    use_cache()
    model, system = _changed(_model(options), _system(options), options.changes)
    workload = _workload(options, model)
    names = _policies(options.policy)
    asked = names if BASELINE in names else [BASELINE, *names]
    seeds = jax.numpy.arange(options.seed, options.seed + options.seeds)
    results = _over_seeds(model, system, workload, tuple(asked), seeds)
    print(_table(names, results))
    print(_footer(model, system, workload, results[names[0]], options.seeds))


def _model(options: argparse.Namespace) -> MoEModel:
    if options.model.endswith(".json") or Path(options.model).is_dir():
        return models.from_hf_config(options.model).with_precision(options.precision)
    return models.get(options.model, precision=options.precision)


def _system(options: argparse.Namespace) -> System:
    system = hardware.get(options.system)
    if options.pim_table is None:
        return system
    order = getattr(system.pim, "order", "token_outer")
    return system.replace(pim=load_pim_table(options.pim_table, system.pim, order=order))


def _changed(model: MoEModel, system: System, changes: list[str]) -> tuple[MoEModel, System]:
    of_model, of_system = {}, {}
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change}: allowed is PATH=VALUE")
        target = of_model if path.startswith("model.") else of_system
        target[path.removeprefix("model.")] = _value(text)
    return set_fields(model, of_model), set_fields(system, of_system)


def _value(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _workload(options: argparse.Namespace, model: MoEModel) -> Workload:
    trace = None
    if options.trace is not None:
        trace = routing.load(options.trace, num_experts=model.num_experts)
    return Workload(
        options.batch,
        options.context,
        routing=trace,
        correlation=options.correlation,
        reuse=options.reuse,
    )


def _policies(text: str) -> list[str]:
    if text == "all":
        return [name for name, policy in POLICIES.items() if policy.compared]
    return [lookup("policy", name.strip(), POLICIES).name for name in text.split(",")]


def _over_seeds(model, system, workload, policies: tuple[str, ...], seeds) -> dict:
    """Columns by policy, each [seeds]."""

    @jax.jit
    def reports(model, system, workload, seeds):
        one = lambda seed: compare(model, system, workload, policies, key=jax.random.key(seed))
        return jax.vmap(one)(seeds)

    found = {name: columns(r) for name, r in reports(model, system, workload, seeds).items()}
    for name, result in found.items():
        bad = result["status"] != Status.OK.name.lower()
        if np.any(bad):
            status = Status[str(result["status"][bad][0]).upper()]
            raise ValueError(f"{name}: {status.message}")
    return found


def _table(names: list[str], results: dict) -> str:
    header = (
        "policy", "tbt_ms", "tok/s/user", "tok/s/gpu", f"vs {BASELINE} (95%)", "experts gpu/pim",
        "limited by", "gpu/pim/comm_ms", "scheduler_ms",
    )  # fmt: skip
    rows = []
    for name in names:
        r = results[name]
        mean = {column: np.mean(r[column]) for column in r if r[column].dtype.kind == "f"}
        gain, half = mean_and_interval(results[BASELINE]["tbt_ms"] / r["tbt_ms"])
        limits, how_often = np.unique(r["limited_by"], return_counts=True)
        rows.append((
            name,
            f"{mean['tbt_ms']:.3f}",
            f"{mean['interactivity_tok_s']:.1f}",
            f"{mean['throughput_per_gpu_tok_s']:.0f}",
            f"{gain:.3f}x +-{half:.3f}",
            f"{mean['experts_on_gpu']:.1f}/{mean['experts_on_pim']:.1f}",
            str(limits[np.argmax(how_often)]),
            f"{mean['gpu_ms']:.3f}/{mean['pim_ms']:.3f}/{mean['comm_ms']:.3f}",
            f"{mean['scheduler_ms']:.3f}",
        ))  # fmt: skip
    return table(header, rows)


def _footer(model, system, workload, result, seeds: int) -> str:
    gpu = system.gpu
    needed, capacity = float(np.max(result["memory_gb"])), float(gpu.hbm_bytes) / 1e9
    fits = "fits" if np.all(result["memory_fits"]) else "DOES NOT FIT"
    lines = [
        f"{model.name} ({model.precision.name}) on {system.name}, batch {workload.batch}, "
        f"context {workload.context:g}, mean of {seeds} draws",
        f"routing: {routing_source(model, workload)}",
        f"GPU efficiency: {float(gpu.bandwidth_efficiency):g} of bandwidth, "
        f"{float(gpu.compute_efficiency):g} of compute (set, not measured)",
        f"memory: {needed:.1f} GB of {capacity:.1f} GB a GPU, {fits}",
        "gpu, pim and comm overlap within a layer; each is the sum over layers of the slowest GPU",
    ]
    return "\n" + "\n".join(lines)
