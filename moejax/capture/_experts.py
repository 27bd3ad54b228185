"""Fidelity inside the layers of a Hugging Face model: its experts, run once more."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax import metrics
from moejax.capture import _families as families
from moejax.capture._bridge import to_jax
from moejax.capture._families import Layer, check_output
from moejax.capture._log import Measure, measured
from moejax.capture._versions import require_torch


class ExpertProbe:
    """Hooks on the experts of each layer: how far a changed choice moves their output, and how
    alike experts are.

    **Arguments:**

    - `layers`: of a model; those whose experts are not where they should be are left out.
    - `rows`: tokens of each layer that all experts are run on; 0 for no probe at all.
    """

    def __init__(self, layers: list[Layer], rows: int):
        self._layers = [layer for layer in layers if layer.experts is not None] if rows else []
        self._rows = rows
        self._alike: dict[int, float] = {}
        self._changes: list[Any] = []

    @contextlib.contextmanager
    def original(self) -> Iterator[None]:
        """Around a call of the ungated model: all experts on `rows` tokens, the first time."""
        with contextlib.nullcontext() if self._alike else self._hooks(self._compare):
            yield

    @contextlib.contextmanager
    def adjusted(self, start: int, length: int) -> Iterator[None]:
        """Around the same call [windows, length] of the gated model, whose positions from `start`
        count; outside `gated`, to see the router's own choice."""
        self._start, self._length = start, length
        with self._hooks(self._change):
            yield

    @contextlib.contextmanager
    def _hooks(self, use: Any) -> Iterator[None]:
        seen: dict[int, Any] = {}

        def of_router(index: int, layer: Layer):
            return lambda module, args, out: seen.update({index: check_output(out, layer)})

        def of_experts(index: int, layer: Layer):
            return lambda module, args, out: use(index, layer, seen[index], args, out)

        with contextlib.ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                for module, make in ((layer.router, of_router), (layer.experts, of_experts)):
                    handle = module.register_forward_hook(make(index, layer))
                    stack.callback(handle.remove)
            yield

    def _compare(self, index: int, layer: Layer, own, args, output) -> None:
        """Substitutability of the experts of a layer, from outputs of all on a few tokens."""
        torch = require_torch()
        hidden = args[0]
        picked = torch.linspace(0, len(hidden) - 1, min(self._rows, len(hidden))).long()
        rows = hidden[picked.to(hidden.device)]
        logits = own[0][picked.to(hidden.device)]
        score = families.scores(layer.rule, logits)
        one = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        outputs = []
        for expert in range(layer.rule.num_experts):
            ids = torch.full((len(rows), 1), expert, dtype=own[2].dtype, device=rows.device)
            outputs.append(layer.experts.forward(rows, ids, one).float())
        top_k = layer.rule.top_k
        if 2 * top_k <= layer.rule.num_experts:
            alike = metrics.substitutability(
                to_jax(score), to_jax(torch.stack(outputs, 1)), top_k=top_k
            )
            self._alike[index] = float(jnp.mean(alike))

    def _change(self, index: int, layer: Layer, own, args, output) -> None:
        """Change of the experts' output where the gate moved a choice of a token."""
        hidden, ids, _ = args
        moved = (ids.sort(dim=1).values != own[2].sort(dim=1).values).any(1)
        twin = output.clone()
        if moved.any():
            rows = moved.nonzero()[:, 0]
            twin[rows] = layer.experts.forward(hidden[rows], own[2][rows], own[1][rows])
        counted = jnp.arange(len(hidden)) % self._length >= self._start
        before, after = to_jax(twin.float()), to_jax(output.float())
        self._changes.append(metrics.moe_output_change(before, after, counted))

    def measures(self) -> dict[str, Measure]:
        """Over layers and batches: `output_change`, its 95th percentile and maximum; over layers:
        `substitutability`."""
        found = {}
        for part, ending in enumerate(("", "_p95", "_max") if self._changes else ()):
            values = np.array([float(change[part]) for change in self._changes])
            found[f"output_change{ending}"] = measured(values, "of the norm", "layers and batches")
        if self._alike:
            alike = np.array(list(self._alike.values()))
            found["substitutability"] = measured(alike, "cosine", "layers")
        return found
