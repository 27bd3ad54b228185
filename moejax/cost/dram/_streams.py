"""The commands of a GEMV on three machines, as arrays made by index arithmetic.

Sizes may be traced; how many commands there is room for is static. Slots beyond a smaller matrix,
or beyond the tokens there are, hold `NOP`.
"""

from typing import NamedTuple

import jax.numpy as jnp

from moejax._typing import Array, FloatLike, Int, IntLike, IntScalar
from moejax.cost.dram._engine import ALL, EVEN, ODD, Stream
from moejax.cost.dram._timing import ACT, GWRITE, MAC, NOP, PRE, RDRES, SYNC, WR
from moejax.hardware import BankPIM


# A run of multiplications must end before the next refresh but one: 256 take at most 2 us.
RUN = 256
# PIMSimulator: a tile is 128 inputs by 8 outputs of each unit, in two rows of its bank.
_TILE_INPUTS, _TILE_OUTPUTS, _TILE_WRITES, _ROW_MACS = 128, 8, 8, 32
_TILE_SLOTS, _PASS_SLOTS, _HEAD_SLOTS = 9, 5, 2


class Work(NamedTuple):
    """What one token asks of one pseudo-channel. Traced whole numbers.

    `writes` of the vector buffer; `columns` of each bank, `columns_per_row` of them in a row;
    `stretch`, multiplications a column as (numerator, denominator), above 1 where the adder tree
    needs filling; `results_per_set` reads after every `columns_per_set` columns.
    """

    writes: IntScalar
    columns: IntScalar
    columns_per_row: IntScalar
    stretch: tuple[IntScalar, IntScalar]
    columns_per_set: IntScalar
    results_per_set: IntScalar


class Room(NamedTuple):
    """Static sizes of a stream: groups of tokens, rows of a bank, multiplication runs of a row."""

    groups: int
    rows: int
    runs: int


def ceil_div(numerator: IntLike, denominator: IntLike) -> Array:
    """Of whole numbers."""
    return jnp.asarray(-(-numerator // denominator), jnp.int32)


def b200_work(
    outputs: IntLike,
    inputs: IntLike,
    pim: BankPIM,
    reduction_groups: IntLike,
    weight_bits: FloatLike,
    activation_bits: FloatLike,
) -> Work:
    """A matrix spread over all channels in `reduction_groups` slices of its inputs."""
    groups = jnp.maximum(jnp.asarray(reduction_groups, jnp.int32), 1)
    output_groups = jnp.maximum(pim.channels // groups, 1)
    per_bank = ceil_div(ceil_div(outputs, output_groups), pim.banks)
    slice_inputs = ceil_div(inputs, groups)
    columns = _ceil_bits(slice_inputs, weight_bits, 16 * pim.macs_per_unit)
    bursts = _ceil_bits(slice_inputs, activation_bits, 8 * pim.burst_bytes)
    return Work(
        writes=bursts,
        columns=per_bank * columns,
        columns_per_row=pim.row_bytes // (2 * pim.macs_per_unit),
        stretch=(jnp.maximum(columns, pim.fill_columns), columns),
        columns_per_set=per_bank * columns,
        results_per_set=per_bank * ceil_div(2 * pim.banks, pim.burst_bytes),
    )


def attacc_work(outputs: IntLike, inputs: IntLike, pim: BankPIM, weight_bits: FloatLike) -> Work:
    """AttAcc: inputs over the 4 banks of a group, outputs over all groups of all channels.

    Results of 16 output steps move to the buffer die together, 8 moves.
    """
    lanes = 4 * pim.macs_per_unit
    steps = ceil_div(outputs, jnp.maximum(pim.channels * pim.banks // 4, 1))
    columns = _ceil_bits(inputs, weight_bits, 16 * lanes)
    return Work(
        writes=4 * ceil_div(inputs, lanes),
        columns=steps * columns,
        columns_per_row=pim.row_bytes // (2 * pim.macs_per_unit),
        stretch=(jnp.int32(1), jnp.int32(1)),
        columns_per_set=16 * columns,
        results_per_set=jnp.int32(8),
    )


def _ceil_bits(count: IntLike, bits: FloatLike, unit: Array) -> Array:
    """`ceil(count * bits / unit)`; bits in steps of 1/4 are exact."""
    quarters = jnp.round(jnp.asarray(bits) * 4).astype(jnp.int32)
    return ceil_div(count * quarters, 4 * unit)


def buffered_stream(
    work: Work,
    tokens: IntLike,
    room: Room,
    *,
    tokens_per_group: IntLike,
    keeps_row: Array | bool,
    waits: bool,
) -> Stream:
    """B200-class and AttAcc: vectors through a buffer, rows of all banks at once.

    A group of tokens writes its vectors, goes through all rows, multiplying every vector with each,
    and reads its results. `keeps_row`: a matrix of a single row leaves it open between groups.
    `waits`: a group starts after the one before has returned everything.
    """
    group = jnp.arange(room.groups)[:, None]
    here = jnp.clip(tokens - group * tokens_per_group, 0, tokens_per_group)
    rows = ceil_div(work.columns, work.columns_per_row)
    write = _slot(GWRITE, work.writes * here)
    row = jnp.arange(room.rows)[None, :]
    active = (row < rows) & (here > 0)
    macs, results = _row_work(work, row, here)
    # The last row of a matrix that keeps its row stays open; the first activate of a row that is
    # open does nothing.
    opens = _slot(ACT, active.astype(jnp.int32))
    closes = _slot(PRE, (active & ~(jnp.asarray(keeps_row) & (rows == 1))).astype(jnp.int32))
    parts = [opens]
    for run in range(room.runs):
        parts.append(_slot(MAC, jnp.where(active, jnp.clip(macs - run * RUN, 0, RUN), 0)))
    parts += [closes, _slot(RDRES, jnp.where(active, results, 0))]
    body = jnp.stack(parts, axis=2).reshape(2, room.groups, len(parts), room.rows)
    body = jnp.swapaxes(body, 2, 3).reshape(2, room.groups, -1)
    sync = jnp.where(here > 0, SYNC if waits else NOP, NOP)
    end = jnp.stack([sync, jnp.zeros_like(here)])
    table = jnp.concatenate([write, body, end], axis=2).reshape(2, -1).astype(jnp.int32)
    everywhere = jnp.full(table.shape[1], ALL, jnp.int32)
    return Stream(table[0], table[1], everywhere, jnp.ones_like(everywhere))


def macs_of_a_row(work: Work) -> Array:
    """The most multiplications of one vector with a row."""
    return ceil_div(work.columns_per_row * work.stretch[0], work.stretch[1]) + 1


def _row_work(work: Work, row: Array, here: Array) -> tuple[Array, Array]:
    """(multiplications, results read) in each row: whole sets up to its end, less those before."""
    up_to = lambda r: jnp.minimum(r * work.columns_per_row, work.columns)
    wide, narrow = work.stretch
    slots = lambda r: up_to(r) * wide // jnp.maximum(narrow, 1)
    sets = lambda r: jnp.where(
        up_to(r) == work.columns,
        ceil_div(work.columns, jnp.maximum(work.columns_per_set, 1)),
        up_to(r) // jnp.maximum(work.columns_per_set, 1),
    )
    macs = (slots(row + 1) - slots(row)) * here
    return macs, (sets(row + 1) - sets(row)) * work.results_per_set * here


def _slot(kind: int, count: Array) -> Int[Array, "2 ..."]:
    """Kinds and counts; nothing where there is nothing to do."""
    count = jnp.asarray(count, jnp.int32)
    return jnp.stack([jnp.where(count > 0, kind, NOP), count])


def samsung_tiles(outputs: IntLike, inputs: IntLike, pim: BankPIM) -> tuple[Array, Array]:
    """(output tiles, input tiles) of PIMSimulator's kernel; outputs of all channels side by side.

    Inputs are not split over channels, and few outputs leave units idle.
    """
    per_tile = _TILE_OUTPUTS * pim.banks * pim.channels
    return ceil_div(outputs, jnp.maximum(per_tile, 1)), ceil_div(inputs, _TILE_INPUTS)


def samsung_stream(passes: IntLike, input_tiles: IntLike, room: Room, mode_in: Array) -> Stream:
    """PIMSimulator's kernel: a pass takes one vector through one tile of outputs.

    Input tiles 0, 2, 4.. lie in even banks and come first, then 1, 3, 5.. in odd banks. A tile
    writes 8 bursts of the vector to registers, whose row lies in the odd banks, and multiplies two
    rows of 32 columns. So an odd tile closes the register row and opens it again, an even one does
    not. A pass ends with 8 writes of accumulators to the odd banks. Mode switches of a pass hide
    under the recovery of those writes. One pass more than there is room for begins, since its first
    write marks the end of the last.
    """
    tile = jnp.arange(room.rows)[None, :]
    index = jnp.arange(room.groups)[:, None]
    even = ceil_div(input_tiles, 2)
    real = (tile < input_tiles) & (index < passes)
    bank = jnp.where(tile < even, EVEN, ODD)
    reopens = real & (tile > even)
    one = jnp.ones_like(tile * index)
    odd, own, macs = one * ODD, one * bank, one * _ROW_MACS
    writes = one * _TILE_WRITES
    slots = [
        (PRE, one, odd, reopens),
        (ACT, one, odd, reopens),
        # The first write beyond the last pass is the end of the kernel.
        (WR, jnp.where(real, writes, 1), odd, real | ((index == passes) & (tile == 0))),
        (PRE, one, own, real),
        (ACT, one, own, real),
        (MAC, macs, own, real),
        (PRE, one, own, real),
        (ACT, one, own, real),
        (MAC, macs, own, real),
    ]
    body = _pack(slots)
    end = index < passes
    one = jnp.ones_like(index)
    odd = one * ODD
    slots = [(PRE, one, odd, end), (ACT, one, odd, end), (WR, one * _TILE_WRITES, odd, end)]
    tail = _pack([*slots, (PRE, one, odd, end), (ACT, one, odd, end)])
    table = jnp.concatenate([body, tail], axis=2).reshape(3, -1)
    one = jnp.int32(1)
    head = jnp.stack([jnp.array([ACT, SYNC]), jnp.stack([one, mode_in]), jnp.array([ALL, ALL])])
    table = jnp.concatenate([head, table], axis=1).astype(jnp.int32)
    return Stream(table[0], table[1], table[2], jnp.zeros(table.shape[1], jnp.int32))


def _pack(slots) -> Array:
    """[3 (kind, count, target), groups, tiles * slots] of slots that each are [groups, tiles]."""
    kinds = jnp.stack([jnp.where(real, kind, NOP) for kind, _, _, real in slots], axis=-1)
    counts = jnp.stack([jnp.where(real, count, 0) for _, count, _, real in slots], axis=-1)
    targets = jnp.stack([target for _, _, target, _ in slots], axis=-1)
    table = jnp.stack([kinds, counts, targets])
    return table.reshape(3, table.shape[1], -1)


def samsung_marks(room: Room) -> Int[Array, " passes"]:
    """Where in the stream each pass has its first write; the last is that of the end."""
    stride = room.rows * _TILE_SLOTS + _PASS_SLOTS
    return _HEAD_SLOTS + 2 + stride * jnp.arange(room.groups)
