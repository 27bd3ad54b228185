"""How good is a map of nodes to endpoints after how much time, against the published ones?

    python benchmarks/link_balance.py             # one setting of HD-MoE, a few minutes
    python benchmarks/link_balance.py --all       # the five published ones
    python benchmarks/link_balance.py --layers 4  # of the 32, to try it out

Mixtral-8x7B with the published shares (HD-MoE, arXiv 2509.09420), so that only the map differs.
Fitted on the first half of the trace, judged on batches of 128 tokens of the second half by the
simulator. Columns: how far our gathers are below those with the published maps, and how far any map
could be at most. Needs the folder `MOEJAX_DATA`.
"""

import argparse
import functools
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _timing
from moejax import noc, placement


REPOSITORY = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("MOEJAX_DATA", REPOSITORY.parent / "shared" / "data"))
SETTINGS = [(10.0, 25.0, 4, 8), (2.5, 75.0, 4, 8), (5.0, 50.0, 4, 4)]
SETTINGS += [(5.0, 50.0, 8, 8), (5.0, 50.0, 4, 8)]
EFFORTS = [(1, 1000), (1, 4000), (4, 8000)]
TOKENS, HIDDEN, UNSEEN = 128, 4096, 32
ROW = "{:>16} {:>7} {:>6} {:>9} {:>10} {:>10} {:>9} {:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="all published settings")
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    trace = np.load(DATA / "mixtral-8x7b" / "mtbench-reasoning.npz")["experts"].astype(np.int32)
    stored = np.load(DATA / "hd-moe-reference" / "placements.npz")
    print(_timing.machine())
    print(
        ROW.format("setting", "chains", "swaps", "seconds", "published", "ours", "below", "bound")
    )
    gains = []
    for setting in SETTINGS if options.all else SETTINGS[-1:]:
        gains.append(compare(setting, trace[: options.layers], stored))
    print(f"mean over layers and settings, most effort: {np.mean(gains):.1%} below")


def compare(setting, trace, stored) -> float:
    """Prints a row for each effort. Returns the mean gain over layers of the last."""
    rate, bandwidth, rows, cols = setting
    name = f"{rate}T_{bandwidth}G_{rows}x{cols}"
    share = jnp.asarray(stored[f"mixtral_nodelink_{name}_P"][: len(trace)])
    published = stored[f"mixtral_nodelink_{name}_pos"][: len(trace)].astype(np.int32)
    topology = noc.mesh(rows, cols, bandwidth=bandwidth * 1e9)
    costs = placement.NodeCosts(1.0, 1.0, HIDDEN, 1.0, TOKENS, 1.0)
    half = trace.shape[1] // 2
    fitted = placement.statistics(trace[:, :half], 8)
    room = placement.message_room(share, placement.statistics(trace, 8), TOKENS)
    tokens = np.random.default_rng(5).integers(half, trace.shape[1], (UNSEEN, TOKENS))
    judge = functools.partial(makespan, topology, jnp.asarray(trace[:, tokens]), share, room=room)
    theirs, bound = judge(published)[0], least(trace[:, tokens], np.asarray(share), rows)
    bound *= HIDDEN / (bandwidth * 1e9)
    keys = jax.random.split(jax.random.key(0), len(trace))
    gain = 0.0
    for chains, steps in EFFORTS:
        start = time.perf_counter()
        found = jax.vmap(
            lambda share, layer, key: placement.link_balance(
                share,
                topology,
                layer,
                costs,
                key=key,
                chains=chains,  # noqa: B023
                steps=steps,  # noqa: B023
                max_messages=room,
            )
        )(share, fitted, keys)
        jax.block_until_ready(found)
        seconds = time.perf_counter() - start
        ours = judge(found.node_position)[0]
        gain = float(np.mean(1 - ours / theirs))
        times = [f"{1e6 * x.mean():.2f} us" for x in (theirs, ours)]
        line = (name, chains, steps, f"{seconds:.1f}", *times, f"{gain:.1%}")
        print(ROW.format(*line, f"{np.mean(1 - bound / theirs):.1%}"), flush=True)
    return gain


@functools.partial(jax.jit, static_argnames="room")
def makespan(topology, ids, share, position, *, room):
    """[layers] mean simulated time of a gather over the batches, and the worst status."""

    def batch(expert_ids, share, position, key):
        sent = noc.expert_traffic(
            expert_ids, share, position, bytes_per_token=HIDDEN, key=key, max_messages=room
        )
        report = noc.simulate(topology, sent)
        return report.makespan, report.status

    keys = jax.random.split(jax.random.key(7), ids.shape[1])
    over_batches = jax.vmap(batch, (0, None, None, 0))
    layer = lambda item: over_batches(*item, keys)
    times, status = jax.lax.map(layer, (ids, share, jnp.asarray(position)))
    return times.mean(1), status.max()


def least(ids: np.ndarray, share: np.ndarray, rows: int) -> np.ndarray:
    """[layers] vectors that the busiest link carries under any map, mean over batches.

    Dimension-order routes enter a node from its own column, where there are rows - 1 others, or
    from the left and the right: what one aggregator receives goes over few links.
    """
    layers = []
    for layer, hosts in zip(ids, share > placement.HOSTING_SHARE):
        first, busiest = hosts.argmax(1), []
        for number, batch in enumerate(layer):
            slot = np.random.default_rng(number).integers(0, batch.shape[1], len(batch))
            home = first[batch[np.arange(len(batch)), slot]]
            touched = hosts[batch].any(1)
            sent = [np.delete(touched[home == node].sum(0), node) for node in np.unique(home)]
            column = [np.sort(x)[::-1][: rows - 1].sum() for x in sent]
            busiest.append(max(max(x.sum() / 4, (x.sum() - c) / 2) for x, c in zip(sent, column)))
        layers.append(np.mean(busiest))
    return np.array(layers)


if __name__ == "__main__":
    main()
