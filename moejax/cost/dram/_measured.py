"""From commands to a PIM that `moejax.evaluate` can be run on."""

import jax
import jax.numpy as jnp

from moejax._status import is_traced
from moejax._typing import FloatScalar
from moejax.cost.dram._gemv import gemv_times
from moejax.hardware import BankPIM, GEMVCurve, TablePIM
from moejax.models import MoEModel


def measured_pim(
    model: MoEModel,
    pim: BankPIM,
    max_tokens: int,
    *,
    kernel: str = "b200",
    order: str | None = None,
    phases: int = 32,
) -> TablePIM:
    """The same PIM, with the GEMV times of a model as the DRAM commands take them.

    `evaluate(model, system.replace(pim=measured), ..., believed=system)` judges on the commands
    what a policy decided on the closed form. What is no GEMV (attention, contention, traffic, the
    share of a group of channels) stays as `pim` has it, and energies are NaN.

    **Arguments:**

    - `model`: gives the shapes and bits: up and gate as one matrix, down, and the same of the
        shared experts, which `all_exp` runs on PIM, where they are stored as the routed ones are
        (else they are left out: a table has one precision).
    - `max_tokens`: the most tokens that meet in an expert, `workload.num_slots` for `evaluate`;
        `measured.replace(extrapolate=True)` goes on beyond.
    - `kernel`, `order`: see `gemv_time`. Default order: that of `pim`, or `token_outer` with the
        kernels that know no other.
    - `phases`: how many refresh phases, evenly spread over 0 .. tREFI, a time is the mean of.

    **Returns:** `TablePIM` of all counts from 1 to `max_tokens`, times in s.

    **Raises:** `ValueError` for another kind of PIM, fewer than one token or phase, weights that
    `samsung` can't hold, and traced values: measure once, outside of `jit` and `vmap`; and as
    `gemv_time`.
    """
    _check(model, pim, max_tokens, phases, kernel)
    if order is None:
        order = pim.order if kernel == "b200" else "token_outer"
    precision = model.precision
    bits = dict(weight_bits=precision.expert_weight_bits, activation_bits=precision.activation_bits)
    starts = (jnp.arange(phases) + 0.5) / phases * pim.timing.refi

    def mean_times(outputs: int, inputs: int):
        one = lambda phase: gemv_times(
            outputs, inputs, max_tokens, pim, kernel, order, phase=phase, **bits
        )
        return jnp.mean(jax.vmap(one)(starts), axis=0)[1:]

    counts, unknown = tuple(range(1, max_tokens + 1)), jnp.full(max_tokens, jnp.nan)
    curves = tuple(
        GEMVCurve(*shape, order, counts, mean_times(*shape), unknown) for shape in _shapes(model)
    )
    return TablePIM(
        base=pim,
        curves=curves,
        contention=pim.contention,
        attention_overhead=pim.attention_overhead,
        turn_time=pim.turn_time,
        order=order,
        weight_bits=precision.expert_weight_bits,
        activation_bits=precision.activation_bits,
    )


def _shapes(model: MoEModel) -> list[tuple[int, int]]:
    """Matrices that a policy may put on PIM, each once."""
    widths = [model.moe_intermediate]
    same_bits = model.precision.weight_bits == model.precision.expert_weight_bits
    if model.shared_intermediate and same_bits:
        widths.append(model.shared_intermediate)
    shapes = [shape for w in widths for shape in ((2 * w, model.hidden), (model.hidden, w))]
    return list(dict.fromkeys(shapes))


def _check(model: MoEModel, pim: BankPIM, max_tokens: int, phases: int, kernel: str) -> None:
    if not isinstance(pim, BankPIM):
        raise ValueError(f"measured_pim: pim is a {type(pim).__name__}: allowed is a BankPIM")
    if not isinstance(model, MoEModel):
        raise ValueError(f"measured_pim: model is a {type(model).__name__}: allowed is a MoEModel")
    if is_traced(model, pim):
        raise ValueError("measured_pim: model or pim are traced: measure outside of jit and vmap")
    for name, value in (("max_tokens", max_tokens), ("phases", phases)):
        if type(value) is not int or value < 1:
            raise ValueError(f"measured_pim: {name} = {value!r}: allowed is an int of at least 1")
    _check_bits(model.precision.expert_weight_bits, kernel)


def _check_bits(bits: FloatScalar, kernel: str) -> None:
    if kernel == "samsung" and bits != 16:
        raise ValueError(
            f"measured_pim: weights of {bits:g} bits: allowed with kernel 'samsung' are 16"
        )
