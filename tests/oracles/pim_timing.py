"""A literal bank-PIM GEMV in plain Python: loops, whole numbers, nanoseconds.

Written from the published command structure (NeuPIMs, AttAcc, the timing patch of the Duplex
simulator), not from `moejax.hardware`. Counts are exact: bit widths enter as fractions.
"""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Device:
    """Geometry, and timing in nanoseconds."""

    channels: int = 256
    banks: int = 16
    macs_per_unit: int = 16
    row_bytes: int = 1024
    burst_bytes: int = 32
    banks_per_faw: int = 8
    fill_columns: int = 6
    global_buffer_vectors: int = 1
    rcd: float = 14
    rp: float = 14
    ras: float = 34
    rtp: float = 6
    ccd_short: float = 1
    ccd_long: float = 2
    faw: float = 30
    cl: float = 14
    cwl: float = 4
    burst: float = 1
    rfc: float = 350
    refi: float = 3900
    mac_cadence: float = 2


def gemv_ns(device, outputs, inputs, tokens, order, layout, weight_bits=16, activation_bits=16):
    """Nanoseconds of a GEMV for `tokens` vectors, refresh included; and the P_k used."""
    if tokens == 0:
        return 0.0, None
    best = None
    chosen_by = tokens if layout == "per_count" else 1
    reduction_groups = 1
    while reduction_groups <= min(device.channels, 4096):
        if device.channels % reduction_groups == 0:
            command = _commands(
                device, outputs, inputs, reduction_groups, weight_bits, activation_bits
            )
            key = _all_tokens(device, command, chosen_by, order)
            # Strictly: a tie stays with the smaller number of groups.
            if best is None or key < best[0] * (1 - 1e-9):
                best = (key, reduction_groups, command)
        reduction_groups *= 2
    _, reduction_groups, command = best
    time = _all_tokens(device, command, tokens, order)
    return time / (1 - device.rfc / device.refi), reduction_groups


def _commands(device, outputs, inputs, reduction_groups, weight_bits, activation_bits):
    output_groups = device.channels // reduction_groups
    outputs_here = math.ceil(Fraction(outputs, output_groups))
    inputs_here = math.ceil(Fraction(inputs, reduction_groups))
    outputs_per_bank = math.ceil(Fraction(outputs_here, device.banks))
    lanes = Fraction(device.macs_per_unit * 16) / Fraction(weight_bits)
    columns_per_output = math.ceil(inputs_here / lanes)
    column_bytes = 2 * device.macs_per_unit
    columns_per_row = device.row_bytes // column_bytes
    rows = math.ceil(Fraction(outputs_per_bank * columns_per_output, columns_per_row))

    vector_bytes = Fraction(inputs_here) * Fraction(activation_bits) / 8
    t_gw = math.ceil(vector_bytes / device.burst_bytes) * device.ccd_short
    t_gw += device.cwl + device.burst
    t_act = device.rcd
    for _ in range(math.ceil(Fraction(device.banks, device.banks_per_faw)) - 1):
        t_act += device.faw
    t_mac = 0.0
    for _ in range(outputs_per_bank):
        t_mac += max(columns_per_output, device.fill_columns) * device.mac_cadence
    open_for = t_act + columns_per_row * device.mac_cadence
    t_sw = max(device.rtp, device.ras - open_for) + device.rp + t_act
    # A 16-bit accumulator of each bank comes back per output.
    bursts = math.ceil(Fraction(2 * device.banks, device.burst_bytes))
    t_res = outputs_per_bank * bursts * device.ccd_long
    return dict(rows=rows, gw=t_gw, act=t_act, mac=t_mac, sw=t_sw, res=t_res)


def _one_token(device, c):
    drain = device.cl + device.burst
    return max(c["gw"], c["act"]) + c["mac"] + (c["rows"] - 1) * c["sw"] + c["res"] + drain


def _all_tokens(device, c, tokens, order):
    drain = device.cl + device.burst
    if order == "row_stationary":
        total = 0.0
        left = tokens
        while left > 0:
            group = min(left, device.global_buffer_vectors)
            total += max(group * c["gw"], c["act"]) + group * c["mac"]
            total += (c["rows"] - 1) * c["sw"] + group * c["res"] + drain
            left -= group
        return total
    total = _one_token(device, c)
    for _ in range(tokens - 1):
        if order == "matrix_outer" and c["rows"] == 1:
            total += c["gw"] + c["mac"] + c["res"] + drain
        else:
            total += device.rtp + _one_token(device, c)
    return total
