"""The gate with its coefficients, to be put where a model has its own."""

import functools
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from moejax._checks import as_float, lookup
from moejax._typing import Array, Bool, BoolScalar, Float, Int
from moejax.gating._combine import Combine, router_options
from moejax.gating._functional import GateResult, hardware_aware_top_k
from moejax.gating._groups import GroupScore


SCORES = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "none": lambda logits: logits,
}


class HardwareAwareGate(eqx.Module):
    """`hardware_aware_top_k` as a layer: logits in, experts, weights and load out.

    The arrays are leaves, so `jax.jit`, `jax.vmap`, `jax.grad`, `jax.lax.scan`, `eqx.partition` and
    `eqx.tree_serialise_leaves` take it; the rest is static. One gate serves one layer, or all of
    them where the coefficients or `share` have a leading axis of layers: `layer(l)` is the gate of
    one, and so is `jax.vmap` or `jax.lax.scan` over that axis.

    A gate in a model of your own:

    ```python
    class MoE(eqx.Module):
        router: jax.Array  # [hidden, experts]
        experts: eqx.nn.MLP  # of stacked weights, [experts, ...]
        gate: HardwareAwareGate

        def __call__(self, x):  # [tokens, hidden]
            chosen = self.gate(x, router=self.router)
            run = lambda expert, x: jax.vmap(expert)(x)
            outputs = eqx.filter_vmap(run, in_axes=(eqx.if_array(0), None))(self.experts, x)
            rows = jnp.arange(len(x))[:, None]
            picked = outputs[chosen.expert_ids, rows]  # [tokens, top_k, hidden]
            return jnp.einsum("tk,tkh->th", chosen.weights, picked)


    share = jnp.eye(8)  # expert i on node i
    gate = HardwareAwareGate(
        share, top_k=2, r_comp=-3e4, r_comm=-0.02, token_time=1e-6, protect=1
    )
    moe = MoE(router, experts, gate)
    ```

    Gradients: exact in logits, hidden states and router through the weights of the chosen experts;
    zero in the coefficients, since choices have none. No gradient reaches `share` or `token_time`,
    which are of the machine and not to be trained; keep weight decay away from them as well.
    """

    r_comp: Float[Array, "*layers"]
    r_comm: Float[Array, "*layers"]
    share: Float[Array, "*layers experts nodes"]
    token_time: Float[Array, "*layers"]
    selection_bias: Float[Array, "*layers experts"] | None
    top_k: int = eqx.field(static=True)
    score: Literal["softmax", "sigmoid", "none"] = eqx.field(static=True)
    combine: Combine = eqx.field(static=True)
    scaling: float = eqx.field(static=True)
    num_groups: int = eqx.field(static=True)
    top_groups: int = eqx.field(static=True)
    group_score: GroupScore = eqx.field(static=True)
    protect: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True)
    max_rows: int | None = eqx.field(static=True)
    max_hosts: int | None = eqx.field(static=True)

    def __init__(
        self,
        share: Any,
        *,
        top_k: int,
        r_comp: Any,
        r_comm: Any,
        token_time: Any,
        selection_bias: Any = None,
        score: Literal["softmax", "sigmoid", "none"] = "softmax",
        combine: Combine = "renormalize",
        scaling: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: GroupScore = "max",
        protect: int = 0,
        chunk: int = 1,
        max_rows: int | None = None,
        max_hosts: int | None = None,
    ):
        """**Arguments:** as `hardware_aware_top_k`, and

        - `score`: from logits to scores: `"softmax"` over all experts, `"sigmoid"` of each, or
            `"none"` where the caller hands in scores.
        - `selection_bias`: [experts], added to the scores for the choice only (DeepSeek-V3).
        - `share`, `token_time`, `selection_bias`, `r_comp`, `r_comm`: one of each, or one for each
            layer in front.

        **Raises:** `ValueError` for shapes that disagree or an unknown score. The values are looked
        at when the gate is called.
        """
        lookup("score", score, SCORES)
        self.share = as_float(share)
        experts = self.share.shape[-2:-1]
        self.selection_bias = None if selection_bias is None else as_float(selection_bias)
        self.r_comp, self.r_comm = as_float(r_comp), as_float(r_comm)
        self.token_time = as_float(token_time)
        self.top_k, self.score, self.combine = top_k, score, combine
        self.scaling, self.protect, self.chunk = scaling, protect, chunk
        self.num_groups, self.top_groups = num_groups, top_groups
        self.group_score = group_score
        self.max_rows, self.max_hosts = max_rows, max_hosts
        layers = {
            array.shape[: array.ndim - axes]
            for array, axes in self._per_layer()
            if array.ndim > axes
        }
        if self.share.ndim not in (2, 3) or len(layers) > 1 or any(len(x) > 1 for x in layers):
            raise ValueError(
                f"share {self.share.shape}, r_comp {self.r_comp.shape}, r_comm "
                f"{self.r_comm.shape}, token_time {self.token_time.shape}: allowed is "
                "[experts, nodes] and numbers, or the same number of layers in front"
            )
        if self.selection_bias is not None and self.selection_bias.shape[-1:] != experts:
            raise ValueError(
                f"selection_bias has shape {self.selection_bias.shape}: allowed is {experts}"
            )

    @classmethod
    def for_router(cls, router: Any, share: Any, **options: Any) -> "HardwareAwareGate":
        """A gate with the score, combine rule, scaling and groups of a model's router.

        **Arguments:**

        - `router`: of `moejax.models`, or anything with its attributes.
        - `share`, `options`: as for the class; an option given here wins.
        """
        return cls(share, **({"score": router.score} | router_options(router) | options))

    def __call__(
        self,
        inputs: Float[Array, "tokens experts"] | Float[Array, "tokens hidden"],
        *,
        router: Float[Array, "hidden experts"] | None = None,
        valid: Bool[Array, " tokens"] | None = None,
        initial_load: Float[Array, " nodes"] | None = None,
        extra_cost: Float[Array, "..."] | None = None,
        enabled: bool | BoolScalar = True,
        axis_name: str | tuple[str, ...] | None = None,
    ) -> GateResult:
        """The choices of one layer for a batch of tokens.

        **Arguments:**

        - `inputs`: router logits, or hidden states where `router` is given.
        - `router`: [hidden, experts], multiplied in float32 at least.
        - the others: as `hardware_aware_top_k`.

        **Returns:** `GateResult`.

        **Raises:** `ValueError` as `hardware_aware_top_k`, and for a gate of several layers.
        """
        if self.share.ndim != 2 or self.r_comp.ndim or self.r_comm.ndim or self.token_time.ndim:
            raise ValueError("this gate holds several layers: call gate.layer(l), or jax.vmap it")
        logits = jnp.asarray(inputs)
        if router is not None:
            if logits.ndim != 2 or jnp.shape(router) != (logits.shape[1], self.share.shape[0]):
                raise ValueError(
                    f"router has shape {jnp.shape(router)}, inputs {logits.shape}: allowed is "
                    f"[hidden, {self.share.shape[0]}] and [tokens, hidden]"
                )
            wide = jnp.promote_types(jnp.promote_types(logits.dtype, router.dtype), jnp.float32)
            logits = logits.astype(wide) @ router.astype(wide)
        scores = SCORES[self.score](logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        bias = self.selection_bias
        return hardware_aware_top_k(
            scores,
            jax.lax.stop_gradient(self.share),
            top_k=self.top_k,
            r_comp=self.r_comp,
            r_comm=self.r_comm,
            token_time=jax.lax.stop_gradient(self.token_time),
            protect=self.protect,
            chunk=self.chunk,
            valid=valid,
            initial_load=initial_load,
            selection_scores=None if bias is None else scores + bias,
            extra_cost=extra_cost,
            combine=self.combine,
            scaling=self.scaling,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_score=self.group_score,
            enabled=enabled,
            max_rows=self.max_rows,
            axis_name=axis_name,
            max_hosts=self.max_hosts,
        )

    def choose(
        self, logits: Float[Array, "tokens experts"]
    ) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
        """(expert ids, weights): what `moejax.zoo.ByteMoE` takes as its `gate`."""
        result = self(logits)
        return result.expert_ids, result.weights

    def layer(self, index: Any) -> "HardwareAwareGate":
        """The gate of one layer of several; what all layers share stays. `index` may be traced."""
        pick = lambda array, axes: array[index] if array.ndim > axes else array
        names = ("share", "r_comp", "r_comm", "token_time", "selection_bias")
        where = lambda gate: [getattr(gate, n) for n in names if getattr(gate, n) is not None]
        return eqx.tree_at(where, self, [pick(array, axes) for array, axes in self._per_layer()])

    def _per_layer(self) -> list[tuple[Array, int]]:
        """Arrays that may have a leading axis of layers, and their axes without it."""
        arrays = [(self.share, 2), (self.r_comp, 0), (self.r_comm, 0), (self.token_time, 0)]
        return arrays + ([] if self.selection_bias is None else [(self.selection_bias, 1)])


@functools.partial(jax.jit, static_argnames="top_k")
def layer_scale(
    scores: Float[Array, "layers tokens experts"],
    top_k: int,
    valid: Bool[Array, " tokens"] | None = None,
) -> Float[Array, " layers"]:
    """Factors for the coefficients of each layer, from how decided its routing is.

    m_l = mean over tokens of s_(1) - s_(k+1), scale_l = m_l / mean over layers of m (layer-scaled
    form, HDA-MoE, arXiv 2609.08682, VI-G). A layer whose choices are clear bears more.

    **Arguments:**

    - `scores`: router scores of every layer.
    - `top_k`: static, below the number of experts.
    - `valid`: False for tokens to leave out.

    **Returns:** [layers], mean 1; all 1 where no layer prefers any expert. Subgradient in `scores`.

    **Raises:** `ValueError` for another shape or no expert beyond the `top_k`.
    """
    scores = jnp.asarray(scores)
    if scores.ndim != 3 or not 1 <= top_k < scores.shape[-1]:
        raise ValueError(
            f"layer_scale: scores has shape {scores.shape} and top_k = {top_k}: allowed is "
            "[layers, tokens, experts] and 1 to experts - 1"
        )
    if valid is not None and jnp.shape(valid) != scores.shape[1:2]:
        raise ValueError(
            f"layer_scale: valid has shape {jnp.shape(valid)}: allowed is {scores.shape[1:2]}"
        )
    best = jax.lax.top_k(scores, top_k + 1)[0]
    margin = best[..., 0] - best[..., -1]
    counted = jnp.ones(scores.shape[1], bool) if valid is None else valid
    total = jnp.where(counted, margin, 0).sum(1) / jnp.maximum(counted.sum(), 1)
    mean = total.mean()
    return jnp.where(mean > 0, total / jnp.where(mean > 0, mean, 1), 1)
