"""HBM-PIM from geometry and DRAM timing: how long a GEMV of N tokens takes near the banks."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._checks import as_float
from moejax._status import is_traced
from moejax._typing import Array, Float, FloatLike, FloatScalar, Int, IntLike, IntScalar
from moejax.hardware._dram import DRAMTiming, refresh_factor
from moejax.hardware._fields import COUNT, NON_NEGATIVE, POSITIVE, SHARE, one_of, whole
from moejax.hardware._pim import AbstractPIM, check_gemv, zero_without_tokens


ORDERS = ("token_outer", "matrix_outer", "row_stationary")
LAYOUTS = ("fixed", "per_count")

# Reduction groups tried; those that do not divide the channels are masked.
_CANDIDATES = tuple(2**power for power in range(13))
# Two layouts whose times agree to this are a tie, whatever the rounding of float32.
_TIE = 1e-6
_ACCUMULATOR_BYTES = 2


class _Steps(NamedTuple):
    """Command times of one GEMV, in seconds, for every candidate number of reduction groups."""

    write: Float[Array, " candidates"]  # vector into the global buffers (GWRITE)
    activate: Float[Array, ""]  # first row of all banks
    mac: Float[Array, " candidates"]
    switch: Float[Array, " candidates"]  # every further row: precharge and activate
    result: Float[Array, " candidates"]  # accumulators over the bus (RDRES)
    drain: Float[Array, ""]  # latency of the last read
    rows: Float[Array, " candidates"]
    possible: Float[Array, " candidates"]  # 0.0, or infinity where channels do not divide


class BankPIM(AbstractPIM):
    """A multiply-add unit beside every bank; peaks follow from geometry and timing.

    A matrix is spread over all channels: outputs in `P_o` groups, the reduction in `P_k` groups
    (the GPU adds the `P_k` partial sums), `P_o * P_k` = channels. In each pseudo-channel a vector
    slice is written to the global buffer once, all banks open a row and multiply one column at a
    time, and results come back one 16-bit accumulator per bank. The GEMV stands in for the
    cycle-level simulation behind Sieve (arXiv 2605.11277); command structure and timing follow
    NeuPIMs, AttAcc and the public simulator of Duplex. Refresh enters by its mean factor.

    **Arguments:**

    - `stacks`, `pseudo_channels_per_stack`: their product is the number of channels of a GPU.
    - `banks`: banks computing in parallel in a pseudo-channel (units, where two banks share one).
    - `macs_per_unit`: 16-bit multiply-adds of a unit per column access, which therefore reads
        `2 * macs_per_unit` bytes. Weights of b bits get `macs_per_unit * 16 / b` lanes.
    - `row_bytes`: row of one bank.
    - `burst_bytes`: one access over the external bus of a pseudo-channel.
    - `banks_per_faw`: banks activated in one four-activate window: `banks` where a command
        activates all (AttAcc), 8 for two bank groups (NeuPIMs), 4 strictly.
    - `fill_columns`: columns the adder tree takes at least per output (6 in NeuPIMs).
    - `global_buffer_vectors`: vectors resident in the global buffer, for `row_stationary`.
    - `timing`: the `DRAMTiming`.
    - `order`: of N tokens. `token_outer`: one after another, each reopening all rows, as Sieve
        describes. `matrix_outer`: all tokens of a matrix, whose row stays open where it has one.
        `row_stationary`: all resident tokens use a row before the next opens; N tokens go in
        groups of `global_buffer_vectors`, the last one smaller, and closing the last row of a
        group is hidden.
    - `layout`: `fixed`, one `P_k` per matrix, the power of two that is fastest for one token, ties
        to the smaller; or `per_count`, chosen anew for every token count, an idealization, because
        weights do not move.
    - `reduction_groups`: `P_k` given instead; 1 is the output-sliced mapping Sieve describes.
    - `count_gwrite`: whether `token_bytes` counts what the channels are really sent.
    - `contention`, `attention_overhead`, `turn_time`: see `AbstractPIM`.
    """

    stacks: IntScalar = eqx.field(converter=whole, metadata=COUNT)
    pseudo_channels_per_stack: IntScalar = eqx.field(converter=whole, metadata=COUNT)
    banks: IntScalar = eqx.field(converter=whole, metadata=COUNT)
    macs_per_unit: IntScalar = eqx.field(converter=whole, metadata=COUNT)
    row_bytes: IntScalar = eqx.field(converter=whole, metadata=COUNT)
    timing: DRAMTiming
    burst_bytes: IntScalar = eqx.field(converter=whole, default=32, metadata=COUNT)
    banks_per_faw: IntScalar = eqx.field(converter=whole, default=8, metadata=COUNT)
    fill_columns: IntScalar = eqx.field(converter=whole, default=6, metadata=COUNT)
    global_buffer_vectors: IntScalar = eqx.field(converter=whole, default=1, metadata=COUNT)
    contention: FloatScalar = eqx.field(converter=as_float, default=0.0, metadata=SHARE)
    attention_overhead: FloatScalar = eqx.field(converter=as_float, default=1.5, metadata=POSITIVE)
    turn_time: FloatScalar = eqx.field(converter=as_float, default=0.0, metadata=NON_NEGATIVE)
    order: str = eqx.field(static=True, default="token_outer", metadata=one_of(*ORDERS))
    layout: str = eqx.field(static=True, default="fixed", metadata=one_of(*LAYOUTS))
    reduction_groups: int | None = eqx.field(static=True, default=None)
    count_gwrite: bool = eqx.field(static=True, default=False, metadata=one_of(True, False))

    def __check_init__(self) -> None:
        groups = self.reduction_groups
        if groups is not None and (type(groups) is not int or groups < 1):
            raise ValueError(f"BankPIM.reduction_groups = {groups!r}: allowed is None or an int")
        if is_traced(self.channels, self.row_bytes, self.macs_per_unit):
            return
        if groups is not None and jnp.any(self.channels % groups != 0):
            raise ValueError(
                f"BankPIM.reduction_groups = {groups}: allowed is a divisor of the "
                f"{self.channels} channels"
            )
        if jnp.any(2 * self.macs_per_unit > self.row_bytes):
            raise ValueError(
                f"BankPIM.macs_per_unit = {self.macs_per_unit}: allowed is a column of "
                f"2 * macs_per_unit bytes inside a row of {self.row_bytes}"
            )

    @property
    def channels(self) -> IntScalar:
        """Pseudo-channels of one GPU."""
        return self.stacks * self.pseudo_channels_per_stack

    @property
    def internal_bandwidth(self) -> FloatScalar:
        """B/s that all units together read from their banks."""
        column_bytes = 2.0 * self.macs_per_unit
        return column_bytes * self.banks * self.channels / self.timing.mac_cadence

    @property
    def flops_per_s(self) -> FloatScalar:
        """Peak FLOP/s at 16-bit weights: a 2-byte weight does 2 FLOP, so 1 FLOP per byte."""
        return self.internal_bandwidth

    def gemv_time(
        self,
        outputs: int,
        inputs: int,
        tokens: IntLike,
        *,
        weight_bits: FloatLike,
        activation_bits: FloatLike,
    ) -> FloatScalar:
        check_gemv(outputs, inputs, tokens)
        steps = self._steps(outputs, inputs, weight_bits, activation_bits)
        times = self._time(steps, tokens)
        index = _fastest(times if self.layout == "per_count" else self._time(steps, 1))
        time = times[index] * refresh_factor(self.timing)
        time = jnp.where(self._is_possible() & jnp.isfinite(time), time, jnp.nan)
        return zero_without_tokens(tokens, time)

    def fraction(self, num_groups: IntLike) -> "BankPIM":
        divides = self.channels % num_groups == 0
        if not is_traced(divides) and not jnp.all(divides):
            raise ValueError(
                f"BankPIM.fraction: num_groups = {num_groups}: allowed is a divisor of the "
                f"{self.channels} channels"
            )
        # Under tracing a share that does not exist has no channels, and NaN for a time.
        share = jnp.where(divides, self.channels // num_groups, 0)
        return self.replace(stacks=1, pseudo_channels_per_stack=share)

    def token_bytes(
        self,
        hidden: int,
        intermediate: int,
        *,
        weight_bits: FloatLike,
        activation_bits: FloatLike,
    ) -> FloatScalar:
        """Bytes over the external HBM bus per token of one expert that runs on PIM.

        `2 * hidden` activations, or with `count_gwrite` what the commands move: every channel is
        written its slice of the vector, so the vector travels once per output group
        (`channels * ceil(inputs / P_k)` activations), and each output comes back as `P_k` partial
        sums of 16 bits; both for both matrices. `P_k` is the choice for one token.
        """
        vector_bytes = as_float(activation_bits) / 8
        if not self.count_gwrite:
            return 2 * hidden * vector_bytes
        total = as_float(0.0)
        for outputs, inputs in ((2 * intermediate, hidden), (hidden, intermediate)):
            groups = self.reduction_groups_of(
                outputs, inputs, weight_bits=weight_bits, activation_bits=activation_bits
            )
            total += self.channels * ceil_div(inputs, groups) * vector_bytes
            total += outputs * groups * _ACCUMULATOR_BYTES
        return total

    def reduction_groups_of(
        self, outputs: int, inputs: int, *, weight_bits: FloatLike, activation_bits: FloatLike
    ) -> IntScalar:
        """The `P_k` of a matrix: the fastest for one token, or the one given."""
        steps = self._steps(outputs, inputs, weight_bits, activation_bits)
        return self._candidates()[_fastest(self._time(steps, 1))]

    def _candidates(self) -> Int[Array, " candidates"]:
        groups = self.reduction_groups
        return jnp.asarray(_CANDIDATES if groups is None else (groups,), jnp.int32)

    def _is_possible(self) -> Array:
        counts = (self.channels, self.banks, self.macs_per_unit, self.row_bytes, self.burst_bytes)
        counts += (self.banks_per_faw, self.fill_columns, self.global_buffer_vectors)
        return jnp.all(jnp.stack(counts) > 0) & (self.row_bytes >= 2 * self.macs_per_unit)

    def _steps(
        self, outputs: int, inputs: int, weight_bits: FloatLike, activation_bits: FloatLike
    ) -> _Steps:
        t = self.timing
        groups = self._candidates()
        divides = (self.channels % groups == 0) & (self.channels >= groups)
        output_groups = jnp.where(divides, self.channels // groups, 1)
        per_bank = ceil_div(ceil_div(outputs, output_groups), self.banks)
        slice_inputs = ceil_div(inputs, groups)
        columns = ceil_div(slice_inputs * as_float(weight_bits), 16 * self.macs_per_unit)
        row_columns = self.row_bytes // (2 * self.macs_per_unit)
        rows = ceil_div(per_bank * columns, row_columns)

        bursts = ceil_div(slice_inputs * as_float(activation_bits), 8 * self.burst_bytes)
        reads = per_bank * ceil_div(_ACCUMULATOR_BYTES * self.banks, self.burst_bytes)
        activate = (ceil_div(self.banks, self.banks_per_faw) - 1) * t.faw + t.rcd
        # A row closes no sooner than tRAS after it opened, and its columns take most of that.
        precharge = jnp.maximum(t.rtp, t.ras - activate - row_columns * t.mac_cadence) + t.rp
        return _Steps(
            write=bursts * t.ccd_short + t.cwl + t.burst,
            activate=activate,
            mac=per_bank * jnp.maximum(columns, self.fill_columns) * t.mac_cadence,
            switch=(rows - 1) * (precharge + activate),
            result=reads * t.ccd_long,
            drain=t.cl + t.burst,
            rows=rows,
            possible=jnp.where(divides, 0.0, jnp.inf),
        )

    def _time(self, steps: _Steps, tokens: IntLike) -> Float[Array, " candidates"]:
        """Seconds without refresh for every candidate."""
        s = steps
        if self.order == "row_stationary":
            full = tokens // self.global_buffer_vectors
            rest = tokens - full * self.global_buffer_vectors
            last = jnp.where(rest > 0, _resident(s, rest), 0.0)
            return full * _resident(s, self.global_buffer_vectors) + last + s.possible
        one = _resident(s, 1)
        # The last row of a token closes tRTP after its last read, before the next token's first.
        time = tokens * one + (tokens - 1) * self.timing.rtp
        if self.order == "matrix_outer":
            open_row = one + (tokens - 1) * (s.write + s.mac + s.result + s.drain)
            time = jnp.where(s.rows == 1, open_row, time)
        return time + s.possible


def _resident(s: _Steps, tokens: IntLike) -> Float[Array, " candidates"]:
    """`tokens` vectors that fit the global buffer; with one, the plain GEMV."""
    start = jnp.maximum(tokens * s.write, s.activate)
    return start + tokens * s.mac + s.switch + tokens * s.result + s.drain


def _fastest(times: Float[Array, " candidates"]) -> IntScalar:
    return jnp.argmax(times <= jnp.min(times) * (1 + _TIE))


def ceil_div(numerator: FloatLike | Array, denominator: FloatLike | Array) -> Float[Array, "..."]:
    """`ceil(numerator / denominator)`, right even where the division rounds the wrong way.

    Holds while the products are exact in the floating type (2^24 in float32). No gradient.
    """
    x, y = jax.lax.stop_gradient((as_float(numerator), as_float(denominator)))
    quotient = jnp.ceil(x / y)
    quotient = quotient - ((quotient - 1) * y >= x)
    return quotient + (quotient * y < x)
