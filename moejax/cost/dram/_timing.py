"""Command timing of one pseudo-channel, in seconds and in whole clocks."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_non_negative, check_positive, lookup, nearest
from moejax._status import is_traced
from moejax._typing import Array, FloatScalar, Int, IntScalar
from moejax.hardware import BankPIM


KERNELS = ("b200", "samsung", "attacc")

# A timing this close above a whole clock is that clock: 14.62 ns at 0.7692 ns is 19 clocks.
_SLACK = 0.02
_NS = 1e-9


class ChannelTiming(eqx.Module):
    """Minimum times between the commands of a pseudo-channel, in s. JEDEC's names without the `t`.

    `moejax.hardware.DRAMTiming` holds what a closed form of a GEMV needs; a model of commands needs
    the rest too. `ChannelTiming.of(pim, kernel)` completes one by the other. The command clock
    rounds every time up to whole clocks, as a controller does.

    **Arguments:** all traced, all s.

    - `ck`: the command clock.
    - `rcd`, `rcd_write`, `rp`, `ras`, `rc`: activate to read, to write; precharge to activate;
        activate to precharge; activate to activate of one bank.
    - `read_to_precharge`: last read or multiplication to precharge.
    - `wr`: end of written data to precharge.
    - `ccd_short`, `ccd_long`, `mac_cadence`: column to column in different and in one bank group,
        and of all banks multiplying.
    - `rrd_short`, `rrd_long`, `faw`: activate to activate of different banks, and the window in
        which four single activates fit (tFAW, tXAW).
    - `cl`, `cwl`, `burst`: read and write latency, one access on the data bus.
    - `wtr_short`, `wtr_long`: end of written data to read.
    - `turnaround`: dead time of the data bus between read and write data.
    - `rfc`, `refi`, `precharge_to_refresh`: length of a refresh, time between two, and from the
        precharge before it (tRP).
    - `write_cadence`, `operand`: from one write of the vector buffer to the next, and from the last
        to the first multiplication.
    - `drain`, `result_cadence`, `result_latency`: last multiplication to first result, result to
        result, and a result's command to its arrival.
    - `result_to_write`, `write_to_result`: between results and vector writes on the bus.
    - `mode_in`, `mode_out`: entering and leaving the PIM mode, once a kernel.
    """

    ck: FloatScalar = eqx.field(converter=as_float)
    rcd: FloatScalar = eqx.field(converter=as_float)
    rcd_write: FloatScalar = eqx.field(converter=as_float)
    rp: FloatScalar = eqx.field(converter=as_float)
    ras: FloatScalar = eqx.field(converter=as_float)
    rc: FloatScalar = eqx.field(converter=as_float)
    read_to_precharge: FloatScalar = eqx.field(converter=as_float)
    wr: FloatScalar = eqx.field(converter=as_float)
    ccd_short: FloatScalar = eqx.field(converter=as_float)
    ccd_long: FloatScalar = eqx.field(converter=as_float)
    mac_cadence: FloatScalar = eqx.field(converter=as_float)
    rrd_short: FloatScalar = eqx.field(converter=as_float)
    rrd_long: FloatScalar = eqx.field(converter=as_float)
    faw: FloatScalar = eqx.field(converter=as_float)
    cl: FloatScalar = eqx.field(converter=as_float)
    cwl: FloatScalar = eqx.field(converter=as_float)
    burst: FloatScalar = eqx.field(converter=as_float)
    wtr_short: FloatScalar = eqx.field(converter=as_float)
    wtr_long: FloatScalar = eqx.field(converter=as_float)
    turnaround: FloatScalar = eqx.field(converter=as_float)
    rfc: FloatScalar = eqx.field(converter=as_float)
    refi: FloatScalar = eqx.field(converter=as_float)
    precharge_to_refresh: FloatScalar = eqx.field(converter=as_float)
    write_cadence: FloatScalar = eqx.field(converter=as_float)
    operand: FloatScalar = eqx.field(converter=as_float)
    drain: FloatScalar = eqx.field(converter=as_float)
    result_cadence: FloatScalar = eqx.field(converter=as_float)
    result_latency: FloatScalar = eqx.field(converter=as_float)
    result_to_write: FloatScalar = eqx.field(converter=as_float)
    write_to_result: FloatScalar = eqx.field(converter=as_float)
    mode_in: FloatScalar = eqx.field(converter=as_float)
    mode_out: FloatScalar = eqx.field(converter=as_float)

    def __check_init__(self) -> None:
        for name in NAMES:
            check = check_positive if name in _POSITIVE else check_non_negative
            check("ChannelTiming", name, getattr(self, name))
        if not is_traced(self.rfc, self.refi) and np.any(
            np.asarray(self.rfc) >= np.asarray(self.refi)
        ):
            raise ValueError(
                f"ChannelTiming.rfc = {self.rfc}: allowed is less than refi = {self.refi}"
            )

    @classmethod
    def of(cls, pim: BankPIM, kernel: str = "b200", **changes: Any) -> "ChannelTiming":
        """The timing of `pim`, and for what `pim.timing` lacks, that of the kernel's machine.

        **Arguments:**

        - `pim`: its `timing` gives the times it has.
        - `kernel`: `b200` (HBM3 at 8 Gb/s, the timing patch of Duplex's simulator), `samsung`
            (HBM2, PIMSimulator) or `attacc` (HBM3 at 5.2 Gb/s, AttAcc's simulator).
        - `changes`: times in s that replace those, by name.

        **Raises:** `ValueError` for an unknown kernel or name, naming the nearest.
        """
        for name in changes:
            if name not in NAMES:
                known = ", ".join(NAMES)
                raise ValueError(f"ChannelTiming has no {name!r}{nearest(name, NAMES)} ({known})")
        lookup("kernel", kernel, dict.fromkeys(KERNELS))
        values = {name: getattr(pim.timing, name) for name in _SHARED}
        values |= {name: ns * _NS for name, ns in _EXTRAS[kernel].items()} | changes
        values = _PATHS[kernel](values, pim.timing.rtp) | changes
        return cls(**values)


NAMES = tuple(field.name for field in dataclasses.fields(ChannelTiming))
_POSITIVE = ("ck", "refi", "mac_cadence", "ccd_short", "ccd_long")
_SHARED = ("rcd", "rp", "ras", "ccd_short", "ccd_long", "faw", "cl", "cwl", "burst", "rfc", "refi")
_SHARED += ("mac_cadence",)

# What the presets of `moejax.hardware` list as not used by the closed form; sources are there.
_EXTRAS = {
    "b200": dict(ck=0.5, rcd_write=14, rc=48, rrd_short=1, rrd_long=2, wr=16)
    | dict(wtr_short=6, wtr_long=8, turnaround=1),
    "samsung": dict(ck=1, rcd_write=10, rc=47, rrd_short=4, rrd_long=6, wr=16)
    | dict(wtr_short=4, wtr_long=9, turnaround=1),
    "attacc": dict(ck=0.7692, rcd_write=14.62, rc=48.46, rrd_short=1.54, rrd_long=3.08, wr=16.15)
    | dict(wtr_short=6.15, wtr_long=8.46, turnaround=1.54),
}


def _b200_paths(t: dict[str, Any], rtp: Any) -> dict[str, Any]:
    """Vector writes are bus writes, results bus reads; the adder tree drains in one cadence."""
    paths = dict(read_to_precharge=rtp, write_cadence=t["ccd_short"], operand=t["cwl"] + t["burst"])
    paths |= dict(drain=t["mac_cadence"], result_cadence=t["ccd_long"])
    paths |= dict(result_latency=t["cl"] + t["burst"], mode_in=0.0, mode_out=0.0)
    paths |= dict(result_to_write=_read_to_write(t), precharge_to_refresh=t["rp"])
    return t | paths | dict(write_to_result=t["cwl"] + t["burst"] + t["wtr_short"])


def _samsung_paths(t: dict[str, Any], rtp: Any) -> dict[str, Any]:
    """Registers are written and results stored as rows of the banks: no path of their own."""
    # A read holds its bank for a burst, of which one column time is over when tRTP counts.
    to_precharge = t["burst"] + jnp.maximum(rtp, t["ccd_long"]) - t["ccd_long"]
    # PIMSimulator takes 331 cycles for opening reads, mode switches and the upload of the program,
    # whatever the matrix. How they divide between start and end only shifts the refreshes.
    # Its controller sends a refresh the clock after the last precharge, without tRP.
    own = dict(mode_in=181 * _NS, mode_out=150 * _NS, precharge_to_refresh=t["ck"])
    return _b200_paths(t, rtp) | dict(read_to_precharge=to_precharge) | own


def _attacc_paths(t: dict[str, Any], rtp: Any) -> dict[str, Any]:
    """Moves to and from the buffer die have a path of their own and order by one clock."""
    paths = dict(read_to_precharge=rtp, write_cadence=t["ccd_long"], operand=t["ck"])
    paths |= dict(drain=t["ck"], result_cadence=t["ccd_short"], result_latency=t["ck"])
    paths |= dict(result_to_write=t["ccd_short"], write_to_result=t["ccd_short"])
    # Measured: a refresh costs 438 clocks between rows, which is tRFC less tRP and one.
    return t | paths | dict(mode_in=0.0, mode_out=0.0, precharge_to_refresh=t["ck"])


def _read_to_write(t: dict[str, Any]) -> Any:
    return jnp.maximum(t["cl"] + t["burst"] + t["turnaround"] - t["cwl"], 0.0)


_PATHS = {"b200": _b200_paths, "samsung": _samsung_paths, "attacc": _attacc_paths}

ACT, RD, WR, PRE, MAC, GWRITE, RDRES, SYNC, NOP = range(9)
NUM_ISSUED = 7
# Relation of two banks: the same, one bank group, one set of row buffers, the other set.
SAME, GROUP, OTHER, ACROSS = range(4)


class Clocks(NamedTuple):
    """A `ChannelTiming` in whole clocks, as the scan wants it. int32.

    `gap[earlier, later, relation]` is the least distance of two commands, `complete[kind]` the time
    from a command to its end, `spread` from the first to the last bank of an all-bank activate,
    `limited` whether all-bank activates obey the window at all.
    """

    gap: Int[Array, "kinds kinds relations"]
    complete: Int[Array, " kinds"]
    spread: IntScalar
    limited: Array
    few_spread: IntScalar
    faw: IntScalar
    early_refresh: IntScalar  # how much sooner after a precharge a refresh may go than an activate
    rfc: IntScalar
    refi: IntScalar


# No constraint: far enough below zero that sums stay inside int32.
NEVER = -(2**30)


def in_clocks(timing: ChannelTiming, banks: Any, banks_per_faw: Any) -> Clocks:
    """`timing` in whole clocks, for an activate of `banks` banks, `banks_per_faw` in a window."""
    times = jnp.stack([getattr(timing, name) for name in NAMES])
    c = dict(zip(NAMES, jnp.ceil(times / timing.ck - _SLACK).astype(jnp.int32)))
    windows = (jnp.asarray(banks) + banks_per_faw - 1) // banks_per_faw
    return Clocks(
        gap=_gaps(c),
        complete=jnp.stack(_completions(c)).astype(jnp.int32),
        spread=(windows - 1).astype(jnp.int32) * c["faw"],
        limited=windows > 1,
        few_spread=3 * c["rrd_short"],
        faw=c["faw"],
        early_refresh=jnp.maximum(c["rp"] - c["precharge_to_refresh"], 0),
        rfc=c["rfc"],
        refi=jnp.floor(timing.refi / timing.ck + _SLACK).astype(jnp.int32),
    )


def whole_clocks(timing: ChannelTiming, name: str) -> IntScalar:
    """One time of `timing`, rounded up to whole clocks."""
    return jnp.ceil(getattr(timing, name) / timing.ck - _SLACK).astype(jnp.int32)


def _completions(c: dict[str, Array]) -> list[Array]:
    read, write, none = c["cl"] + c["burst"], c["cwl"] + c["burst"], jnp.zeros_like(c["ck"])
    return [none, read, write, none, c["mac_cadence"], write, c["result_latency"]]


def _gaps(c: dict[str, Array]) -> Int[Array, "kinds kinds relations"]:
    """Every rule of the channel: a static table of which gap, and the gaps."""
    to_write = jnp.maximum(c["cl"] + c["burst"] + c["turnaround"] - c["cwl"], 0)
    written = c["cwl"] + c["burst"]
    gaps = c | {
        "none": jnp.full_like(c["ck"], NEVER),
        "to_write": to_write,
        "to_read_long": written + c["wtr_long"],
        "to_read_short": written + c["wtr_short"],
        "write_to_precharge": written + c["wr"],
    }
    names = tuple(gaps)
    index = np.full((NUM_ISSUED, NUM_ISSUED, 4), names.index("none"))
    for (earlier, later), rule in _RULES.items():
        index[earlier, later] = [names.index(name) for name in rule]
    return jnp.stack([gaps[name] for name in names])[index]


def _bus(name: str) -> tuple[str, ...]:
    return (name,) * 4


def _bank(name: str) -> tuple[str, ...]:
    return (name, "none", "none", "none")


def _columns(long: str, short: str, across: str = "none") -> tuple[str, ...]:
    return (long, long, short, across)


# Least distance of two commands: in the same bank, in its group, in another group, and in the other
# set of row buffers, which shares the data bus and the activation current.
_RULES = {
    (ACT, ACT): ("rc", "rrd_long", "rrd_short", "rrd_short"),
    (ACT, RD): _bank("rcd"),
    (ACT, WR): _bank("rcd_write"),
    (ACT, MAC): _bank("rcd"),
    (ACT, PRE): _bank("ras"),
    (RD, RD): _columns("ccd_long", "ccd_short", "ccd_short"),
    (RD, WR): _bus("to_write"),
    (RD, MAC): _columns("ccd_long", "ccd_short"),
    (RD, PRE): _bank("read_to_precharge"),
    (RD, GWRITE): _bus("to_write"),
    (RD, RDRES): _bus("ccd_short"),
    (WR, RD): _columns("to_read_long", "to_read_short", "to_read_short"),
    (WR, WR): _columns("ccd_long", "ccd_short", "ccd_short"),
    (WR, MAC): _columns("to_read_long", "to_read_short"),
    (WR, PRE): _bank("write_to_precharge"),
    (WR, GWRITE): _bus("ccd_short"),
    (WR, RDRES): _bus("to_read_short"),
    (PRE, ACT): _bank("rp"),
    (MAC, RD): _columns("ccd_long", "ccd_short"),
    (MAC, WR): _columns("to_write", "to_write"),
    (MAC, MAC): _bus("mac_cadence"),
    (MAC, PRE): _bank("read_to_precharge"),
    (MAC, GWRITE): _bus("mac_cadence"),
    (MAC, RDRES): _bus("drain"),
    (GWRITE, RD): _bus("to_read_short"),
    (GWRITE, WR): _bus("ccd_short"),
    (GWRITE, MAC): _bus("operand"),
    (GWRITE, GWRITE): _bus("write_cadence"),
    (GWRITE, RDRES): _bus("write_to_result"),
    (RDRES, RD): _bus("ccd_short"),
    (RDRES, WR): _bus("to_write"),
    (RDRES, GWRITE): _bus("result_to_write"),
    (RDRES, RDRES): _bus("result_cadence"),
}
