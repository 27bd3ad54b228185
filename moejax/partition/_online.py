"""Deciding from a table that learns: a whole run of batches as one scan."""

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._checks import as_float
from moejax._status import Status, is_traced, merge
from moejax._typing import Array, Bool, Float, FloatScalar, Int, IntScalar, PRNGKeyArray
from moejax.cost import PIMCostTable
from moejax.partition._base import PartitionCosts
from moejax.partition._score import score
from moejax.partition._sieve import best_prefix, sieve
from moejax.partition._validate import _check_width


class OnlineRun(eqx.Module):
    """What a run of batches took, and what was believed.

    Fields:

    - `total_time`, `known_time`: [iterations, layers] in s, true mean times of the partition that
        was chosen and of the one that knows them.
    - `num_gpu`: int32 [iterations, layers], experts on the GPU.
    - `table_error`: [iterations], mean over the experts that ran on PIM of the relative distance
        between the table, updated, and the truth; NaN where none did.
    - `worst_error`: [iterations], the largest of those.
    - `unseen_share`: [iterations], the share of active experts whose count was never on PIM so far.
    - `table`: the `PIMCostTable` at the end.
    - `status`: int32, the worst of the run.
    """

    total_time: Float[Array, "iterations layers"]
    known_time: Float[Array, "iterations layers"]
    num_gpu: Int[Array, "iterations layers"]
    table_error: Float[Array, " iterations"]
    worst_error: Float[Array, " iterations"]
    unseen_share: Float[Array, " iterations"]
    table: PIMCostTable
    status: IntScalar

    @property
    def regret(self) -> Float[Array, " iterations"]:
        """Time of all layers over that of the partition that knows the truth, less 1."""
        return jnp.sum(self.total_time, axis=1) / jnp.sum(self.known_time, axis=1) - 1


def run_online(
    tokens_per_expert: Int[Array, "iterations layers experts"],
    costs: PartitionCosts,
    truth: Float[Array, "phases counts"],
    table: PIMCostTable,
    *,
    learns: bool = True,
    key: PRNGKeyArray,
) -> OnlineRun:
    """Batches arrive, Sieve decides from the table, the truth answers, the table learns.

    In every iteration the experts of all layers that ran on PIM are timed, each at a refresh phase
    of its own, drawn uniformly; those with the same count are averaged and move one entry of the
    table, which all layers share (a table of its own for each: `jax.vmap` over layers). Only what
    ran on PIM is timed, so an entry that is believed too slow is never corrected. One `lax.scan`;
    batches of betas, fallbacks and keys by `jax.vmap` over `table` and `key`.

    **Arguments:**

    - `tokens_per_expert`: int [iterations, layers, experts], 0 to `table.max_tokens`.
    - `costs`: of every layer; its `pim_time_by_tokens` is replaced, by the table where Sieve
        decides and by the mean truth where time is taken.
    - `truth`: [phases, max_tokens + 1] in s, time of an expert by token count at each of some
        refresh phases, for instance from `moejax.cost.dram.gemv_time`; one row for no noise.
    - `table`: `PIMCostTable`, with its fallback and beta.
    - `learns`: static; whether the table is updated. False is a roofline-only scheduler.
    - `key`: for the phases.

    **Returns:** `OnlineRun`. The partition that knows the truth is the best prefix of Sieve's order
    under the mean over phases; nobody knows the phase.

    **Raises:** `ValueError` for arrays of the wrong shape, counts beyond the table, or times that
    are negative or not finite; a `status` under tracing.
    """
    _check_width(tokens_per_expert)
    counts, truth = jnp.asarray(tokens_per_expert), as_float(truth)
    _check_shapes(counts, truth, table)
    run = _run(counts, costs, truth, table, key, learns)
    if not is_traced(run) and int(run.status) != Status.OK:
        raise ValueError(
            f"run_online: {Status(int(run.status)).message}; tokens_per_expert = {counts.min()} .. "
            f"{counts.max()} (table: 0 .. {table.max_tokens}), truth = {truth.min():g} .. "
            f"{truth.max():g}, believed {table.times.min():g} .. {table.times.max():g}"
        )
    return run


def _check_shapes(counts: Array, truth: Array, table: PIMCostTable) -> None:
    if counts.ndim != 3 or 0 in counts.shape or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(
            f"tokens_per_expert is {counts.dtype} {counts.shape}: allowed are integers "
            "[iterations, layers, experts], at least one of each"
        )
    if truth.ndim != 2 or truth.shape[0] < 1 or truth.shape[1] != table.max_tokens + 1:
        raise ValueError(
            f"truth has shape {truth.shape}: allowed is [phases, {table.max_tokens + 1}], one "
            "column for each count of the table"
        )


@eqx.filter_jit
def _run(counts, costs, truth, table: PIMCostTable, key, learns: bool) -> OnlineRun:
    phases = jax.random.randint(key, counts.shape, 0, truth.shape[0])
    mean = jnp.mean(truth, axis=0).astype(table.time.dtype)
    known = _with_times(costs, mean)

    def iterate(table: PIMCostTable, batch):
        counts, phases = batch
        believed = _with_times(costs, table.times)
        chosen = jax.vmap(sieve, (0, None))(counts, believed)
        true = jax.vmap(score, (0, 0, None))(chosen.on_gpu, counts, known)
        best = jax.vmap(best_prefix, (0, None))(counts, known)
        on_pim = (counts > 0) & ~chosen.on_gpu
        row = jnp.clip(counts, 0, table.max_tokens)
        observed = truth[phases, row].astype(table.time.dtype)
        if learns:
            flat = (array.reshape(-1) for array in (row, observed, on_pim))
            table = table.update(*flat)
        out = _measure(table, mean, row, on_pim, counts > 0)
        status = merge(jnp.max(chosen.status), jnp.max(true.status), jnp.max(best.status))
        return table, (true, best, chosen.num_gpu, out, status)

    table, (true, best, num_gpu, out, status) = jax.lax.scan(iterate, table, (counts, phases))
    return OnlineRun(
        total_time=true.total_time,
        known_time=best.total_time,
        num_gpu=num_gpu,
        table_error=out[0],
        worst_error=out[1],
        unseen_share=out[2],
        table=table,
        status=jnp.max(status),
    )


def _with_times(costs: PartitionCosts, times: Float[Array, " counts"]) -> PartitionCosts:
    return eqx.tree_at(lambda c: c.pim_time_by_tokens, costs, times)


def _measure(
    table: PIMCostTable,
    mean: Float[Array, " counts"],
    counts: Int[Array, "layers experts"],
    on_pim: Bool[Array, "layers experts"],
    active: Bool[Array, "layers experts"],
) -> tuple[FloatScalar, FloatScalar, FloatScalar]:
    """Mean and worst relative error of the entries used, and the share of those never observed."""
    error = jnp.abs(table.times - mean) / jnp.where(mean > 0, mean, 1)
    error = jnp.where(on_pim, error[counts], 0)
    used, present = jnp.sum(on_pim), jnp.sum(active)
    average = jnp.where(used > 0, jnp.sum(error) / used, jnp.nan)
    unseen = jnp.sum(active & ~table.seen[counts]) / jnp.maximum(present, 1)
    return average, jnp.where(used > 0, jnp.max(error), jnp.nan), unseen
