"""Experts to regions so that the busiest region is least busy: a search, and a solver."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._status import Status
from moejax._typing import Array, Float, FloatScalar, Int, IntScalar


GAIN = 1e-6
"""Relative gain below which a step of the search is rounding."""


class RegionBalance(NamedTuple):
    """Which region computes each expert.

    Fields: `region` int [experts]; `max_load`, the largest load of a region per node of it, in
    expert-tokens per token; `bound`, below which no choice can come; `status`.
    """

    region: Int[Array, " experts"]
    max_load: FloatScalar
    bound: FloatScalar
    status: IntScalar


def region_loads(
    load: Float[Array, " experts"], region: Int[Array, " experts"], size: Float[Array, " regions"]
) -> Float[Array, " regions"]:
    """Load of each region, divided by its number of nodes."""
    return jnp.zeros_like(size).at[region].add(load) / size


def trivial_bound(load: Float[Array, " experts"], size: Float[Array, " regions"]) -> FloatScalar:
    """Every region equally busy, or the largest expert alone in the largest region."""
    return jnp.maximum(load.sum() / size.sum(), load.max() / size.max())


@jax.jit
def search(load: Float[Array, " experts"], size: Float[Array, " regions"]) -> RegionBalance:
    """Longest first, then moves and swaps with the busiest region until none helps.

    **Arguments:** `size` is the number of nodes of each region.
    """
    region = _improve(load, _longest_first(load, size), size)
    largest = region_loads(load, region, size).max()
    return RegionBalance(region, largest, trivial_bound(load, size), jnp.int32(Status.OK))


def _longest_first(load: Array, size: Array) -> Int[Array, " experts"]:
    order = jnp.argsort(-load)

    def place(loads, expert):
        region = jnp.argmin((loads + load[expert]) / size)
        return loads.at[region].add(load[expert]), region

    _, regions = jax.lax.scan(place, jnp.zeros_like(size), order)
    return jnp.zeros(load.shape, jnp.int32).at[order].set(regions.astype(jnp.int32))


def _improve(load: Array, region: Array, size: Array) -> Int[Array, " experts"]:
    """Local search. Each step lowers the busiest region and lifts no other up to it, so that the
    sorted loads fall lexicographically and the search ends."""
    num_regions = size.shape[0]
    # What an expert of the busiest region is swapped for: an expert, or nothing of a region.
    partner_load = jnp.concatenate([load, jnp.zeros(num_regions, load.dtype)])

    def step(state):
        region, _ = state
        loads = region_loads(load, region, size)
        busiest = jnp.argmax(loads)
        partner = jnp.concatenate([region, jnp.arange(num_regions, dtype=region.dtype)])
        shift = load[:, None] - partner_load
        ours = loads[busiest] - shift / size[busiest]
        theirs = loads[partner] + shift / size[partner]
        allowed = (region == busiest)[:, None] & (partner != busiest)
        score = jnp.where(allowed, jnp.maximum(ours, theirs), jnp.inf)
        expert, other = jnp.unravel_index(jnp.argmin(score), score.shape)
        better = score.min() < loads[busiest] * (1 - GAIN)
        swapped = region.at[expert].set(partner[other])
        # An index past the end is a move: nothing comes back, and the update is dropped.
        swapped = swapped.at[other].set(busiest.astype(region.dtype), mode="drop")
        return jnp.where(better, swapped, region), better

    return jax.lax.while_loop(lambda state: state[1], step, (region, jnp.array(True)))[0]


def solve(load: np.ndarray, size: np.ndarray, time_limit: float, gap: float) -> RegionBalance:
    """The exact minimum by integer programming (HiGHS), on the host.

    **Returns:** the best found by solver or search; `Status.STOPPED_EARLY` where the limit came
    before a proof within `gap`.
    """
    # Here, because `import moejax` is to stay light.
    from scipy.optimize import milp

    fallback = search(jnp.asarray(load, jnp.result_type(float)), jnp.asarray(size, float))
    found = milp(**_program(load, size), options=_options(time_limit, gap))
    region, busiest = np.asarray(fallback.region), _busiest(load, fallback.region, size)
    if found.x is not None:
        solved = found.x[:-1].reshape(len(load), len(size)).argmax(1)
        if _busiest(load, solved, size) < busiest:
            region, busiest = solved, _busiest(load, solved, size)
    bound = float(trivial_bound(jnp.asarray(load, float), jnp.asarray(size, float)))
    if found.mip_dual_bound is not None:
        # In the units of the program, where a perfect balance is 1.
        bound = max(bound, float(found.mip_dual_bound) * max(load.sum(), 1e-300) / size.sum())
    proven = found.status == 0 or busiest <= bound * (1 + max(gap, GAIN))
    status = Status.OK if proven else Status.STOPPED_EARLY
    as_scalar = lambda value: jnp.asarray(value, jnp.result_type(float))
    return RegionBalance(
        jnp.asarray(region, jnp.int32), as_scalar(busiest), as_scalar(bound), jnp.int32(status)
    )


def _busiest(load: np.ndarray, region: object, size: np.ndarray) -> float:
    return float((np.bincount(np.asarray(region), load, len(size)) / size).max())


def _options(time_limit: float, gap: float) -> dict:
    return dict(time_limit=float(time_limit), mip_rel_gap=float(gap))


def _program(load: np.ndarray, size: np.ndarray) -> dict:
    """Minimize t with sum_r z_ir = 1 and sum_i z_ir load_i / size_r <= t; t is the last column.

    Loads are scaled so that a perfect balance has t = 1. Equal regions have no names: expert i, by
    falling load, needs none beyond the first i + 1.
    """
    from scipy import optimize, sparse

    num_experts, num_regions = len(load), len(size)
    scaled = load * size.sum() / max(load.sum(), 1e-300)
    one_region = sparse.kron(np.eye(num_experts), np.ones((1, num_regions)))
    busy = sparse.kron(scaled[None, :], np.diag(1 / size))
    matrix = sparse.block_array(
        [[one_region, np.zeros((num_experts, 1))], [busy, -np.ones((num_regions, 1))]]
    )
    # SciPy's stubs know scalar bounds only.
    low: Any = np.concatenate([np.ones(num_experts), np.full(num_regions, -np.inf)])
    high: Any = np.concatenate([np.ones(num_experts), np.zeros(num_regions)])
    upper = np.ones((num_experts, num_regions))
    if np.all(size == size[0]):
        order = np.argsort(-load, kind="stable")
        upper[order] = np.arange(num_regions) <= np.arange(num_experts)[:, None]
    cells = num_experts * num_regions
    least: Any = np.zeros(cells + 1)
    most: Any = np.append(upper.ravel(), np.inf)
    return dict(
        c=np.append(np.zeros(cells), 1.0),
        integrality=np.append(np.ones(cells), 0),
        bounds=optimize.Bounds(least, most),
        constraints=optimize.LinearConstraint(matrix.tocsc(), low, high),
    )
