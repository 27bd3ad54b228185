"""The commands of a GEMV written out in loops, for `tests.oracles.dram.Channel`."""

import math
from fractions import Fraction

from tests.oracles.dram import ALL, EVEN, ODD


def b200(device, outputs, inputs, tokens, groups, order, weight_bits=16, activation_bits=16):
    """(kind, count, target, side) of every run; `device` as in `tests.oracles.pim_timing`."""
    per_bank = math.ceil(
        Fraction(math.ceil(Fraction(outputs, device.channels // groups)), device.banks)
    )
    mine = math.ceil(Fraction(inputs, groups))
    lanes = Fraction(16 * device.macs_per_unit) / Fraction(weight_bits)
    columns = math.ceil(mine / lanes)
    writes = math.ceil(mine * Fraction(activation_bits) / 8 / device.burst_bytes)
    per_row = device.row_bytes // (2 * device.macs_per_unit)
    rows = math.ceil(per_bank * columns / per_row)
    fill = Fraction(max(columns, device.fill_columns), columns)
    results = per_bank * math.ceil(2 * device.banks / device.burst_bytes)
    resident = device.global_buffer_vectors if order == "row_stationary" else 1
    left = tokens
    while left > 0:
        now = min(left, resident)
        left -= now
        yield "GWRITE", writes * now, ALL, 1
        for row in range(rows):
            yield "ACT", 1, ALL, 1
            first, last = row * per_row, min((row + 1) * per_row, per_bank * columns)
            yield "MAC", (math.floor(last * fill) - math.floor(first * fill)) * now, ALL, 1
            if not (order == "matrix_outer" and rows == 1):
                yield "PRE", 1, ALL, 1
        yield "RDRES", results * now, ALL, 1
        yield "SYNC", 0, ALL, 1


def attacc(device, outputs, inputs, tokens):
    """As AttAcc's score phase: inputs over the banks of a group, 16 output steps of results."""
    width = 4 * device.macs_per_unit
    steps = math.ceil(Fraction(outputs * 4, device.channels * device.banks))
    columns = math.ceil(Fraction(inputs, width))
    per_row = device.row_bytes // (2 * device.macs_per_unit)
    for _ in range(tokens):
        yield "GWRITE", 4 * columns, ALL, 1
        done = moved = 0
        while done < steps * columns:
            now = min(per_row, steps * columns - done)
            yield "ACT", 1, ALL, 1
            yield "MAC", now, ALL, 1
            yield "PRE", 1, ALL, 1
            done += now
            sets = math.ceil(steps / 16) if done == steps * columns else done // (16 * columns)
            if sets > moved:
                yield "RDRES", 8 * (sets - moved), ALL, 1
            moved = sets


def samsung(passes, tiles, mode_in):
    """PIMSimulator's kernel, and the first write after it, which marks its end."""
    yield "ACT", 1, ALL, 0
    yield "SYNC", mode_in, ALL, 0
    for _ in range(passes):
        for tile in [*range(0, tiles, 2), *range(1, tiles, 2)]:
            own = ODD if tile % 2 else EVEN
            if tile % 2 and tile > 1:
                yield from _reopen(ODD)
            yield "WR", 8, ODD, 0
            for _ in range(2):
                yield from _reopen(own)
                yield "MAC", 32, own, 0
        yield from _reopen(ODD)
        yield "WR", 8, ODD, 0
        yield from _reopen(ODD)
    yield "WR", 1, ODD, 0


def _reopen(banks):
    yield "PRE", 1, banks, 0
    yield "ACT", 1, banks, 0
