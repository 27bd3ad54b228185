"""`moejax trace`: what is in a routing trace and how skewed it is."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from moejax import routing
from moejax.cli._format import table, use_cache


BATCHES = (1, 4, 16, 64, 256)


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="what is in a routing trace, and how skewed its decode batches are",
        description="Reads npz traces (with a .json beside them), HD-MoE JSON and moejax's own.",
    )
    parser.add_argument("file")
    parser.add_argument("--num-experts", type=int, help="where the file does not say it")
    parser.add_argument("--model", help="check that the trace is of this model")
    parser.add_argument("--draws", type=int, default=32, help="batches per size (default 32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the sizes of the trace and statistics of its decode batches."""
    if options.draws < 1:
        raise ValueError(f"--draws {options.draws}: allowed is 1 or more")
    use_cache()
    trace = routing.load(options.file, num_experts=options.num_experts, model=options.model)
    valid = int(np.count_nonzero(trace.valid))
    print(
        f"{options.file}: {trace.model or 'unnamed model'}, {trace.num_layers} MoE layers, "
        f"{trace.num_experts} experts, top-{trace.top_k}, {valid} of {trace.num_tokens} tokens in "
        f"{trace.num_sequences} sequences"
    )
    keys = jax.random.split(jax.random.key(options.seed), options.draws)
    rows = [
        _row(trace, batch, keys, batch > trace.num_sequences) for batch in BATCHES if batch <= valid
    ]
    header = ("batch", "", "max/mean load", "active", "N=1", "N=2", "N=3-4", "N>4")
    print(table(header, rows))
    print(
        "decode batches: tokens of different sequences at random positions (reused: several of "
        "one); shares are of the active experts"
    )


def _row(trace, batch: int, keys, reuse: bool) -> tuple[str, ...]:
    @jax.jit
    def statistics(trace, keys):
        draw = lambda key: routing.decode_batch(trace, batch, key=key, reuse=reuse)
        counts = routing.tokens_per_expert(jax.vmap(draw)(keys), trace.num_experts)
        load = jnp.max(counts, axis=-1) / jnp.mean(counts, axis=-1)
        return jnp.mean(load), jax.tree.map(jnp.mean, routing.bimodality(counts))

    load, shares = statistics(trace, keys)
    numbers = (load, shares.active, shares.share_1, shares.share_2, shares.share_3_4)
    cells = [f"{float(value):.2f}" for value in (*numbers, shares.share_more)]
    return (str(batch), "reused" if reuse else "", *cells)
