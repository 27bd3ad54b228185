"""Options of `moejax eval` about how a batch is executed on GPUs with PIM."""

import argparse
from typing import Any

import jax
import numpy as np

from moejax.cli._format import finite, whole
from moejax.cost import GPU_EFFICIENCIES, gpu_efficiency
from moejax.hardware import GPU
from moejax.serving import OVERLAPS, Execution, context_lengths


OPTIONS = ("overlap", "halves", "gpu_efficiency", "prefill", "prefill_length", "context_spread")
PROMPT = 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    """What only systems of GPUs take, and `--oversize`."""
    group = parser.add_argument_group("execution (systems of GPUs)")
    group.add_argument(
        "--overlap",
        choices=OVERLAPS,
        help="ideal (default): a layer is as long as its busiest resource; fine: attention and "
        "experts each; coarse: the execution graph, task by task",
    )
    group.add_argument("--halves", type=whole(1), help="2: half batches take turns")
    group.add_argument(
        "--gpu-efficiency",
        metavar="NAME",
        help=f"what kernels reach of the roofline: {', '.join(GPU_EFFICIENCIES)}",
    )
    group.add_argument("--prefill", type=whole(0), help="requests of the batch that are prompts")
    group.add_argument("--prefill-length", type=whole(1), help=f"their tokens (default {PROMPT})")
    group.add_argument(
        "--context-spread",
        type=finite,
        metavar="SIGMA",
        help="log-normal contexts with --context as their median",
    )
    group.add_argument(
        "--oversize", action="store_true", help="time what does not fit into memory all the same"
    )


def chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `serving.compare`."""
    name = options.gpu_efficiency
    halves: Any = 1 if options.halves is None else options.halves
    return {
        "execution": Execution(options.overlap or "ideal", halves=halves),
        "efficiency": None if name is None else gpu_efficiency(name),
        "must_fit": not options.oversize,
    }


def contexts(options: argparse.Namespace):
    """Context of every request: a number, or drawn."""
    if options.context_spread is None:
        return options.context
    key = jax.random.key(np.uint32(options.seed))
    return context_lengths(options.batch, options.context, spread=options.context_spread, key=key)


def prompts(options: argparse.Namespace) -> dict[str, int]:
    """Keyword arguments of `Workload`."""
    if options.prefill_length is not None and options.prefill is None:
        raise ValueError("--prefill-length: allowed with --prefill only")
    length = PROMPT if options.prefill_length is None else options.prefill_length
    return {"prefill": options.prefill or 0, "prefill_length": length}


def about_requests(options: argparse.Namespace) -> str:
    """What the footer adds to batch and context."""
    spread = options.context_spread
    said = "" if spread is None else f" (median; log-normal, sigma {spread:g})"
    if options.prefill:
        length = prompts(options)["prefill_length"]
        said += f", {options.prefill} of them prompts of {length} tokens"
    return said


def about_efficiency(options: argparse.Namespace, gpu: GPU) -> str:
    """What GPUs reach, and where that comes from."""
    if options.gpu_efficiency is None:
        return (
            f"GPU efficiency: {float(gpu.bandwidth_efficiency):g} of bandwidth, "
            f"{float(gpu.compute_efficiency):g} of compute (set, not measured)"
        )
    _, source = GPU_EFFICIENCIES[options.gpu_efficiency]
    curve = gpu_efficiency(options.gpu_efficiency)
    return (
        f"GPU efficiency: {float(curve.bandwidth):g} of bandwidth, {float(curve.compute):g} of "
        f"compute, {1e6 * float(curve.launch_time):g} us a layer: {source}"
    )


def about_overlap(options: argparse.Namespace) -> str:
    """What the times of a row mean."""
    each = "each is the sum over layers of the slowest GPU"
    turns = ", two half batches taking turns" if options.halves == 2 else ""
    return {
        "ideal": f"gpu, pim and comm overlap within a layer; {each}",
        "fine": f"tbt: attention and experts overlap each in themselves{turns}; of gpu, pim, comm "
        + each,
        "coarse": f"tbt: the execution graph, task by task{turns}; of gpu, pim and comm {each}",
    }[options.overlap or "ideal"]
