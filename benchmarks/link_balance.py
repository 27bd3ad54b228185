"""How good is a map of nodes to endpoints after how much time, against the published ones?

    python benchmarks/link_balance.py             # one setting of HD-MoE, a few minutes
    python benchmarks/link_balance.py --all       # the five published ones
    python benchmarks/link_balance.py --layers 4  # of the 32, to try it out

Mixtral-8x7B with the published shares (HD-MoE, arXiv 2509.09420) and their maps, and with the
shares of expert parallelism and of EPLB's copies at random places, so that only the map differs.
Fitted on the first half of the trace, judged on batches of 128 tokens of the second half by the
simulator. Columns: how far our gathers are below those with the maps that were there before, and
how far any map could be at most. Needs the folder `MOEJAX_DATA`.
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
BASELINES = ("expert_parallel", "eplb")
ROW = "{:>16} {:>15} {:>7} {:>6} {:>9} {:>10} {:>10} {:>9} {:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="all published settings")
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    trace = np.load(DATA / "mixtral-8x7b" / "mtbench-reasoning.npz")["experts"].astype(np.int32)
    stored = np.load(DATA / "hd-moe-reference" / "placements.npz")
    print(_timing.machine())
    heads = ("setting", "shares", "chains", "swaps", "seconds", "before", "ours", "below", "bound")
    print(ROW.format(*heads))
    gains: dict[str, list[np.ndarray]] = {}
    for setting in SETTINGS if options.all else SETTINGS[-1:]:
        for name, gain in compare(setting, trace[: options.layers], stored).items():
            gains.setdefault(name, []).append(gain)
    print("mean over layers and settings, most effort:")
    for name, gain in gains.items():
        gain = np.concatenate(gain)
        print(f"  {name}: {gain.mean():.1%} below (least {gain.min():.1%} of {len(gain)})")


def compare(setting, trace, stored) -> dict[str, np.ndarray]:
    """Prints a row for each effort, and for the shares of the baselines. Returns gains of layers
    with most effort, by what they are compared with."""
    rate, bandwidth, rows, cols = setting
    name = f"{rate}T_{bandwidth}G_{rows}x{cols}"
    topology = noc.mesh(rows, cols, bandwidth=bandwidth * 1e9)
    costs = placement.NodeCosts(1.0, 1.0, HIDDEN, 1.0, TOKENS, 1.0)
    half = trace.shape[1] // 2
    fitted, whole = placement.statistics(trace[:, :half], 8), placement.statistics(trace, 8)
    share, position = (stored[f"mixtral_nodelink_{name}_{x}"][: len(trace)] for x in ("P", "pos"))
    placed = {"published": placement.Placement(jnp.asarray(share), position.astype(np.int32))}
    for method in BASELINES:
        placed[method] = placement.place(method, fitted, topology, costs, key=jax.random.key(1))
    # One room for all, so that there is one compilation.
    room = max(placement.message_room(one.share, whole, TOKENS) for one in placed.values())
    tokens = np.random.default_rng(5).integers(half, trace.shape[1], (UNSEEN, TOKENS))
    judge = functools.partial(makespan, topology, jnp.asarray(trace[:, tokens]), room=room)
    gains: dict[str, np.ndarray] = {}
    for kind, one in placed.items():
        before = np.asarray(judge(one.share, one.node_position)[0])
        bound = least(trace[:, tokens], np.asarray(one.share), rows) * HIDDEN / (bandwidth * 1e9)
        for chains, steps in EFFORTS if kind == "published" else EFFORTS[-1:]:
            seconds, found = mapped(one.share, topology, fitted, costs, chains, steps, room)
            ours = np.asarray(judge(one.share, found)[0])
            times = [f"{1e6 * x.mean():.2f} us" for x in (before, ours)]
            line = (name, kind, chains, steps, f"{seconds:.1f}", *times)
            ratios = [f"{np.mean(1 - x / before):.1%}" for x in (ours, bound)]
            print(ROW.format(*line, *ratios), flush=True)
        gains[f"{kind} shares, their own maps"] = 1 - ours / before
        if kind == "published":
            best = ours
        else:
            gains[f"published shares with our maps, {kind} at random places"] = 1 - best / before
    return gains


def mapped(share, topology, fitted, costs, chains: int, steps: int, room: int):
    """(s with what compilation there is, maps [layers, nodes]) of Link Balance."""
    keys = jax.random.split(jax.random.key(0), len(share))
    options = dict(chains=chains, steps=steps, max_messages=room)
    balance = lambda share, layer, key: placement.link_balance(
        share, topology, layer, costs, key=key, **options
    )
    start = time.perf_counter()
    found = jax.vmap(balance)(share, fitted, keys).node_position
    jax.block_until_ready(found)
    return time.perf_counter() - start, found


@functools.partial(jax.jit, static_argnames="room")
def makespan(topology, ids, share, position, *, room: int):
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
