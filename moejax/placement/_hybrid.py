"""Hybrid of tensor and expert parallelism: experts to regions of nodes, balanced by load."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, lookup
from moejax._status import Status, is_traced
from moejax._typing import Array, Float, FloatLike, FloatScalar, Int, IntLike
from moejax.noc import UNPLACED
from moejax.placement._costs import NodeCosts
from moejax.placement._estimate import evaluate
from moejax.placement._parallel import deal
from moejax.placement._regions import RegionBalance, search, solve
from moejax.placement._statistics import Statistics
from moejax.placement._validate import check_count, check_load, check_time_limit, load_status


METHODS = {"search": "JAX, maps over layers", "milp": "exact, on the host"}
PUBLISHED_INTRA = 2.0
"""Times that the journal's script counts the traffic inside a region, in each direction."""


def hybrid(
    frequency: Float[Array, " experts"],
    num_nodes: int,
    num_regions: int,
    *,
    method: str = "search",
    time_limit: float = 60.0,
    gap: float = 0.0,
) -> Float[Array, "experts nodes"]:
    """Compute-balanced hybrid: each expert in one region, split evenly over the region's nodes.

    The baseline of HD-MoE (arXiv 2509.09420, section VI), which takes 2 regions for Mixtral and 8
    for DeepSeek-V2-Lite and Qwen2. Arguments, errors as `balance_regions`.

    **Returns:** [experts, nodes]; rows sum to 1. Region r is a run of consecutive nodes. NaN for a
    load that is negative or not finite, under tracing.
    """
    balance = balance_regions(
        frequency, num_nodes, num_regions, method=method, time_limit=time_limit, gap=gap
    )
    return _share(as_float(frequency), balance.region, num_nodes, num_regions)


@functools.partial(jax.jit, static_argnames=("num_nodes", "num_regions"))
def _share(load: Array, region: Array, num_nodes: int, num_regions: int) -> Array:
    share = region_share(region, num_nodes, num_regions)
    return jnp.where(load_status(load) == Status.OK, share, jnp.nan)


def balance_regions(
    frequency: Float[Array, " experts"],
    num_nodes: int,
    num_regions: int,
    *,
    method: str = "search",
    time_limit: float = 60.0,
    gap: float = 0.0,
) -> RegionBalance:
    """Which region computes each expert, so that the busiest node is least busy.

    **Arguments:**

    - `frequency`: [experts], load of each expert.
    - `num_nodes`, `num_regions`: where they do not divide, the first regions have a node more.
    - `method`: "search" (longest first, then moves and swaps; maps over layers) or "milp" (exact
        within `gap`, on the host).
    - `time_limit`: of the solver, in s; the best found is returned with `Status.STOPPED_EARLY`.
    - `gap`: relative gap at which the solver may stop (the papers use 0.05).

    **Returns:** `RegionBalance`.

    **Raises:** `ValueError` for a load that is negative or not [experts], no regions or more of
    them than nodes, an unknown method, no time or a negative gap.
    """
    where = "balance_regions"
    load = as_float(frequency)
    check_load(where, load, name="frequency")
    check_count(where, "num_nodes", num_nodes)
    check_count(where, "num_regions", num_regions)
    if num_regions > num_nodes:
        raise ValueError(f"{where}: num_regions = {num_regions}: allowed is at most {num_nodes}")
    lookup("method", method, METHODS)
    check_time_limit(where, time_limit)
    if not gap >= 0:
        raise ValueError(f"{where}: gap = {gap}: allowed is 0 or more")
    _, size = deal(num_nodes, num_regions)
    if method == "search":
        return _search(load, tuple(size.tolist()))
    if is_traced(load):
        raise ValueError(f'{where}: method = "milp" runs on the host: allowed in jax.jit: "search"')
    return solve(np.asarray(load, np.float64), size.astype(np.float64), time_limit, gap)


@functools.partial(jax.jit, static_argnames="size")
def _search(load: Array, size: tuple[int, ...]) -> RegionBalance:
    status = load_status(load)
    okay = status == Status.OK
    found = search(jnp.where(okay, load, 0.0), jnp.asarray(size, load.dtype))
    poison = lambda value: jnp.where(okay, value, jnp.nan)
    return RegionBalance(found.region, poison(found.max_load), poison(found.bound), status)


def region_share(
    region: Int[Array, " experts"], num_nodes: int, num_regions: int
) -> Float[Array, "experts nodes"]:
    """Every expert split evenly over the nodes of its region, a run of consecutive nodes."""
    of_node, size = deal(num_nodes, num_regions)
    here = jnp.asarray(region)[:, None] == of_node
    return jnp.where(here, 1 / jnp.asarray(size, jnp.result_type(float))[of_node], 0.0)


def region_position(
    mesh_shape: tuple[int, int], blocks: tuple[int, int], offset: IntLike
) -> Int[Array, " nodes"]:
    """The one node of each region that the published baseline places on the mesh.

    The mesh is cut into `blocks` = (rows, columns) of blocks, block r (row-major) being region r.
    The region's logical node `offset` gets cell `offset` (row-major) of the block, and no other
    node gets a cell: between regions the network carries one message for a region, while the
    traffic inside it is the estimate of `hybrid_comm_time`. HD-MoE cuts into 2 x 4 blocks for 8
    regions and 1 x 2 for 2, and draws the offset.

    **Arguments:** `offset` is 0 to nodes / regions - 1, and may be traced.

    **Returns:** node_position int [nodes], cell = row * columns + column, -1 where unplaced.

    **Raises:** `ValueError` for blocks that do not divide the mesh, or an offset outside.
    """
    rows, cols = (check_count("region_position", "mesh_shape", size) for size in mesh_shape)
    down, across = (check_count("region_position", "blocks", count) for count in blocks)
    if rows % down or cols % across:
        raise ValueError(
            f"region_position: blocks = {blocks}: allowed are divisors of {mesh_shape}"
        )
    cell = np.arange(rows * cols).reshape(down, rows // down, across, cols // across)
    cell = jnp.asarray(cell.transpose(0, 2, 1, 3).reshape(down * across, -1))
    regions, nodes = cell.shape
    if not is_traced(offset) and not 0 <= int(offset) < nodes:
        raise ValueError(f"region_position: offset = {offset}: allowed is 0 to {nodes - 1}")
    position = jnp.full(rows * cols, UNPLACED, jnp.int32)
    return position.at[offset + nodes * np.arange(regions)].set(cell[:, offset].astype(jnp.int32))


def hybrid_comm_time(
    inter_time: FloatLike,
    share: Float[Array, "experts nodes"],
    statistics: Statistics,
    costs: NodeCosts,
    *,
    paper_faithful: bool = False,
    node_balanced: Any = None,
) -> FloatScalar:
    """One direction of the hybrid's communication, in s: between regions, then inside them.

    Inside, every token moves its bytes at every node of each region that it touches, so that the
    busiest region takes batch * bytes_per_token / bandwidth times the share of tokens that touch
    it (gamma, a property of the network, does not apply).

    **Arguments:**

    - `inter_time`: simulated time between the regions, one direction, in s.
    - `share`: the hybrid's.
    - `paper_faithful`: as the published script has it (HDA-MoE, arXiv 2609.08682): the traffic
        inside is that of another placement, the node-balanced one, and counts twice.
    - `node_balanced`: that placement, [experts, nodes].

    **Raises:** `ValueError` as `evaluate`, and for `paper_faithful` without `node_balanced` or the
    reverse.
    """
    if paper_faithful != (node_balanced is not None):
        raise ValueError("hybrid_comm_time: paper_faithful and node_balanced go together")
    plain = dataclasses.replace(costs, gamma=jnp.ones_like(costs.gamma))
    if paper_faithful:
        return inter_time + PUBLISHED_INTRA * evaluate(node_balanced, statistics, plain).comm_time
    return inter_time + evaluate(share, statistics, plain).comm_time
