"""Which hardware number matters: elasticities of any result of a system."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import FloatScalar
from moejax.hardware import System, numeric_fields, set_fields


GRADIENT, DOUBLED, NOT_POSSIBLE = "gradient", "x2", "not possible"


@dataclasses.dataclass(frozen=True)
class Elasticity:
    """d log result / d log of one number.

    `value` is NaN where `how` is `"not possible"`. `how` is `"gradient"`, or `"x2"` for a count:
    the difference quotient of the logarithms from the count to twice the count, decisions remade.
    """

    value: float
    how: str


class Sensitivity(Mapping[str, Elasticity]):
    """Elasticities by dotted path, largest magnitude first; `print` shows a table.

    -1 means that doubling the number halves the result (for small changes, in proportion).
    """

    def __init__(self, result: float, entries: dict[str, Elasticity]):
        size = lambda item: (np.isnan(item[1].value), -abs(item[1].value))
        self.result = result
        self._entries = dict(sorted(entries.items(), key=size))

    def __getitem__(self, path: str) -> Elasticity:
        return self._entries[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        width = max(map(len, self._entries), default=0)
        lines = [f"result {self.result:.6g}; d log result / d log x:"]
        for path, entry in self.items():
            flag = "" if entry.how == GRADIENT else f"  ({entry.how})"
            # Adding 0.0 turns -0.0 into 0.0.
            lines.append(f"  {path:<{width}} {round(entry.value, 4) + 0.0:+.4f}{flag}")
        return "\n".join(lines)


def sensitivity(fn: Callable[[System], FloatScalar], system: System) -> Sensitivity:
    """How strongly a result depends on every number of a system.

    **Arguments:**

    - `fn`: from a `System` to a positive scalar, for instance the `tbt` of `evaluate`.
    - `system`: where to look.

    **Returns:** `Sensitivity`. Floating numbers by gradient, at the partition that was chosen;
    integer counts (and `num_gpus`) by evaluating at twice the count, flagged `"x2"`.

    **Raises:** `ValueError` if the result is not one positive finite number; whatever `fn` raises.
    """
    result = fn(system)
    if jnp.shape(result) != () or not (float(result) > 0 and np.isfinite(float(result))):
        raise ValueError(f"sensitivity: fn(system) = {result}: allowed is one positive number")
    gradient = jax.grad(fn, allow_int=True)(system)
    slopes, numbers = numeric_fields(gradient), numeric_fields(system)
    entries = {}
    for path, number in numbers.items():
        if jnp.issubdtype(number.dtype, jnp.floating):
            value = float(slopes[path]) * float(number) / float(result)
            entries[path] = Elasticity(value, GRADIENT)
        else:
            entries[path] = _doubled(fn, system, path, 2 * int(number), float(result))
    entries["num_gpus"] = _doubled(fn, system, "num_gpus", 2 * system.num_gpus, float(result))
    return Sensitivity(float(result), entries)


def _doubled(fn, system: System, path: str, count: int, result: float) -> Elasticity:
    try:
        doubled = float(fn(set_fields(system, {path: count})))
    except ValueError:
        return Elasticity(float("nan"), NOT_POSSIBLE)
    return Elasticity(float(np.log2(doubled / result)), DOUBLED)
