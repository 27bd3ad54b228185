"""`moejax eval`: one model on one system, one row per policy or placement."""

import argparse
import ast
import functools
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np

from moejax import hardware, models, routing
from moejax._checks import lookup
from moejax._status import Status
from moejax.cli import _eval_execution, _eval_near_memory
from moejax.cli._format import finite, table, use_cache, whole
from moejax.hardware import NMPSystem, System, load_pim_table, set_fields
from moejax.models import MoEModel
from moejax.serving import (
    POLICIES,
    Workload,
    columns,
    compare,
    mean_and_interval,
    memory_detail,
    routing_source,
)


M = TypeVar("M", bound=eqx.Module)

BASELINE = "no_exp"

EXAMPLES = """\
examples:
  moejax eval --model gpt-oss-120b --system 4xb200-hbm-pim --batch 64 --context 2048 --policy all
  moejax eval --model qwen3-30b-a3b --system 1xb200-hbm-pim --batch 32 --context 512 \\
      --policy sieve,pimoe_channel --set pim.macs_per_unit=32 --set pim.contention=1
  moejax eval --model mixtral-8x7b --system nmp-4x8-5t-50g --batch 32 --placement node_link \
      --fit coding.npz --eval math.npz
  moejax eval --model qwen3-30b-a3b --system 1xb200-hbm-pim --batch 64 --context 512 \\
      --overlap coarse --prefill 8 --gpu-efficiency measured
  moejax eval --model config.json --system 8xh200-hbm-pim --batch 64 --context 1024 \\
      --precision native --set model.precision.kv_bits=8

Every number of a system can be set: moejax list hardware NAME shows them. Keys that start with
model. set fields of the model."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="one model on one system, one row per policy or placement",
        description="Times one decode iteration. Ratios are paired over seeds of the routing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a name, or a Hugging Face config.json")
    parser.add_argument("--system", required=True, help="a name such as 4xb200-hbm-pim")
    parser.add_argument("--batch", required=True, type=whole(1), help="requests in all")
    parser.add_argument("--context", type=finite, help="tokens in each cache")
    parser.add_argument("--policy", help="names with commas between, or all (default)")
    parser.add_argument("--precision", default="bf16", help="bf16 (default), native, fp8, mxfp4")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="changes")
    parser.add_argument("--trace", metavar="FILE", help="draw the routing from this trace")
    parser.add_argument("--reuse", action="store_true", help="several tokens of one sequence")
    parser.add_argument(
        "--correlation", type=float, default=0.0, help="of synthetic tokens, [0, 1)"
    )
    parser.add_argument("--pim-table", metavar="CSV", help="measured GEMV times of your PIM")
    parser.add_argument(
        "--seeds", type=whole(1), default=16, help="draws of the routing (default 16)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="first of them (default 0)")
    _eval_execution.add_options(parser)
    _eval_near_memory.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints one table with units, what limits, and where routing and efficiency come from."""
    use_cache()
    model, system = _changed(_model(options), _system(options), options.changes)
    near_memory = isinstance(system, NMPSystem)
    _check_options(options, near_memory)
    if near_memory:
        _eval_near_memory.prepare(options, model)
    workload = _workload(options, model)
    if near_memory:
        _eval_near_memory.run(model, system, workload, options)
        return
    names = _policies("all" if options.policy is None else options.policy)
    asked = names if BASELINE in names else [BASELINE, *names]
    # Unsigned, so that the last seeds of all do not wrap around to negative ones.
    seeds = np.arange(options.seed, options.seed + options.seeds).astype(np.uint32)
    how = _eval_execution.chosen(options)
    results = _over_seeds(model, system, workload, tuple(asked), seeds, how)
    print(_table(names, results))
    print(_footer(model, system, workload, results[names[0]], options))


def _check_options(options: argparse.Namespace, near_memory: bool) -> None:
    """Options that the other kind of system takes, and those that this one needs."""
    of_gpus = ("policy", "pim_table", *_eval_execution.OPTIONS)
    others = of_gpus if near_memory else ("placement", "fit", "judge", "accounting")
    for name in others:
        if getattr(options, name) is not None:
            kind = "GPU" if near_memory else "near-memory"
            option = "eval" if name == "judge" else name.replace("_", "-")
            raise ValueError(f"--{option}: allowed for {kind} systems only")
    if options.context is None and not near_memory:
        raise ValueError("--context is needed: tokens in each cache")


def _model(options: argparse.Namespace) -> MoEModel:
    is_path = options.model.endswith(".json") or (options.model and Path(options.model).is_dir())
    if is_path and options.model not in models.MODELS:
        return models.from_hf_config(options.model).with_precision(options.precision)
    return models.get(options.model, precision=options.precision)


def _system(options: argparse.Namespace) -> System | NMPSystem:
    system = hardware.get(options.system)
    if options.pim_table is None or isinstance(system, NMPSystem):
        return system
    order = getattr(system.pim, "order", "token_outer")
    return system.replace(pim=load_pim_table(options.pim_table, system.pim, order=order))


def _changed(
    model: MoEModel, system: System | NMPSystem, changes: list[str]
) -> tuple[MoEModel, System | NMPSystem]:
    of_model, of_system = {}, {}
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change}: allowed is PATH=VALUE")
        target = of_model if path.startswith("model.") else of_system
        target[path.removeprefix("model.")] = text
    return _set(model, of_model), _set(system, of_system)


def _set(module: M, texts: dict[str, str]) -> M:
    changes = {path: _value(module, path, text) for path, text in texts.items()}
    try:
        # A number too large for a float becomes infinite, and the check of its field says so.
        with np.errstate(over="ignore"):
            return set_fields(module, changes)
    except OverflowError:
        shown = ", ".join(f"{path}={text}" for path, text in texts.items())
        raise ValueError(f"--set {shown}: too large") from None


def _value(module: eqx.Module, path: str, text: str) -> Any:
    """What a text means to the field it is for."""
    try:
        old = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        return text  # set_fields names the nearest path
    if isinstance(old, str):
        return text
    if isinstance(old, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"--set {path}={text}: allowed is true or false")
        return text.lower() == "true"
    if not isinstance(old, int | jax.Array | None):
        raise ValueError(f"--set {path}={text}: {path} is no number, word or truth value")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float) else text


def _workload(options: argparse.Namespace, model: MoEModel) -> Workload:
    if options.trace is None and options.reuse:
        raise ValueError("--reuse: allowed with --trace only")
    if options.trace is not None and options.correlation:
        raise ValueError("--correlation: allowed without --trace only")
    trace = None if options.trace is None else _trace(options, model)
    return Workload(
        options.batch,
        _eval_execution.contexts(options),
        routing=trace,
        correlation=options.correlation,
        reuse=options.reuse,
        **_eval_execution.prompts(options),
    )


def _trace(options: argparse.Namespace, model: MoEModel) -> routing.RoutingTrace:
    changed = any(change.startswith("model.") for change in options.changes)
    if model.name in models.MODELS and not changed:
        trace = routing.load(options.trace, model=model.name)
    else:  # its sizes are compared when the batch is routed
        trace = routing.load(options.trace, num_experts=model.num_experts)
    draw = lambda key: routing.decode_batch(trace, options.batch, key=key, reuse=options.reuse)
    try:
        jax.eval_shape(draw, jax.random.key(0))
    except ValueError as error:
        raise ValueError(f"{options.trace}: {error}".replace("reuse=True", "--reuse")) from None
    return trace


def _policies(text: str) -> list[str]:
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        if name == "all":
            names += [key for key, policy in POLICIES.items() if policy.compared]
        else:
            names.append(lookup("policy", name, POLICIES).name)
    return list(dict.fromkeys(names))


@functools.partial(jax.jit, static_argnames=("policies", "execution", "must_fit"))
def _reports(model, system, workload, policies: tuple[str, ...], seeds, efficiency, **static):
    one = lambda seed: compare(
        model,
        system,
        workload,
        policies,
        key=jax.random.key(seed),
        efficiency=efficiency,
        **static,
    )
    return jax.vmap(one)(seeds)


def _over_seeds(model, system, workload, policies: tuple[str, ...], seeds, how) -> dict:
    """Columns by policy, each [seeds]."""
    reports = _reports(model, system, workload, policies, seeds, **how)
    found = {name: columns(report) for name, report in reports.items()}
    for name, result in found.items():
        bad = result["status"] != Status.OK.name.lower()
        if np.any(bad):
            status = Status[str(result["status"][bad][0]).upper()]
            detail = memory_detail(model, system, workload, status)
            raise ValueError(f"{name}: {status.message}{'; ' + detail if detail else ''}")
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
        interval = "" if np.isnan(half) else f" +-{half:.3f}"
        limits, how_often = np.unique(r["limited_by"], return_counts=True)
        rows.append((
            name,
            f"{mean['tbt_ms']:.3f}",
            f"{mean['interactivity_tok_s']:.1f}",
            f"{mean['throughput_per_gpu_tok_s']:.0f}",
            f"{gain:.3f}x{interval}",
            f"{mean['experts_on_gpu']:.1f}/{mean['experts_on_pim']:.1f}",
            str(limits[np.argmax(how_often)]),
            f"{mean['gpu_ms']:.3f}/{mean['pim_ms']:.3f}/{mean['comm_ms']:.3f}",
            f"{mean['scheduler_ms']:.3f}",
        ))  # fmt: skip
    return table(header, rows)


def _footer(model, system, workload, result, options: argparse.Namespace) -> str:
    needed, capacity = float(np.max(result["memory_gb"])), float(system.gpu.hbm_bytes) / 1e9
    fits = "fits" if np.all(result["memory_fits"]) else "DOES NOT FIT"
    lines = [
        f"{model.name} ({model.precision.name}) on {system.name}, batch {workload.batch}, "
        f"context {options.context:g}{_eval_execution.about_requests(options)}, "
        + ("one draw" if options.seeds == 1 else f"mean of {options.seeds} draws"),
        f"routing: {routing_source(model, workload)}",
        _eval_execution.about_efficiency(options, system.gpu),
        f"memory: {needed:.1f} GB of {capacity:.1f} GB a GPU, {fits}",
        _eval_execution.about_overlap(options),
    ]
    if options.changes:
        lines.insert(1, "set: " + ", ".join(options.changes))
    return "\n" + "\n".join(lines)
