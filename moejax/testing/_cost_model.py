"""Cost models of PIM: how long a matrix-vector product takes inside a memory stack."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._checks import nearest
from moejax._typing import Array
from moejax.hardware import AbstractPIM, numeric_fields
from moejax.testing._contract import (
    Contract,
    Kept,
    named,
    require,
    require_error,
    require_finite,
    require_same,
    row,
    stack,
)


ROUNDING = 1e-5
# By its own bandwidth a stream of all weights is the least time; a table may have been measured on
# a part that is a little faster, and nothing real is a thousand times slower.
FASTEST, SLOWEST = 0.5, 1000.0


def check_cost_model(
    pim: AbstractPIM,
    *,
    hidden: int = 1024,
    intermediate: int = 512,
    max_tokens: int = 8,
    weight_bits: float = 16.0,
    activation_bits: float = 16.0,
    seconds: Mapping[str, int] | None = None,
) -> Kept:
    """Tries a PIM of your own, a subclass of `moejax.hardware.AbstractPIM`.

    The promises, in this order:

    - `shape`: times, rates and traffic are float scalars, rates above 0, `contention` in [0, 1].
    - `tokens`: 0 tokens take 0 s, more tokens never take less time, and a token moves at least
        its vector in and its result out (`2 * hidden` activations).
    - `jit`: the same times where tokens and every number of the PIM are traced.
    - `vmap`: the same times for a batch of token counts, and of PIMs.
    - `grad`: finite derivatives in every floating number of the PIM.
    - `units`: seconds and B/s that belong together (the time of streaming the weights), and other
        units of time that change every time by the unit only.
    - `fraction`: half of the channels are a PIM that is no faster.
    - `determinism`: the same question twice gives the same bits.
    - `status`: negative tokens are a `ValueError` eagerly and NaN where traced.

    **Arguments:**

    - `pim`: the object.
    - `hidden`, `intermediate`, `weight_bits`, `activation_bits`: of the expert to try it on; a
        table has to cover its two matrices.
    - `max_tokens`: the largest count to try.
    - `seconds`: power of the second in the unit of a field, by its dotted path: 1 for a time, -1
        for a rate, 0 for neither. What is not given is told by the name: -1 for `*bandwidth` and
        `*_per_s`, 1 for `*time`, `*times`, `*latency` and all fields of `timing`, else 0.

    **Returns:** `Kept`, which prints as a sentence.

    **Raises:** `ContractError` naming every promise that is broken; `ValueError` for a path in
    `seconds` that is no field.
    """
    contract = Contract(f"cost model {type(pim).__name__}")
    powers = _powers(pim, seconds or {}) if isinstance(pim, AbstractPIM) else {}
    bits = dict(weight_bits=weight_bits, activation_bits=activation_bits)
    ask = _Expert(hidden, intermediate, weight_bits, activation_bits)
    counts = range(max_tokens + 1)
    with contract.promise("shape", first=True):
        require(isinstance(pim, AbstractPIM), "is no moejax.hardware.AbstractPIM")
        alone = [ask(pim, tokens) for tokens in counts]
        _check_shape(pim, alone)
    with contract.promise("tokens"):
        _check_tokens(alone)
        moved, least = pim.token_bytes(hidden, intermediate, **bits), hidden * activation_bits / 4
        require(moved >= least * (1 - ROUNDING), f"token_bytes is {moved}, less than {least:g}")
    with contract.promise("jit"):
        for tokens in (0, 1, max_tokens):
            found = _compiled(ask, pim, jnp.int32(tokens))
            require_same(found, alone[tokens], f"compiled, {tokens} tokens", rtol=ROUNDING)
    with contract.promise("vmap"):
        _check_vmap(ask, pim, alone, powers)
    with contract.promise("grad"):
        gradient = _gradient(ask, pim, jnp.int32(max_tokens))
        require_finite(gradient, "the derivative of expert_time in")
    with contract.promise("units"):
        _check_magnitude(pim, alone, hidden * intermediate * weight_bits / 8)
        _check_unit_of_time(ask, pim, alone, powers)
    with contract.promise("fraction"):
        half = ask(pim.fraction(2), max_tokens)
        for name, time in half.items():
            whole = alone[max_tokens][name]
            require(
                time >= whole * (1 - ROUNDING), f"half of the channels: {name} {time} < {whole}"
            )
    with contract.promise("determinism"):
        for tokens in counts:
            require_same(ask(pim, tokens), alone[tokens], f"asked again for {tokens} tokens")
    with contract.promise("status"):
        bad = _compiled(ask, pim, jnp.int32(-1))
        for name in ("up", "down"):
            require(jnp.isnan(bad[name]), f"-1 tokens, compiled: {name} is {bad[name]}, not NaN")
        require_error(lambda: ask(pim, -1), "no ValueError for -1 tokens, eagerly")
    return contract.settle()


class _Expert(NamedTuple):
    """What is asked of a PIM. Hashable and beside the traced numbers, so that PIMs of one
    structure share their compilations."""

    hidden: int
    intermediate: int
    weight_bits: float
    activation_bits: float

    def __call__(self, pim: AbstractPIM, tokens: Any) -> dict[str, Array]:
        bits = dict(weight_bits=self.weight_bits, activation_bits=self.activation_bits)
        gemv = lambda m, k: pim.gemv_time(m, k, tokens, **bits)
        return {
            "up": gemv(2 * self.intermediate, self.hidden),
            "down": gemv(self.hidden, self.intermediate),
            "expert": pim.expert_time(self.hidden, self.intermediate, tokens, **bits),
        }


@functools.partial(jax.jit, static_argnums=0)
def _compiled(ask: _Expert, pim: AbstractPIM, tokens: Array) -> dict[str, Array]:
    return ask(pim, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _batch(ask: _Expert, pims: AbstractPIM, tokens: Array) -> dict[str, Array]:
    return jax.vmap(ask)(pims, tokens)


@eqx.filter_jit
def _gradient(ask: _Expert, pim: AbstractPIM, tokens: Array) -> AbstractPIM:
    return eqx.filter_grad(lambda pim: ask(pim, tokens)["expert"])(pim)


def _powers(pim: AbstractPIM, given: Mapping[str, int]) -> dict[str, int]:
    """The power of the second in every numeric field."""
    paths = list(numeric_fields(pim))
    for path in given:
        if path not in paths:
            raise ValueError(
                f"seconds: {type(pim).__name__} has no number {path!r}{nearest(path, paths)} "
                f"(numbers: {', '.join(paths)})"
            )
    return {path: given.get(path, _power(path)) for path in paths}


def _power(path: str) -> int:
    name = path.rpartition(".")[2]
    if name.endswith(("bandwidth", "_per_s")):
        return -1
    is_time = name.endswith(("time", "times", "latency"))
    return int(is_time or "timing" in path.split(".")[:-1])


def _check_shape(pim: AbstractPIM, alone: list[dict[str, Array]]) -> None:
    numbers = {name: getattr(pim, name) for name in ("internal_bandwidth", "flops_per_s")}
    numbers |= {name: getattr(pim, name) for name in ("contention", "attention_overhead")}
    numbers |= {"turn_time": pim.turn_time} | {f"gemv_time ({k})": v for k, v in alone[1].items()}
    for name, value in numbers.items():
        value = jnp.asarray(value)
        require(
            value.shape == () and value.dtype.kind == "f",
            f"{name} is {value.dtype} {list(value.shape)}, not a float scalar",
        )
        require(jnp.isfinite(value), f"{name} is {value}")
    for name in ("internal_bandwidth", "flops_per_s"):
        require(numbers[name] > 0, f"{name} is {numbers[name]}, not above 0")
    require(0 <= pim.contention <= 1, f"contention is {pim.contention}, not in [0, 1]")


def _check_tokens(alone: list[dict[str, Array]]) -> None:
    for name in alone[0]:
        times = np.array([time[name] for time in alone])
        require(times[0] == 0, f"0 tokens take {times[0]} s ({name})")
        if (falls := np.flatnonzero(~(times[1:] >= times[:-1] * (1 - ROUNDING)))).size:
            n = falls[0]
            why = f"{n + 1} tokens take {times[n + 1]:.4g} s, {n} take {times[n]:.4g} s ({name})"
            require(False, why)


def _check_vmap(
    ask: _Expert, pim: AbstractPIM, alone: list[dict[str, Array]], powers: dict[str, int]
) -> None:
    """One batch over both: this PIM with every count, then others with the last count."""
    others = [_in_seconds(pim, powers, scale) for scale in (0.5, 0.75)]
    last = len(alone) - 1
    wanted = [*alone, *(ask(other, last) for other in others)]
    tokens = jnp.minimum(jnp.arange(len(wanted)), last)
    batch = _batch(ask, stack([pim] * len(alone) + others), tokens)
    for i, times in enumerate(wanted):
        what = f"{i} tokens" if i <= last else f"PIM {i - last}"
        require_same(row(batch, i), times, f"{what} in a batch", rtol=ROUNDING)


def _check_magnitude(pim: AbstractPIM, alone: list[dict[str, Array]], weights: float) -> None:
    streaming = weights / float(pim.internal_bandwidth)
    ratio = float(alone[1]["down"]) / streaming
    require(
        FASTEST <= ratio <= SLOWEST,
        f"one token takes {float(alone[1]['down']):.3g} s where its internal_bandwidth of "
        f"{float(pim.internal_bandwidth):.3g} B/s reads the weights in {streaming:.3g} s: are "
        "times in s and rates in B/s?",
    )


def _in_seconds(pim: AbstractPIM, powers: dict[str, int], scale: float) -> AbstractPIM:
    """The PIM with every time `scale` times as large, every rate by its inverse."""
    change = lambda path, leaf: leaf * scale**power if (power := powers[named(path)]) else leaf
    return jax.tree_util.tree_map_with_path(change, pim)


def _check_unit_of_time(
    ask: _Expert, pim: AbstractPIM, alone: list[dict[str, Array]], powers: dict[str, int]
) -> None:
    tokens, scale = len(alone) - 1, 4.0
    slow = _in_seconds(pim, powers, scale)
    wanted = {name: time * scale for name, time in alone[tokens].items()}
    said = ", ".join(path for path, power in powers.items() if power)
    why = f"{said} in a unit of {1 / scale:g} s instead of 1 (see `seconds`)"
    require_same(ask(slow, tokens), wanted, why, rtol=ROUNDING)
    for name in ("internal_bandwidth", "flops_per_s"):
        found, old = {name: getattr(slow, name)}, getattr(pim, name)
        require_same(found, {name: old / scale}, why, rtol=ROUNDING)
