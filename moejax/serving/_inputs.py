"""What constructors could not look at under tracing: numbers of a system and bit widths."""

import jax.numpy as jnp

from moejax._status import Status, flag, merge
from moejax._typing import IntScalar
from moejax.cost import GPUEfficiency
from moejax.hardware import System, numeric_fields
from moejax.models import MoEModel


MAX_BITS = 64.0
RATES = ("flops_per_s", "flops_per_s_8bit", "bandwidth", "hbm_bandwidth", "efficiency")
UNKNOWN_ALLOWED = "energies"  # NaN in the table of a PIM that does not know its energy


def check_optional(name: str, given: object, kinds: tuple[type, ...]) -> None:
    """`ValueError` for an argument that is neither `None` nor of one of some types."""
    if given is not None and not isinstance(given, kinds):
        known = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{_shown(name, given)}: allowed are None, {known}")


def check_required(**given: tuple[object, type]) -> None:
    """`ValueError` for the first argument that is not of its type."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise ValueError(f"{_shown(name, value)}: allowed is a {kind.__name__}")


def _shown(name: str, value: object) -> str:
    # A module prints as a page.
    plain = value is None or isinstance(value, str | int | float)
    return f"{name} = {value!r}" if plain else f"{name} is a {type(value).__name__}"


def input_status(
    model: MoEModel, system: System, efficiency: GPUEfficiency | None = None
) -> IntScalar:
    """Whether the rates, times, counts and widths of an evaluation can be meant. The same limits
    as those of the modules' constructors, which raise where they see a number."""
    gpu, pim, precision = system.gpu, system.pim, model.precision
    bits = [precision.weight_bits, precision.expert_weight_bits]
    bits = jnp.stack([*bits, precision.activation_bits, precision.kv_bits])
    fine_costs = jnp.all((bits > 0) & (bits <= MAX_BITS))
    fine_costs &= system.num_gpus % jnp.maximum(system.attention_tp, 1) == 0
    fine_costs &= (pim.contention <= 1) & (pim.attention_overhead > 0) & (gpu.hbm_bytes > 0)
    fine_rates = (gpu.compute_efficiency <= 1) & (gpu.bandwidth_efficiency <= 1)
    for path, number in numeric_fields(system).items():
        if path.endswith(UNKNOWN_ALLOWED):
            continue
        if path.endswith(RATES):
            fine_rates &= jnp.all((number > 0) & jnp.isfinite(number))
        else:
            least = 0 if jnp.issubdtype(number.dtype, jnp.floating) else 1
            fine_costs &= jnp.all((number >= least) & jnp.isfinite(number))
    if efficiency is not None:
        shares = jnp.stack([efficiency.bandwidth, efficiency.compute])
        fine_rates &= jnp.all((shares > 0) & (shares <= 1))
        fine_costs &= (efficiency.launch_time >= 0) & (efficiency.sharpness >= 1)
        fine_costs &= (efficiency.spill >= 0) & (efficiency.spill <= 1)
    return merge(flag(~fine_costs, Status.BAD_COST), flag(~fine_rates, Status.BAD_RATE))
