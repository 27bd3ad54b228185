"""How long a GEMV takes when every command is issued: the truth that cost tables are held to."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import as_float, check_non_negative, lookup
from moejax._status import is_traced
from moejax._typing import Array, Float, FloatLike, FloatScalar, IntLike
from moejax.cost.dram._engine import issue
from moejax.cost.dram._streams import (
    RUN,
    Room,
    Work,
    attacc_work,
    b200_work,
    buffered_stream,
    ceil_div,
    macs_of_a_row,
    samsung_marks,
    samsung_stream,
    samsung_tiles,
)
from moejax.cost.dram._timing import KERNELS, ChannelTiming, in_clocks, whole_clocks
from moejax.hardware import BankPIM


ORDERS = ("token_outer", "matrix_outer", "row_stationary")
# Beyond this many clocks a sum could leave int32.
_LATEST = 2**29
# A phase of tREFI may be above it by rounding.
_ROUNDED = 1 + 1e-6


class _Options(NamedTuple):
    """Static."""

    kernel: str
    order: str
    refresh: bool


def gemv_time(
    outputs: IntLike,
    inputs: IntLike,
    tokens: IntLike,
    pim: BankPIM,
    kernel: str = "b200",
    order: str = "token_outer",
    *,
    timing: ChannelTiming | None = None,
    refresh: bool = True,
    phase: FloatLike = 0.0,
    weight_bits: FloatLike = 16.0,
    activation_bits: FloatLike = 16.0,
    reduction_groups: IntLike | None = None,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> FloatScalar:
    """Seconds for `tokens` vectors through an `[outputs, inputs]` matrix, command by command.

    All channels get the same commands, so one pseudo-channel is simulated.

    **Arguments:**

    - `outputs`, `inputs`, `tokens`: whole numbers, traced or not.
    - `pim`: geometry and timing, traced or not.
    - `kernel`: `b200`, `samsung` (PIMSimulator's GEMV) or `attacc` (bank level).
    - `order`: of several tokens, for `b200`; see `moejax.hardware.BankPIM`. The other two read the
        weights again for each vector, which is `token_outer`.
    - `timing`: what `pim.timing` lacks; `ChannelTiming.of(pim, kernel)` unless given.
    - `refresh`: static; whether there is any.
    - `phase`: s since the last refresh when the GEMV starts, 0 to tREFI of `timing`.
    - `weight_bits`, `activation_bits`: for `b200`; `attacc` takes the first, `samsung` is 16 bits.
    - `reduction_groups`: slices of the inputs, for `b200`; `pim.reduction_groups_of` unless given.
    - `max_tokens`, `max_rows`: static room for traced sizes: the most tokens, and rows of a bank
        (`samsung`: tiles of 128 inputs, and `max_tokens` counts output tiles times tokens). With
        them, a row has room for 256 multiplications of a vector, and the buffer for 16 vectors.

    **Returns:** a scalar in s. 0 for no tokens. NaN under tracing for sizes below 1, negative
    tokens, a phase out of range, or more than there is room for. The scan takes one step for each
    run of equal commands, 5 a row and token (`samsung`: 9 a tile).

    **Raises:** `ValueError` naming the argument for an unknown kernel or order, sizes below 1,
    negative tokens, a phase out of range, traced sizes without room, or a kernel longer than 2^29
    clocks.
    """
    options = _options(kernel, order, refresh)
    if not isinstance(pim, BankPIM):
        raise ValueError(f"gemv_time: pim is a {type(pim).__name__}: allowed is a BankPIM")
    _check_sizes(outputs, inputs, tokens, phase)
    given = _Given(outputs, inputs, pim, weight_bits, activation_bits, reduction_groups)
    most = max_tokens if max_tokens is not None else _concrete_tokens(tokens)
    room = _room(given, options, most, max_rows)
    timing = ChannelTiming.of(pim, kernel) if timing is None else timing
    _check_phase(phase, timing)
    time = _time(given, jnp.asarray(tokens), timing, as_float(phase), options, room)
    return _checked(time, tokens)


def gemv_times(
    outputs: int,
    inputs: int,
    max_tokens: int,
    pim: BankPIM,
    kernel: str = "b200",
    order: str = "token_outer",
    **options: Any,
) -> Float[Array, " counts"]:
    """`gemv_time` for all counts of tokens at once.

    One scan gives them all, because the commands of fewer tokens come first among those of more;
    `row_stationary`, whose last group differs, takes a batch of scans. Options as `gemv_time`.

    **Returns:** [max_tokens + 1] in s, of 0 .. `max_tokens` tokens.

    **Raises:** `ValueError` for fewer than one token at most; and as `gemv_time`.
    """
    if max_tokens < 1:
        raise ValueError(f"gemv_times: max_tokens = {max_tokens}: allowed is 1 or more")
    one = lambda n: gemv_time(
        outputs, inputs, n, pim, kernel, order, max_tokens=max_tokens, **options
    )
    return jax.vmap(one)(jnp.arange(max_tokens + 1))


def expert_times(
    hidden: int,
    intermediate: int,
    max_tokens: int,
    pim: BankPIM,
    phases: Float[Array, " phases"],
    kernel: str = "b200",
    order: str = "token_outer",
    **options: Any,
) -> Float[Array, "phases counts"]:
    """Time of a gated expert for 0 .. `max_tokens` tokens, at each of some refresh phases.

    Gate and up share the vector, so they are one `[2 * intermediate, hidden]` GEMV; the down
    projection follows. The GPU applies the activation in between, so it starts at a phase of its
    own: the next one of `phases`. Row i is a sample of what one execution takes; the mean over rows
    is its expectation.

    **Arguments:** `phases`, [phases] in s, evenly spread over 0 .. tREFI; others as `gemv_times`.

    **Returns:** [phases, max_tokens + 1] in s.

    **Raises:** `ValueError` for phases of another shape; and as `gemv_times`.
    """
    phases = as_float(phases)
    if phases.ndim != 1:
        raise ValueError(f"expert_times: phases has shape {phases.shape}: allowed is [phases]")
    shapes = ((2 * intermediate, hidden), (hidden, intermediate))
    starts = (phases, jnp.roll(phases, -1))
    time = jnp.zeros(())
    for (rows, columns), start in zip(shapes, starts):
        one = functools.partial(gemv_times, rows, columns, max_tokens, pim, kernel, order)
        time = time + jax.vmap(lambda phase, one=one: one(phase=phase, **options))(start)
    return time


class _Given(NamedTuple):
    outputs: Any
    inputs: Any
    pim: BankPIM
    weight_bits: Any
    activation_bits: Any
    reduction_groups: Any


def _options(kernel: str, order: str, refresh: bool) -> _Options:
    lookup("kernel", kernel, dict.fromkeys(KERNELS))
    lookup("order", order, dict.fromkeys(ORDERS))
    if kernel != "b200" and order != "token_outer":
        raise ValueError(f"order = {order!r}: allowed with kernel {kernel!r} is 'token_outer'")
    return _Options(kernel, order, bool(refresh))


def _check_sizes(outputs: IntLike, inputs: IntLike, tokens: IntLike, phase: FloatLike) -> None:
    for name, size in (("outputs", outputs), ("inputs", inputs)):
        if not is_traced(size) and size < 1:
            raise ValueError(f"gemv_time: {name} = {size}: allowed is 1 or more")
    check_non_negative("gemv_time", "tokens", tokens)
    check_non_negative("gemv_time", "phase", phase)


def _check_phase(phase: FloatLike, timing: ChannelTiming) -> None:
    # NumPy, because inside jit even jnp operations on concrete arrays are traced.
    if not is_traced(phase, timing.refi) and np.any(
        np.asarray(phase) > _ROUNDED * np.asarray(timing.refi)
    ):
        raise ValueError(f"gemv_time: phase = {phase}: allowed is 0 to tREFI = {timing.refi:g} s")


def _concrete_tokens(tokens: IntLike) -> int:
    if is_traced(tokens):
        raise ValueError("gemv_time: tokens are traced: max_tokens must say how many at most")
    return max(int(tokens), 1)


def _work(given: _Given, kernel: str) -> Work:
    if kernel == "attacc":
        return attacc_work(given.outputs, given.inputs, given.pim, given.weight_bits)
    bits = dict(weight_bits=given.weight_bits, activation_bits=given.activation_bits)
    groups = given.reduction_groups
    if groups is None:
        groups = given.pim.reduction_groups_of(given.outputs, given.inputs, **bits)
    return b200_work(given.outputs, given.inputs, given.pim, groups, **bits)


def _room(given: _Given, options: _Options, max_tokens: int, max_rows: int | None) -> Room:
    """Static sizes; from the concrete numbers, or from what the caller allows."""
    if is_traced(*given):
        if max_rows is None:
            raise ValueError("gemv_time: sizes or pim are traced: max_rows must say how many rows")
        if options.kernel == "samsung":
            return Room(max_tokens + 1, max_rows, 1)
        # NaN beyond.
        resident = 16 if options.order == "row_stationary" else 1
        return Room(max_tokens, max_rows, resident)
    with jax.ensure_compile_time_eval():
        if options.kernel == "samsung":
            output_tiles, tiles = samsung_tiles(given.outputs, given.inputs, given.pim)
            return Room(int(output_tiles) * max_tokens + 1, int(tiles), 1)
        work = _work(given, options.kernel)
        resident = 1
        if options.order == "row_stationary":
            resident = min(int(given.pim.global_buffer_vectors), max_tokens)
        rows = int(ceil_div(work.columns, work.columns_per_row))
        runs = ceil_div_host(int(macs_of_a_row(work)) * resident, RUN)
        return Room(ceil_div_host(max_tokens, resident), rows, runs)


def ceil_div_host(numerator: int, denominator: int) -> int:
    """Of Python's whole numbers."""
    return -(-numerator // denominator)


@functools.partial(jax.jit, static_argnames=("options", "room"))
def _time(given: _Given, tokens, timing: ChannelTiming, phase, options: _Options, room: Room):
    due = jnp.round((timing.refi - phase) / timing.ck).astype(jnp.int32)
    due = jnp.maximum(due, 0) if options.refresh else None
    kernel = _samsung_end if options.kernel == "samsung" else _buffered_end
    end, fits = kernel(given, tokens, timing, due, options, room)
    fits &= (phase >= 0) & (phase <= _ROUNDED * timing.refi)
    fits &= (end < _LATEST) & (jnp.asarray(given.outputs) > 0) & (jnp.asarray(given.inputs) > 0)
    time = jnp.where(fits, end * timing.ck, jnp.nan)
    return jnp.where(tokens > 0, time, jnp.where(tokens == 0, 0.0, jnp.nan))


def _samsung_end(given: _Given, tokens, timing: ChannelTiming, due, options: _Options, room: Room):
    del options
    output_tiles, tiles = samsung_tiles(given.outputs, given.inputs, given.pim)
    passes = output_tiles * tokens
    mode_in, mode_out = (whole_clocks(timing, name) for name in ("mode_in", "mode_out"))
    clocks = in_clocks(timing, given.pim.banks, given.pim.banks_per_faw)
    # As many passes as there is room for: what came before does not depend on what comes after.
    stream = samsung_stream(room.groups - 1, tiles, room, mode_in)
    out = issue(stream, clocks, num_banks=2, num_groups=1, first_refresh=due)
    end = out.first[samsung_marks(room)[jnp.clip(passes, 0, room.groups - 1)]] + mode_out
    return end, (passes < room.groups) & (tiles <= room.rows)


def _buffered_end(given: _Given, tokens, timing: ChannelTiming, due, options: _Options, room: Room):
    work = _work(given, options.kernel)
    clocks = in_clocks(timing, given.pim.banks, given.pim.banks_per_faw)
    resident = options.order == "row_stationary"
    size = given.pim.global_buffer_vectors if resident else 1
    stream = buffered_stream(
        work,
        tokens if resident else room.groups,
        room,
        tokens_per_group=size,
        keeps_row=options.order == "matrix_outer",
        waits=options.kernel == "b200",
    )
    # AttAcc's controller lets a row finish before it closes it.
    breaks = options.kernel == "b200"
    out = issue(stream, clocks, num_banks=1, num_groups=1, first_refresh=due, breaks_runs=breaks)
    ends = out.done_after.reshape(room.groups, -1)[:, -1]
    end = ends[jnp.clip(ceil_div(tokens, size) - 1, 0, room.groups - 1)]
    rows = ceil_div(work.columns, work.columns_per_row)
    at_once = jnp.clip(tokens, 1, size)
    fits = (rows <= room.rows) & (macs_of_a_row(work) * at_once <= room.runs * RUN)
    return end, fits & (tokens <= room.groups * size)


def _checked(time: FloatScalar, tokens: IntLike) -> FloatScalar:
    if not is_traced(time, tokens) and not bool(jnp.all(jnp.isfinite(time))):
        raise ValueError(
            f"gemv_time: {tokens} tokens: allowed are fewer than 2^29 clocks, within max_tokens "
            "and max_rows"
        )
    return time
