"""PIM whose GEMV times come from a measured or simulated table."""

import csv
import math
from collections.abc import Iterator
from os import PathLike

import equinox as eqx
import jax.numpy as jnp

from moejax._checks import as_float, nearest
from moejax._status import is_traced
from moejax._typing import Array, Float, FloatLike, FloatScalar, IntLike
from moejax.hardware._bank_pim import ORDERS
from moejax.hardware._fields import NON_NEGATIVE, POSITIVE, SHARE, one_of
from moejax.hardware._pim import AbstractPIM, check_gemv, zero_without_tokens


class GEMVCurve(eqx.Module):
    """Times and energies of one matrix shape over token counts.

    `tokens` (static, ascending) are the counts of the table, `times` seconds, `energies` joules
    (NaN where the table has none).
    """

    outputs: int = eqx.field(static=True)
    inputs: int = eqx.field(static=True)
    order: str = eqx.field(static=True)
    tokens: tuple[int, ...] = eqx.field(static=True)
    times: Float[Array, " points"] = eqx.field(converter=as_float)
    energies: Float[Array, " points"] = eqx.field(converter=as_float)

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.outputs} x {self.inputs} {self.order}"


class TablePIM(AbstractPIM):
    """GEMV times from a table, everything else (attention, peaks, traffic) from another PIM.

    Its range is that of the table: a shape that is not there is a `ValueError`, counts between
    two rows are interpolated linearly, and counts outside the rows of a shape give NaN. The
    table holds the whole device at one precision, so other bit widths give NaN too (`ValueError`
    where they are concrete).

    **Arguments:**

    - `base`: the PIM that answers what the table does not.
    - `curves`: tuple of `GEMVCurve`.
    - `contention`, `attention_overhead`, `turn_time`: see `AbstractPIM`; `load_pim_table` takes
        those of the base.
    - `order`: which of the table's orders to use.
    - `extrapolate`: continue beyond the last row on the line through the last two.
    - `weight_bits`, `activation_bits`: the precision of the table.
    - `num_groups`: the share 1/`num_groups` of the channels. A table says nothing about shares:
        the time of the whole is scaled by the ratio the base gives.
    """

    base: AbstractPIM
    curves: tuple[GEMVCurve, ...]
    contention: FloatScalar = eqx.field(converter=as_float, metadata=SHARE)
    attention_overhead: FloatScalar = eqx.field(converter=as_float, metadata=POSITIVE)
    turn_time: FloatScalar = eqx.field(converter=as_float, metadata=NON_NEGATIVE)
    order: str = eqx.field(static=True, default="token_outer", metadata=one_of(*ORDERS))
    extrapolate: bool = eqx.field(static=True, default=False, metadata=one_of(True, False))
    weight_bits: FloatScalar = eqx.field(converter=as_float, default=16.0, metadata=POSITIVE)
    activation_bits: FloatScalar = eqx.field(converter=as_float, default=16.0, metadata=POSITIVE)
    num_groups: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        for curve in self.curves if self.extrapolate else ():
            if len(curve.tokens) < 2:
                raise ValueError(f"TablePIM.extrapolate: {curve.label} has a single row")

    @property
    def internal_bandwidth(self) -> FloatScalar:
        """B/s inside all stacks, of the base."""
        return self.base.fraction(self.num_groups).internal_bandwidth

    @property
    def flops_per_s(self) -> FloatScalar:
        """Peak FLOP/s at 16-bit weights, of the base."""
        return self.base.fraction(self.num_groups).flops_per_s

    def curve(self, outputs: int, inputs: int) -> GEMVCurve:
        """The rows of one shape. **Raises** `ValueError` naming the shape and what is there."""
        for curve in self.curves:
            if (curve.outputs, curve.inputs, curve.order) == (outputs, inputs, self.order):
                return curve
        known = ", ".join(curve.label for curve in self.curves)
        raise ValueError(f"no PIM times for {outputs} x {inputs} {self.order} (known: {known})")

    def max_tokens(self, outputs: int, inputs: int) -> int:
        """Largest token count the table covers for a shape."""
        return self.curve(outputs, inputs).tokens[-1]

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
        known = self._is_precision(weight_bits, activation_bits)
        curve = self.curve(outputs, inputs)
        time = jnp.where(known, self._interpolate(curve, curve.times, tokens), jnp.nan)
        if self.num_groups > 1:
            bits = dict(weight_bits=self.weight_bits, activation_bits=self.activation_bits)
            whole = self.base.gemv_time(outputs, inputs, 1, **bits)
            share = self.base.fraction(self.num_groups).gemv_time(outputs, inputs, 1, **bits)
            time = time * share / whole
        return zero_without_tokens(tokens, time)

    def gemv_energy(self, outputs: int, inputs: int, tokens: IntLike) -> FloatScalar:
        """Joules of a GEMV, interpolated like its time; NaN where the table has no `pj`."""
        check_gemv(outputs, inputs, tokens)
        curve = self.curve(outputs, inputs)
        return zero_without_tokens(tokens, self._interpolate(curve, curve.energies, tokens))

    def fraction(self, num_groups: int) -> "TablePIM":  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = self.num_groups * num_groups
        self.base.fraction(groups)  # raises where the channels do not divide
        return self.replace(num_groups=groups)

    def token_bytes(
        self,
        hidden: int,
        intermediate: int,
        *,
        weight_bits: FloatLike,
        activation_bits: FloatLike,
    ) -> FloatScalar:
        bits = dict(weight_bits=weight_bits, activation_bits=activation_bits)
        return self.base.fraction(self.num_groups).token_bytes(hidden, intermediate, **bits)

    def _interpolate(self, curve: GEMVCurve, values: Array, tokens: IntLike) -> FloatScalar:
        counts = as_float(curve.tokens)
        tokens = as_float(tokens)
        inside = jnp.interp(tokens, counts, values, left=jnp.nan, right=jnp.nan)
        if not self.extrapolate:
            return inside
        slope = (values[-1] - values[-2]) / (counts[-1] - counts[-2])
        return jnp.where(tokens > counts[-1], values[-1] + slope * (tokens - counts[-1]), inside)

    def _is_precision(self, weight_bits: FloatLike, activation_bits: FloatLike) -> Array:
        same = jnp.asarray(weight_bits == self.weight_bits)
        same &= activation_bits == self.activation_bits
        if not is_traced(same) and not jnp.all(same):
            raise ValueError(
                f"TablePIM holds times at {self.weight_bits:g}-bit weights and "
                f"{self.activation_bits:g}-bit activations, not {weight_bits} and {activation_bits}"
            )
        return same


def load_pim_table(
    path: str | PathLike[str],
    base: AbstractPIM,
    *,
    order: str = "token_outer",
    extrapolate: bool = False,
    weight_bits: float = 16.0,
    activation_bits: float = 16.0,
) -> TablePIM:
    """Reads a CSV with columns `outputs,inputs,tokens,order,ns` and optionally `pj`.

    One row is the time (ns) and energy (pJ) of one GEMV of `tokens` vectors. Other columns are
    ignored. Arguments are those of `TablePIM`.

    **Raises:** `ValueError` naming file, line and column for a missing column, something that is
    no number, a duplicate row, fewer than one token, or an empty table.
    """
    points: dict[tuple[int, int, str], dict[int, tuple[float, float]]] = {}
    for line, row in _read_rows(path):
        where = f"{path}, line {line}"
        outputs, inputs, tokens = (
            _number(row, column, where, whole=True) for column in ("outputs", "inputs", "tokens")
        )
        if row["order"] not in ORDERS:
            hint = nearest(str(row["order"]), ORDERS)
            raise ValueError(f"{where}, column order: {row['order']!r} is no order{hint}")
        ns = _number(row, "ns", where)
        pj = _number(row, "pj", where) if "pj" in row else math.nan
        curve = points.setdefault((int(outputs), int(inputs), row["order"]), {})
        if tokens in curve:
            raise ValueError(f"{where}, column tokens: second row for this shape and count")
        curve[int(tokens)] = (ns * 1e-9, pj * 1e-12)
    if not points:
        raise ValueError(f"{path}, line 1: the table has no rows")
    if order not in {key[2] for key in points}:
        known = ", ".join(sorted({key[2] for key in points}))
        raise ValueError(f"{path}, column order: no rows for {order!r} (known: {known})")
    curves = tuple(_curve(key, curve) for key, curve in points.items())
    return TablePIM(
        base=base,
        curves=curves,
        contention=base.contention,
        attention_overhead=base.attention_overhead,
        turn_time=base.turn_time,
        order=order,
        extrapolate=extrapolate,
        weight_bits=weight_bits,  # pyright: ignore[reportArgumentType]
        activation_bits=activation_bits,  # pyright: ignore[reportArgumentType]
    )


def _read_rows(path: str | PathLike[str]) -> Iterator[tuple[int, dict[str, str]]]:
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        for column in ("outputs", "inputs", "tokens", "order", "ns"):
            if column not in (reader.fieldnames or ()):
                raise ValueError(f"{path}, line 1: missing column {column!r}")
        for row in reader:
            yield reader.line_num, row


def _number(row: dict[str, str], column: str, where: str, *, whole: bool = False) -> float:
    text = row[column]
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise ValueError(f"{where}, column {column}: {text!r} is not a number") from None
    if not math.isfinite(value) or value < 0 or (whole and (value < 1 or value != int(value))):
        allowed = "a whole number of at least 1" if whole else "finite and not negative"
        raise ValueError(f"{where}, column {column}: {text} (allowed: {allowed})")
    return value


def _curve(key: tuple[int, int, str], points: dict[int, tuple[float, float]]) -> GEMVCurve:
    tokens = tuple(sorted(points))
    times, energies = zip(*(points[count] for count in tokens))
    outputs, inputs, order = key
    return GEMVCurve(outputs, inputs, order, tokens, times, energies)
