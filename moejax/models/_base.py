"""A Mixture-of-Experts transformer as sizes."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from moejax._checks import lookup, replace
from moejax._status import is_traced
from moejax._typing import Array, Float, FloatScalar
from moejax.models._attention import Attention
from moejax.models._precision import FORMATS, Precision
from moejax.models._router import Router


_POSITIVE = ("hidden", "moe_intermediate", "num_experts", "top_k", "vocab")
_SHARED = ("num_shared_experts", "shared_intermediate")
_DENSE = ("num_dense_layers", "dense_intermediate")


class MoEModel(eqx.Module):
    """Sizes of a Mixture-of-Experts transformer. Everything is static except the bit widths.

    A model can be an argument of a jitted function: the eight bit widths are its only arrays, and
    new values of them do not retrace.

    **Arguments:**

    - `name`: for tables and error messages.
    - `hidden`, `moe_intermediate`: widths of the residual stream and inside a routed expert.
    - `num_experts`, `top_k`: routed experts per layer, and how many of them a token visits.
    - `vocab`: rows of the embedding table.
    - `num_shared_experts`, `shared_intermediate`: experts that every token visits, and their inner
        width in total; both 0 where there are none.
    - `layers`: the attention of each layer, in order.
    - `num_dense_layers`, `dense_intermediate`: the first layers that have a dense FFN instead of
        experts, and its inner width; both 0 where there are none.
    - `router`, `precision`, `native_precision`: the latter is the checkpoint's own format.
    - `tied_embeddings`: the LM head is the embedding table.

    **Raises:** `ValueError` naming field, value and what is allowed.
    """

    name: str = eqx.field(static=True)
    hidden: int = eqx.field(static=True)
    moe_intermediate: int = eqx.field(static=True)
    num_experts: int = eqx.field(static=True)
    top_k: int = eqx.field(static=True)
    vocab: int = eqx.field(static=True)
    num_shared_experts: int = eqx.field(static=True)
    shared_intermediate: int = eqx.field(static=True)
    layers: tuple[Attention, ...] = eqx.field(static=True, converter=tuple)
    num_dense_layers: int = eqx.field(static=True)
    dense_intermediate: int = eqx.field(static=True)
    router: Router = eqx.field(static=True)
    precision: Precision
    native_precision: Precision
    tied_embeddings: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        for field in (*_POSITIVE, *_SHARED, *_DENSE):
            value, low = getattr(self, field), int(field in _POSITIVE)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                self._refuse(field, f"a whole number >= {low}")
        if self.top_k > self.num_experts:
            self._refuse("top_k", f"at most num_experts = {self.num_experts}")
        for field in ("precision", "native_precision"):
            if not isinstance(getattr(self, field), Precision):
                self._refuse(field, "a Precision, such as Precision.named('bf16')")
        if not self.layers or not all(isinstance(layer, Attention) for layer in self.layers):
            self._refuse("layers", "one Attention per layer, at least one layer")
        if self.num_dense_layers >= self.num_layers:
            self._refuse("num_dense_layers", f"fewer than the {self.num_layers} layers")
        self._check_together(*_SHARED)
        self._check_together(*_DENSE)
        self._check_groups()

    def _refuse(self, field: str, allowed: str) -> None:
        raise ValueError(f"{self.name}: {field} = {getattr(self, field)!r}: allowed is {allowed}")

    def _check_together(self, count: str, width: str) -> None:
        if (getattr(self, count) == 0) != (getattr(self, width) == 0):
            self._refuse(width, f"0 exactly where {count} is 0 ({count} = {getattr(self, count)})")

    def _check_groups(self) -> None:
        groups = self.router.num_groups
        if self.num_experts % groups:
            self._refuse("num_experts", f"a multiple of the router's num_groups = {groups}")
        offered = self.num_experts // groups * self.router.top_groups
        if self.top_k > offered:
            self._refuse("top_k", f"at most the {offered} experts in the router's top groups")

    @property
    def num_layers(self) -> int:
        """All layers, dense ones included."""
        return len(self.layers)

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert (gate, up and down matrices), in elements."""
        return 3 * self.hidden * self.moe_intermediate

    @property
    def num_fixed_parameters(self) -> int:
        """Weights that every token uses: all but the routed experts.

        Embedding and LM head, attention, routers, shared experts and dense FFNs. Norms, biases,
        vision towers and multi-token-prediction heads are not counted.
        """
        hidden = self.hidden
        tables = hidden * self.vocab * (1 if self.tied_embeddings else 2)
        attention = sum(layer.num_weights(hidden) for layer in self.layers)
        dense = self.num_dense_layers * 3 * hidden * self.dense_intermediate
        moe = self.num_moe_layers * hidden * (self.num_experts + 3 * self.shared_intermediate)
        return tables + attention + dense + moe

    @property
    def num_parameters(self) -> int:
        """All weights."""
        routed = self.num_moe_layers * self.num_experts * self.expert_weights
        return self.num_fixed_parameters + routed

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token uses. Both tables count, which some model cards leave out."""
        return self.num_fixed_parameters + self.num_moe_layers * self.top_k * self.expert_weights

    @property
    def expert_bytes(self) -> FloatScalar:
        """Bytes of one routed expert's weights at the current precision."""
        return self.expert_weights / 8.0 * self.precision.expert_weight_bits

    @property
    def weight_bytes(self) -> FloatScalar:
        """Bytes of all weights at the current precision."""
        routed = float(self.num_moe_layers * self.num_experts) * self.expert_bytes
        return self.num_fixed_parameters / 8.0 * self.precision.weight_bits + routed

    def act_ratio(
        self,
        activated_experts: Float[Array, "*batch moe_layers"],
        mode: Literal["params", "experts"] = "params",
    ) -> Float[Array, "*batch"]:
        """The share of the model that one batch touches (Sieve, Fig. 3).

        **Arguments:**

        - `activated_experts`: experts with at least one token, for each MoE layer.
        - `mode`: `"params"` is (all fixed weights + weights of the activated experts) / all
            weights, Sieve's definition; `"experts"` is activated / routed experts, which is what
            its 25 % for Mixtral at one token equals (2 of 8).

        **Returns:** a number in (0, 1]; under tracing NaN where a count is not in
        0 .. `num_experts`.

        **Raises:** `ValueError` for such counts outside tracing, another number of layers, or an
        unknown mode.
        """
        fixed, expert = lookup(
            "act-ratio mode",
            mode,
            {
                "params": (self.num_fixed_parameters, self.expert_weights / self.num_parameters),
                "experts": (0, 1.0 / (self.num_moe_layers * self.num_experts)),
            },
        )
        counts = jnp.asarray(activated_experts)
        if counts.ndim == 0 or counts.shape[-1] != self.num_moe_layers:
            raise ValueError(
                f"{self.name}: activated_experts has shape {counts.shape}: allowed is a last axis "
                f"of {self.num_moe_layers} MoE layers"
            )
        inside = (counts >= 0) & (counts <= self.num_experts)
        if not is_traced(counts) and not np.all(inside):
            raise ValueError(
                f"{self.name}: activated_experts = {activated_experts}: allowed is 0 to "
                f"num_experts = {self.num_experts}"
            )
        ratio = fixed / self.num_parameters + expert * counts.sum(axis=-1)
        return jnp.where(inside.all(axis=-1), ratio, jnp.nan)

    def with_precision(self, precision: "str | Precision") -> "MoEModel":
        """A copy at another precision.

        **Arguments:** `precision`: a `Precision`, `"native"` for the checkpoint's own format, or a
        named format such as `"bf16"`.

        **Raises:** `ValueError` for an unknown name.
        """
        if not isinstance(precision, Precision):
            formats: dict[str, Callable[[], Precision]] = {
                name: functools.partial(Precision.named, name) for name in FORMATS
            }
            formats["native"] = lambda: self.native_precision
            precision = lookup("precision", precision, formats)()
        return self.replace(precision=precision)

    def replace(self, **changes: Any) -> "MoEModel":
        """A copy with some fields changed.

        **Arguments:** `changes`: by field name; `precision=dict(kv_bits=8)` changes single widths,
        and the result is then named `"custom"`.

        **Raises:** `ValueError` naming the nearest field for an unknown one.
        """
        if isinstance(changes.get("precision"), Mapping):
            changes["precision"] = {"name": "custom", **changes["precision"]}
        return replace(self, **changes)
