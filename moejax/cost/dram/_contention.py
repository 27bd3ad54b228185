"""GPU reads among the commands of a GEMV: how much each slows the other."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import check_positive
from moejax._status import is_traced
from moejax._typing import FloatScalar, IntLike
from moejax.cost.dram._engine import BANK_GROUPS, FOUR, Stream, issue
from moejax.cost.dram._timing import ACT, MAC, NOP, PRE, RD, ChannelTiming, in_clocks
from moejax.hardware import BankPIM


BANKS = 16


class Contention(NamedTuple):
    """Times in s of the same rows of PIM and GPU, alone and together.

    `contention` is the share of the shorter one that does not overlap, `(together - longer) /
    shorter`: what `moejax.partition.PartitionCosts.contention` asks for. 0 where both proceed side
    by side, 1 where one waits for the other, above 1 where changing over costs as well.
    """

    pim: FloatScalar
    gpu: FloatScalar
    together: FloatScalar
    contention: FloatScalar


def measure_contention(
    pim: BankPIM,
    timing: ChannelTiming | None = None,
    *,
    dual: bool,
    reads_per_row: IntLike = 1,
    rows: int = 32,
    max_reads: int = 8,
) -> Contention:
    """Streams weights to PIM and to the GPU at once through one pseudo-channel, without refresh.

    After every row that all banks multiply, the GPU reads `reads_per_row` times four whole rows,
    one of each bank group, at the full rate of the bus. With `dual` row buffers PIM has its own,
    and both share the data bus and the activation window; with single ones each closes the other's
    rows.

    **Arguments:**

    - `pim`: of 16 banks a pseudo-channel, which is what the order of the reads is made for.
    - `timing`: `ChannelTiming.of(pim)` unless given.
    - `dual`: static.
    - `reads_per_row`: 1 to `max_reads`, traced or not.
    - `rows`, `max_reads`: static; rows of PIM, and the room for reads.

    **Returns:** `Contention`, scalars.

    **Raises:** `ValueError` for another kind of PIM or number of banks, counts below 1, or more
    reads than there is room for; NaN under tracing.
    """
    if not isinstance(pim, BankPIM):
        raise ValueError(f"measure_contention: pim is a {type(pim).__name__}: allowed is a BankPIM")
    if not is_traced(pim.banks) and np.any(np.asarray(pim.banks) != BANKS):
        raise ValueError(f"measure_contention: pim.banks = {pim.banks}: allowed is {BANKS}")
    check_positive("measure_contention", "rows", rows)
    check_positive("measure_contention", "reads_per_row", reads_per_row)
    if not is_traced(reads_per_row) and reads_per_row > max_reads:
        raise ValueError(f"reads_per_row = {reads_per_row}: allowed is 1 to {max_reads}")
    timing = ChannelTiming.of(pim) if timing is None else timing
    return _measure(pim, timing, jnp.asarray(reads_per_row), dual, rows, max_reads)


@functools.partial(jax.jit, static_argnames=("dual", "rows", "max_reads"))
def _measure(pim: BankPIM, timing: ChannelTiming, reads, dual: bool, rows: int, max_reads: int):
    clocks = in_clocks(timing, pim.banks, pim.banks_per_faw)
    columns = pim.row_bytes // (2 * pim.macs_per_unit)
    bursts = BANK_GROUPS * (pim.row_bytes // pim.burst_bytes)
    stream, is_gpu = _mixed(rows, max_reads, reads, columns, bursts)

    def end(keep):
        kept = Stream(jnp.where(keep, stream.kind, NOP), stream.count, stream.target, stream.buffer)
        return issue(kept, clocks, num_banks=BANKS, dual=dual).done

    everything = jnp.ones_like(is_gpu)
    ends = jax.vmap(end)(jnp.stack([~is_gpu, is_gpu, everything])) * timing.ck
    fits = (reads >= 1) & (reads <= max_reads) & (pim.banks == BANKS)
    ends = jnp.where(fits, ends, jnp.nan)
    alone, together = ends[:2], ends[2]
    contention = (together - jnp.max(alone)) / jnp.min(alone)
    return Contention(ends[0], ends[1], together, contention)


def _mixed(rows: int, max_reads: int, reads, columns, bursts):
    """The stream, and which of its commands are the GPU's."""
    one = jnp.ones(rows, jnp.int32)
    everywhere, own = -one, one
    parts = [(ACT, one, everywhere, own), (MAC, one * columns, everywhere, own)]
    parts += [(PRE, one, everywhere, own)]
    per_group = BANKS // BANK_GROUPS
    for read in range(max_reads):
        place = (jnp.arange(rows) * reads + read) % per_group
        wanted = jnp.where(read < reads, one, 0)
        for group in range(BANK_GROUPS):
            parts.append((ACT, wanted, group * per_group + place, 0 * one))
        parts.append((RD, wanted * bursts, FOUR - place, 0 * one))
        parts.append((PRE, wanted, FOUR - place, 0 * one))
    kinds = jnp.stack([jnp.where(count > 0, kind, NOP) for kind, count, _, _ in parts], axis=1)
    fields = [jnp.stack([part[i] for part in parts], axis=1) for i in (1, 2, 3)]
    count, target, buffer = (field.reshape(-1).astype(jnp.int32) for field in fields)
    return Stream(kinds.reshape(-1).astype(jnp.int32), count, target, buffer), buffer == 0
