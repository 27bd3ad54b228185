"""DRAM timing parameters and refresh."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float
from moejax._status import is_traced
from moejax._typing import FloatLike, FloatScalar
from moejax.hardware._fields import NON_NEGATIVE, POSITIVE, AbstractHardware


class DRAMTiming(AbstractHardware):
    """Minimum times between DRAM commands, in seconds. Names are JEDEC's without the `t`.

    **Arguments:**

    - `rcd`: activate to first column access.
    - `rp`: precharge to activate.
    - `ras`: activate to precharge.
    - `rtp`: last read to precharge.
    - `ccd_short`, `ccd_long`: column to column in different and in the same bank group.
    - `faw`: window in which only a few banks may be activated.
    - `cl`, `cwl`: read and write latency.
    - `burst`: one access on the data bus.
    - `rfc`, `refi`: length of a refresh and time between refreshes; `rfc < refi`.
    - `mac_cadence`: column to column of all banks multiplying at once.
    """

    rcd: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    rp: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    ras: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    rtp: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    ccd_short: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    ccd_long: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    faw: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    cl: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    cwl: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    burst: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    rfc: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    refi: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    mac_cadence: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)

    def __check_init__(self) -> None:
        if is_traced(self.rfc, self.refi):
            return
        if np.any(np.asarray(self.rfc) >= np.asarray(self.refi)):
            raise ValueError(
                f"DRAMTiming.rfc = {self.rfc}: allowed is less than refi = {self.refi}"
            )


def refresh_factor(timing: DRAMTiming) -> FloatScalar:
    """Mean slow-down by refresh, `1 / (1 - tRFC / tREFI)`; NaN where refresh takes all the time."""
    share = timing.rfc / timing.refi
    return jnp.where(share < 1, 1 / (1 - share), jnp.nan)


def refresh_stall(time: FloatLike, phase: FloatLike, timing: DRAMTiming) -> FloatScalar:
    """Seconds that refreshes add to work of `time` seconds which starts at a given phase.

    **Arguments:**

    - `time`: seconds of work without refresh, such as `gemv_time / refresh_factor`.
    - `phase`: working time since the last refresh, in [0, tREFI - tRFC). Drawn uniformly from that
        range, the mean of `time + stall` is exactly `time * refresh_factor(timing)`.
    """
    between = timing.refi - timing.rfc
    return timing.rfc * jnp.floor((as_float(phase) + as_float(time)) / between)
