"""Which tokens a forward call holds. Only the model sees it: its routers get rows without a mask.

A call with an empty cache, or none, is a prompt and begins new sequences. One that brings a cache
continues the sequences in it: with one token of each it is a decode step, with several the rest of
a prompt that came in pieces.
"""

import contextlib
import dataclasses
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from moejax.capture._versions import require_torch


@dataclasses.dataclass
class Call:
    """One forward call. Fields: `mask` [rows, length], real tokens; `sequence` [rows], numbers that
    count up from 0; `past`, tokens in the cache; `is_decode`; `kwargs`, all arguments by name."""

    mask: np.ndarray
    sequence: np.ndarray
    past: int
    is_decode: bool
    kwargs: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return int(self.mask.sum())


@dataclasses.dataclass
class _Rows:
    sequence: np.ndarray
    alive: np.ndarray


class CallTracker:
    """Follows the calls of a model through hooks on it and on the model inside its head.

    **Arguments:**

    - `model`: a `transformers` model.
    - `end_ids`: token ids after which a row of a decode step is over, though `generate` keeps
        feeding it while other rows go on; None for the end and padding ids of the model.
    - `before`, `after`: called with each call, `after` with its output too; not when it failed.
    """

    _pauses = 0

    def __init__(
        self,
        model: Any,
        end_ids: Iterable[int] | None = None,
        before: Callable[[Call], None] = lambda call: None,
        after: Callable[[Call, Any], None] = lambda call, output: None,
    ):
        self.call: Call | None = None
        self._model = model
        self._end_ids = _end_ids(model) if end_ids is None else sorted(set(end_ids))
        self._before, self._after = before, after
        self._owner: Any = None
        self._rows: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Hooks in place while inside."""
        modules = {id(m): m for m in (self._model, getattr(self._model, "base_model", self._model))}
        handles = []
        try:
            for module in modules.values():
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(
                    module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
                )
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.call = self._owner = None

    @classmethod
    @contextlib.contextmanager
    def paused(cls) -> Iterator[None]:
        """Calls made inside are not seen, by any tracker."""
        cls._pauses += 1
        try:
            yield
        finally:
            cls._pauses -= 1

    @property
    def current(self) -> Call | None:
        """The call that is running, unless paused."""
        return None if self._pauses else self.call

    def _enter(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._pauses or self._owner is not None:
            return
        self._owner = module
        if args:
            names = inspect.signature(module.forward).parameters
            kwargs = dict(zip(names, args)) | kwargs
        self.call = self._describe(kwargs)
        self._before(self.call)

    def _leave(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if self._pauses or module is not self._owner:
            return
        call, self.call, self._owner = self.call, None, None
        if output is None or call is None:  # the call failed: its error is on its way
            return
        cache = cache_of(output)
        if cache is not None and cache not in self._rows:
            self._rows[cache] = _Rows(call.sequence, np.ones(len(call.sequence), bool))
        self._after(call, output)

    def _describe(self, kwargs: dict[str, Any]) -> Call:
        tokens: Any = kwargs.get("input_ids")
        given = kwargs["inputs_embeds"] if tokens is None else tokens
        shape = tuple(given.shape[:2])
        cache = cache_of(kwargs)
        past = 0 if cache is None else int(cache.get_seq_length())
        mask = _mask(kwargs.get("attention_mask"), shape)
        rows = self._rows.get(cache) if past else None
        if rows is None or len(rows.sequence) != shape[0]:
            numbers = np.fromiter(itertools.islice(self._numbers, shape[0]), np.int64)
            rows = _Rows(numbers, np.ones(shape[0], bool))
            if cache is not None:
                self._rows[cache] = rows
        is_decode = past > 0 and shape[1] == 1
        if is_decode and tokens is not None:
            rows.alive &= ~np.isin(tokens.detach().cpu().numpy()[:, 0], self._end_ids)
        if past:
            mask = mask & rows.alive[:, None]
        return Call(mask, rows.sequence, past, is_decode, kwargs)


def cache_of(holder: Any) -> Any:
    """The cache among arguments or in an output, whose name has changed between versions."""
    get = holder.get if isinstance(holder, dict) else lambda name: getattr(holder, name, None)
    found = (get(name) for name in ("cache", "past_key_values"))
    return next((cache for cache in found if hasattr(cache, "get_seq_length")), None)


def _mask(given: Any, shape: tuple[int, ...]) -> np.ndarray:
    if given is None:
        return np.ones(shape, bool)
    is_plain = isinstance(given, require_torch().Tensor) and given.ndim == 2
    if is_plain and given.shape[0] == shape[0] and given.shape[1] >= shape[1]:
        return given[:, -shape[1] :].detach().cpu().numpy() != 0
    what = f"shape {tuple(given.shape)}" if hasattr(given, "shape") else type(given).__name__
    raise ValueError(
        f"attention_mask has {what}: allowed is [{shape[0]}, {shape[1]} or more], from which "
        "padding can be told (a static cache hides it)"
    )


def _end_ids(model: Any) -> list[int]:
    config = getattr(model, "generation_config", None) or model.config
    found: list[int] = []
    for name in ("eos_token_id", "pad_token_id"):
        value = getattr(config, name, None)
        found += [] if value is None else [value] if isinstance(value, int) else list(value)
    return sorted(set(found))
