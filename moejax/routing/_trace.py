"""The routing trace: which experts each token chose, layer by layer."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Bool, Float, Int


NOT_ROUTED = -1
"""Expert id of a slot that holds no expert: padding, or a token sent to fewer than `top_k`."""


class RoutingTrace(eqx.Module):
    """Expert choices of a stream of tokens, all layers aligned token by token.

    A pytree: the arrays are leaves, `num_experts` and `model` are static. Tokens of one sequence
    are contiguous, and sequence i ends where sequence i + 1 begins.
    """

    expert_ids: Int[Array, "layers tokens top_k"]
    weights: Float[Array, "layers tokens top_k"] | None
    logits: Float[Array, "layers tokens experts"] | None
    valid: Bool[Array, " tokens"]
    sequence_start: Int[Array, " sequences"]
    decode: Bool[Array, " tokens"] | None
    num_experts: int = eqx.field(static=True)
    model: str | None = eqx.field(static=True)

    def __init__(
        self,
        expert_ids: Any,
        num_experts: int,
        *,
        weights: Any = None,
        logits: Any = None,
        valid: Any = None,
        sequence_start: Any = None,
        decode: Any = None,
        model: str | None = None,
    ):
        """**Arguments:**

        - `expert_ids`: [layers, tokens, top_k] whole numbers in 0 .. num_experts - 1, or
            `NOT_ROUTED`.
        - `num_experts`: routed experts of a layer.
        - `weights`: [layers, tokens, top_k] router weights, optional.
        - `logits`: [layers, tokens, experts] router logits, optional.
        - `valid`: [tokens], False for padding and for tokens that statistics and decode batches
            should leave out. All True by default.
        - `sequence_start`: [sequences] first token of each sequence, ascending from 0; entries
            equal to the number of tokens are empty sequences. One sequence by default.
        - `decode`: [tokens], True for tokens of decode steps and False for those of prompts, where
            that is known.
        - `model`: name of the model the trace was taken from.

        **Raises:** `ValueError` for shapes that disagree, an empty trace, or top_k > num_experts.
        The values themselves are looked at by `check`.
        """
        self.expert_ids = as_expert_ids("RoutingTrace", expert_ids)
        self.weights = None if weights is None else jnp.asarray(weights, jnp.result_type(float))
        self.logits = None if logits is None else jnp.asarray(logits, jnp.result_type(float))
        num_tokens = self.expert_ids.shape[1] if self.expert_ids.ndim == 3 else 0
        # NumPy defaults: JAX would compile a program for every number of tokens.
        self.valid = jnp.asarray(np.ones(num_tokens, bool) if valid is None else valid, bool)
        starts = np.zeros(1, np.int32) if sequence_start is None else sequence_start
        self.sequence_start = jnp.asarray(starts, jnp.int32)
        self.decode = None if decode is None else jnp.asarray(decode, bool)
        self.num_experts = int(num_experts)
        self.model = model

    def __check_init__(self):
        shape = self.expert_ids.shape
        if len(shape) != 3:
            raise ValueError(
                f"RoutingTrace.expert_ids has shape {shape}: allowed is [layers, tokens, top_k]"
            )
        if 0 in shape:
            raise ValueError(f"RoutingTrace is empty: expert_ids has shape {shape}")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"RoutingTrace: top_k = {self.top_k} is more than num_experts = {self.num_experts}"
            )
        _check_shape("weights", self.weights, shape)
        _check_shape("logits", self.logits, (*shape[:2], self.num_experts))
        _check_shape("valid", self.valid, shape[1:2])
        _check_shape("decode", self.decode, shape[1:2])
        if self.sequence_start.ndim != 1 or self.num_sequences == 0:
            raise ValueError(
                f"RoutingTrace.sequence_start has shape {self.sequence_start.shape}: "
                "allowed is [sequences], at least one"
            )

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return self.expert_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens, the ones that are not valid included."""
        return self.expert_ids.shape[1]

    @property
    def top_k(self) -> int:
        """Experts of one token."""
        return self.expert_ids.shape[2]

    @property
    def num_sequences(self) -> int:
        """Sequences, empty ones included."""
        return self.sequence_start.shape[0]

    @property
    def sequence_id(self) -> Int[Array, " tokens"]:
        """The sequence each token belongs to."""
        tokens = jnp.arange(self.num_tokens)
        return jnp.searchsorted(self.sequence_start, tokens, side="right").astype(jnp.int32) - 1

    def check(self, where: str = "trace") -> None:
        """Looks at every value, on the host.

        **Raises:** `ValueError` beginning with `where` and naming layer and token for an expert id
        out of range or an expert chosen twice by one token, and for sequence starts that do not
        ascend from 0.
        """
        check_starts(np.asarray(self.sequence_start), self.num_tokens, where)
        check_experts(np.asarray(self.expert_ids), self.num_experts, where)


def _check_shape(name: str, array: Array | None, expected: tuple[int, ...]) -> None:
    if array is not None and array.shape != expected:
        raise ValueError(f"RoutingTrace.{name} has shape {array.shape}: allowed is {expected}")


def as_expert_ids(where: str, expert_ids: Any) -> Int[Array, "..."]:
    """int32, from arrays of any integer dtype or nested lists.

    **Raises:** `ValueError` for another dtype.
    """
    ids = expert_ids if isinstance(expert_ids, jax.Array) else np.asarray(expert_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{where}: expert_ids must be whole numbers, not {ids.dtype}")
    if ids.dtype.itemsize > 4:
        # Saturate: an id out of range must not wrap round into it.
        ids = ids.clip(-(2**31), 2**31 - 1)
    return jnp.asarray(ids, jnp.int32)


def check_starts(starts: np.ndarray, num_tokens: int, where: str) -> None:
    """Raises `ValueError` unless the first tokens of the sequences ascend from 0."""
    if starts[0] != 0 or np.any(np.diff(starts) < 0) or starts[-1] > num_tokens:
        raise ValueError(f"{where}: sequence starts must ascend from 0 to at most {num_tokens}")


def check_experts(
    ids: np.ndarray,
    num_experts: int,
    where: str,
    *,
    layer_names: Sequence[object] | None = None,
    lowest: int = NOT_ROUTED,
) -> None:
    """Raises `ValueError` for the first id out of range or chosen twice by its token.

    **Arguments:**

    - `ids`: [layers, tokens, top_k], any integer dtype.
    - `lowest`: least id allowed; 0 for file formats that have no `NOT_ROUTED`.
    """

    def complain(position: tuple[int, ...], what: str):
        layer, token = position[:2]
        name = layer if layer_names is None else layer_names[layer]
        raise ValueError(f"{where}: layer {name}, token {token}: {what}")

    # Two passes over the extremes are cheaper than a mask when nothing is wrong.
    if ids.min() < lowest or ids.max() >= num_experts:
        first = np.argwhere((ids < lowest) | (ids >= num_experts))[0]
        allowed = f"allowed is 0 to {num_experts - 1}"
        complain(tuple(first), f"expert id {ids[tuple(first)]}, {allowed}")
    ordered = np.sort(ids, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NOT_ROUTED)
    if twice.any():
        first = tuple(np.argwhere(twice)[0])
        complain(first, f"duplicate expert {ordered[first]} (the experts of a token are distinct)")


def concat(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """Traces of one model, joined along the tokens.

    **Arguments:**

    - `traces`: at least one. Weights, logits and phases are kept only where all of them
        have them.

    **Raises:** `ValueError` where layers, experts, top_k or the model's name differ.
    """
    traces = list(traces)
    if not traces:
        raise ValueError("concat: no traces")
    kinds = {(t.num_layers, t.num_experts, t.top_k, t.model) for t in traces}
    if len(kinds) > 1:
        one, other = sorted(kinds, key=str)[:2]
        raise ValueError(
            f"concat: traces differ in (layers, experts, top_k, model): {one} and {other}"
        )
    first_token = np.cumsum([0] + [t.num_tokens for t in traces])

    def join(name: str, axis: int):
        parts = [getattr(t, name) for t in traces]
        return None if any(p is None for p in parts) else jnp.concatenate(parts, axis)

    return RoutingTrace(
        join("expert_ids", 1),
        traces[0].num_experts,
        weights=join("weights", 1),
        logits=join("logits", 1),
        valid=join("valid", 0),
        # An empty sequence at the end of one trace becomes one before the start of the next.
        sequence_start=jnp.concatenate(
            [t.sequence_start + int(n) for t, n in zip(traces, first_token)]
        ),
        decode=join("decode", 0),
        model=traces[0].model,
    )
