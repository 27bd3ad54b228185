"""What a gate costs a Hugging Face model on a text: every metric, with intervals."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax import metrics
from moejax._typing import Array
from moejax.capture._bridge import to_jax
from moejax.capture._experts import ExpertProbe
from moejax.capture._families import Layer, find_layers
from moejax.capture._gate import gated
from moejax.capture._log import GateLog, Kept, Measure, measured
from moejax.capture._versions import require_torch
from moejax.gating import HardwareAwareGate, LayerCosts, router_options
from moejax.serving import mean_and_interval


class Fidelity(NamedTuple):
    """Result of `fidelity`. Fields: `measures` by name; `log` of the gate over all batches."""

    measures: dict[str, Measure]
    log: GateLog


def fidelity(
    model: Any,
    tokens: Any,
    gate: HardwareAwareGate,
    *,
    batch: int = 8,
    decode_from: int | None = None,
    costs: LayerCosts | None = None,
    rest_time: float = 0.0,
    expert_rows: int = 64,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """Runs a model over windows of text with and without a gate, as if it decoded them.

    `batch` windows are decoded side by side: the tokens at one position are one batch of the gate,
    as in `gated(decode_from=...)`. Text metrics are per window, choices are judged against the
    router's own on the same hidden states (HDA-MoE, arXiv 2609.08682).

    **Arguments:**

    - `tokens`: [windows, length] token ids without padding, at least `batch` windows; what does not
        fill a batch is left out.
    - `batch`: windows side by side.
    - `decode_from`: positions before it are prompt, not gated and not scored; half the length by
        default.
    - `costs`, `rest_time`: of the modelled time, as for `gated`.
    - `expert_rows`: tokens of each layer for expert substitutability, which runs all experts on
        them; 0 leaves it and the output change out.
    - `seed`: of the deals for neighbor sensitivity.
    - `progress`: called with (batches done, of all).

    **Returns:** `Fidelity`, with the measures `kl`, `ppl_ratio`, `top1_agreement`, `rms_shift`,
    `top1_retention`, `top_k_overlap`, `changed_ratio`, `changed_weight_mass`, `replaced_rank_1` and
    on, `output_change`, `_p95` and `_max` of it, `substitutability`, `neighbor_sensitivity`,
    `tbt_us`, `original_tbt_us`, `speedup`, `gate_ms_per_layer`.

    **Raises:** `ValueError` for windows that do not fill a batch or leave nothing to score, ids
    that are none of the model's, and as `gated`.
    """
    torch = require_torch()
    if expert_rows < 0:
        raise ValueError(f"expert_rows = {expert_rows}: allowed is 0 or more")
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not 1 <= batch <= len(tokens):
        raise ValueError(
            f"tokens has shape {tokens.shape}: allowed is [windows, length] with at least batch = "
            f"{batch} windows"
        )
    length = tokens.shape[1]
    start = length // 2 if decode_from is None else decode_from
    if not 0 <= start <= length - 2:
        raise ValueError(f"decode_from = {start}: allowed is 0 to {length - 2} (length - 2)")
    layers = find_layers(model)
    _check_ids(tokens, model)
    windows = torch.from_numpy(tokens[: len(tokens) // batch * batch].astype(np.int64))
    probe = ExpertProbe(layers, expert_rows)
    rows = _Rows(start)
    options: dict[str, Any] = dict(decode_from=start, costs=costs, rest_time=rest_time)
    log = None
    for done, ids in enumerate(windows.split(batch)):
        ids = ids.to(model.device)
        with torch.no_grad():
            with probe.original():
                original = model(ids, use_cache=False).logits
            # The probe's hooks stand before the gate's and see what the router itself says.
            gating = gated(model, gate, keep_choices=True, **options)
            with probe.adjusted(start, length), gating as one:
                adjusted = model(ids, use_cache=False).logits
        if not one.kept:
            raise ValueError(f"the gate left batches of {batch} alone: max_rows = {gate.max_rows}")
        rows.add(original, adjusted, ids, one.kept[0], one)
        log = one if log is None else _joined(log, one)
        if progress is not None:
            progress(done + 1, len(windows) // batch)
    assert log is not None
    found = rows.measures() | probe.measures()
    found |= rows.neighbors(gate, layers, batch, seed)
    gate_ms = 1e3 * log.gate_time_per_layer
    found["gate_ms_per_layer"] = measured(gate_ms, "ms, in this process", "layers")
    return Fidelity(found, log)


def _check_ids(tokens: np.ndarray, model: Any) -> None:
    known = model.get_input_embeddings().num_embeddings
    whole = np.issubdtype(tokens.dtype, np.integer)
    if not whole or tokens.min() < 0 or tokens.max() >= known:
        raise ValueError(
            f"tokens are {tokens.dtype}, {tokens.min()} to {tokens.max()}: allowed are whole "
            f"numbers, 0 to {known - 1}"
        )


class _Rows:
    """One row of numbers for each window or batch."""

    def __init__(self, start: int):
        self._start = start
        self._windows: list[dict[str, np.ndarray]] = []
        self._steps: list[tuple[float, float]] = []
        self._kept: list[Kept] = []

    def add(self, original: Any, adjusted: Any, ids: Any, kept: Kept, log: GateLog) -> None:
        scored = slice(self._start, -1)
        a, b = (to_jax(x[:, scored].float()) for x in (original, adjusted))
        targets = jnp.asarray(ids[:, self._start + 1 :].cpu().numpy())
        found = {
            "kl": jax.vmap(metrics.kl)(a, b),
            "top1_agreement": jax.vmap(metrics.top1_agreement)(a, b),
            "ppl_ratio": jax.vmap(metrics.ppl_ratio)(a, b, targets),
            "rms_shift": jax.vmap(metrics.rms_shift)(a, b, targets),
        }
        # Steps hold the tokens of one position of all windows; windows first, for a row of each.
        of_windows = lambda x: np.moveaxis(x.reshape(x.shape[0], -1, len(ids), x.shape[-1]), 2, 0)
        own, weights, new = map(of_windows, kept[:3])
        found |= {
            "top1_retention": jax.vmap(metrics.top1_retention)(own, new),
            "top_k_overlap": jax.vmap(metrics.top_k_overlap)(own, new),
            "changed_ratio": jax.vmap(metrics.changed_ratio)(own, new),
            "changed_weight_mass": jax.vmap(metrics.changed_weight_mass)(own, weights, new),
        }
        by_rank = jax.vmap(metrics.replacement_ratio)(own, new)
        found |= {f"replaced_rank_{rank + 1}": x for rank, x in enumerate(by_rank.T)}
        self._windows.append({name: np.asarray(value, float) for name, value in found.items()})
        self._steps.append((float(log.tbt.mean()), float(log.own_tbt.mean())))
        self._kept.append(kept)

    def measures(self) -> dict[str, Measure]:
        joined = {name: np.concatenate([w[name] for w in self._windows]) for name in _UNITS}
        for name in self._windows[0]:
            joined.setdefault(name, np.concatenate([w[name] for w in self._windows]))
        found = {name: _over_windows(name, values) for name, values in joined.items()}
        time, own = np.array(self._steps).T
        for name, values, unit in (
            ("tbt_us", 1e6 * time, "us, modelled"),
            ("original_tbt_us", 1e6 * own, "us, modelled"),
            ("speedup", own / time, "x, modelled"),
        ):
            found[name] = measured(values, unit, "batches")
        return found

    def neighbors(self, gate, layers, batch: int, seed: int) -> dict[str, Measure]:
        """Share of choices that depend on a token's neighbors, over layers."""
        values = []
        for index in range(len(layers)):
            scores = np.concatenate([kept.scores[index] for kept in self._kept])[:_DEALT]
            one = _for_scores(gate.layer(index), layers[index])
            key = jax.random.key(seed)
            scores, count = jnp.asarray(scores), min(batch, len(scores))
            found = metrics.neighbor_sensitivity(_Ids(one), scores, batch=count, key=key)
            values.append(float(found))
        return {"neighbor_sensitivity": measured(np.array(values), "of choices", "layers")}


_DEALT = 512
"""Tokens of a layer that neighbor sensitivity deals."""

_UNITS = {
    "kl": "nats",
    "ppl_ratio": "x",
    "top1_agreement": "%",
    "rms_shift": "% points",
    "top1_retention": "of tokens",
    "top_k_overlap": "of choices",
    "changed_ratio": "of tokens",
    "changed_weight_mass": "of weight",
}


def _over_windows(name: str, values: np.ndarray) -> Measure:
    """The mean as windows are merged: perplexities in logarithms, root mean squares in squares."""
    unit = _UNITS.get(name, "of tokens")
    if name == "ppl_ratio":
        mean, half = mean_and_interval(np.log(values))
        return Measure(float(np.exp(mean)), float(np.exp(mean) * half), unit, "windows")
    if name == "rms_shift":
        mean, half = mean_and_interval(values**2)
        root = float(np.sqrt(mean))
        return Measure(root, float(half / (2 * root)) if root else float(half), unit, "windows")
    return measured(values, unit, "windows")


class _Ids(eqx.Module):
    """A gate that only says which experts: a pytree, so that all layers share one program."""

    gate: HardwareAwareGate

    def __call__(self, scores: Array) -> Array:
        return self.gate(scores).expert_ids


def _for_scores(gate: HardwareAwareGate, layer: Layer) -> HardwareAwareGate:
    """The gate of a layer for scores instead of logits, with the model's own groups and bias."""
    bias = layer.rule.bias
    bias = None if bias is None else jnp.asarray(bias.detach().float().cpu().numpy())
    options = router_options(layer.rule.router)
    return dataclasses.replace(gate, score="none", selection_bias=bias, **options)


def _joined(log: GateLog, other: GateLog) -> GateLog:
    columns = ("tokens", "moved", "lost_favorites", "time", "own_time", "gate_seconds", "kl")
    log.add(**{name: getattr(other, name) for name in columns})
    log.left_alone += other.left_alone
    return log
