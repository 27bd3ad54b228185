"""The ungated model beside the gated one, on the same tokens: what the gate costs in KL."""

import copy
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax import metrics
from moejax.capture._bridge import to_jax
from moejax.capture._calls import Call, CallTracker, cache_of
from moejax.capture._versions import require_torch


_REARRANGE = (
    *("reorder_cache", "crop", "reset"),
    *("batch_repeat_interleave", "batch_select_indices"),
)
"""Methods of a cache that change rows or tokens without a call of the model."""


def _both(first: Any, second: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return call


class Reference:
    """Runs every gated call a second time without the gate, on a cache of its own.

    That cache is copied before the first gated call on it, so a decode step is compared with a
    model that was never gated but has read the same tokens. Where beams change places or tokens are
    taken back in the model's cache, they are in the copy, too.
    """

    def __init__(self, model: Any):
        self._model = model
        self._shadows: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Leaves the model's caches as they were."""
        for cache in self._shadows:
            for name in _REARRANGE:
                vars(cache).pop(name, None)

    def _follow(self, cache: Any, shadow: Any) -> None:
        self._shadows[cache] = shadow
        for name in _REARRANGE:
            if hasattr(cache, name):
                setattr(cache, name, _both(getattr(cache, name), getattr(shadow, name)))

    def before(self, call: Call, is_gated: bool) -> None:
        """To be called before a forward call."""
        cache = cache_of(call.kwargs)
        if is_gated and cache is not None and cache not in self._shadows:
            self._follow(cache, copy.deepcopy(cache))

    def after(self, call: Call, output: Any, gated: np.ndarray | None) -> float:
        """Mean KL over the tokens `gated` [rows, length]; NaN where the gate left all alone."""
        torch = require_torch()
        is_gated, cache = gated is not None, cache_of(call.kwargs)
        if not is_gated and (cache is None or cache not in self._shadows):
            return np.nan
        changes = {}
        if cache is not None:
            name = "cache" if call.kwargs.get("cache") is cache else "past_key_values"
            changes[name] = self._shadows[cache]
        with CallTracker.paused(), torch.no_grad():
            twin = self._model(**(call.kwargs | changes))
        made = cache_of(output)
        if made is not None and made not in self._shadows:
            self._follow(made, cache_of(twin))
        if gated is None:
            return np.nan
        if getattr(output, "logits", None) is None:
            raise ValueError("kl = True: allowed for models with a head (their output has logits)")
        width = output.logits.shape[1]  # `generate` asks for the last position of a prompt only
        mask = jnp.asarray(gated[:, -width:])
        return float(metrics.kl(to_jax(twin.logits), to_jax(output.logits), mask))
