"""`moejax trace`: what is in a routing trace and how skewed it is."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from moejax import routing
from moejax.cli._format import table, use_cache, whole


BATCHES = (1, 4, 16, 64, 256)


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="what is in a routing trace, and how skewed its decode batches are",
        description="Reads npz traces (with a .json beside them), HD-MoE JSON and moejax's own.",
    )
    parser.add_argument("file")
    parser.add_argument("--num-experts", type=whole(1), help="where the file does not say it")
    parser.add_argument("--model", help="check that the trace is of this model")
    parser.add_argument("--draws", type=whole(1), default=32, help="batches per size (default 32)")
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the sizes of the trace and statistics of its decode batches."""
    use_cache()
    trace = routing.load(options.file, num_experts=options.num_experts, model=options.model)
    starts, tokens = np.asarray(trace.sequence_start), np.flatnonzero(np.asarray(trace.valid))
    sequences = len(np.unique(np.searchsorted(starts, tokens, side="right")))
    print(
        f"{options.file}: {trace.model or 'unnamed model'}, {trace.num_layers} MoE layers, "
        f"{trace.num_experts} experts, top-{trace.top_k}, {len(tokens)} of {trace.num_tokens} "
        f"tokens valid, in {sequences} sequences"
    )
    keys = jax.random.split(jax.random.key(options.seed), options.draws)
    fresh = [batch for batch in BATCHES if batch <= sequences]
    reused = [batch for batch in BATCHES if sequences < batch <= len(tokens)]
    rows = _rows(trace, fresh, keys, reuse=False) + _rows(trace, reused, keys, reuse=True)
    header = ("batch", "", "max/mean load", "active", "N=1", "N=2", "N=3-4", "N>4")
    print(table(header, rows))
    print(
        "decode batches: tokens of different sequences at random positions (reused: several of "
        "one); shares are of the active experts"
    )


def _rows(trace, batches: list[int], keys, *, reuse: bool) -> list[tuple[str, ...]]:
    """One row per batch size; smaller batches are the first tokens of the largest."""
    if not batches:
        return []

    def of_key(key):
        expert_ids = routing.decode_batch(trace, batches[-1], key=key, reuse=reuse)

        def of_batch(batch):
            valid = jnp.arange(batches[-1]) < batch
            counts = routing.tokens_per_expert(expert_ids, trace.num_experts, valid)
            load = jnp.max(counts, axis=-1) / jnp.mean(counts, axis=-1)
            return load, routing.bimodality(counts)

        return jax.vmap(of_batch)(jnp.array(batches))

    load, shares = jax.jit(jax.vmap(of_key))(keys)
    numbers = (load, shares.active, shares.share_1, shares.share_2, shares.share_3_4)
    means = [np.mean(value, axis=(0, 2)) for value in (*numbers, shares.share_more)]
    cells = [[f"{value:.2f}" for value in row] for row in np.transpose(means)]
    return [
        (str(batch), "reused" if reuse else "", *row)
        for batch, row in zip(batches, cells, strict=True)
    ]
