"""A context that turns what the routers of a Hugging Face model do into a routing trace."""

import contextlib
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from moejax._checks import lookup
from moejax.capture._calls import Call, CallTracker
from moejax.capture._families import Layer, check_output, find_layers
from moejax.capture._store import FileStore, MemoryStore
from moejax.capture._versions import require_torch
from moejax.routing import RoutingTrace


Phase: TypeAlias = Literal["all", "prompt", "decode"]
PHASES = {"all": "every token", "prompt": "tokens of prompts", "decode": "tokens of decode steps"}


class Recording:
    """What `record` has recorded. Tokens may still be added while the context is open.

    Fields: `num_tokens`, kept; `dropped`, beyond `max_tokens`; `layer_numbers`, of the MoE layers
    among all layers of the model; `num_experts`, `top_k`, `model`, its name; `seconds`, spent in
    recording.
    """

    def __init__(
        self,
        layers: list[Layer],
        model: str | None,
        *,
        max_tokens: int | None,
        logits: bool,
        spill: str | Path | None,
    ):
        self.layer_numbers = [layer.number for layer in layers]
        self.num_experts, self.top_k = layers[0].rule.num_experts, layers[0].rule.top_k
        self.model = model
        self.num_tokens = self.dropped = 0
        self.seconds = 0.0
        self._max_tokens, self._logits = max_tokens, logits
        self._store = MemoryStore() if spill is None else FileStore(spill)

    def trace(self, phase: Phase = "all") -> RoutingTrace:
        """The recorded tokens, sequence after sequence, experts of a token strongest first.

        **Arguments:**

        - `phase`: `"prompt"` or `"decode"` marks the other tokens as not valid, so that decode
            batches and statistics leave them out. Padding is in no phase and not in the trace.

        **Raises:** `ValueError` where nothing was recorded.
        """
        columns, order = self._sorted()
        layers_first = lambda name: np.moveaxis(columns[name][order], 0, 1)
        return RoutingTrace(
            layers_first("expert_ids").astype(np.int32),
            self.num_experts,
            weights=layers_first("weights"),
            logits=layers_first("logits") if self._logits else None,
            valid=self._valid(columns["decode"][order], phase),
            sequence_start=_starts(columns["sequence"][order]),
            decode=columns["decode"][order],
            model=self.model,
        )

    def save(self, path: str | Path, phase: Phase = "all") -> None:
        """Writes the trace as npz for `moejax.routing.load`, one layer in memory at a time.

        **Arguments**, **raises:** as `trace`.
        """
        columns, order = self._sorted()
        decode = columns["decode"][order]
        small = dict(
            valid=self._valid(decode, phase),
            decode=decode,
            sequence_start=_starts(columns["sequence"][order]),
            num_experts=np.asarray(self.num_experts),
            layer_numbers=np.asarray(self.layer_numbers),
        )
        small |= {} if self.model is None else {"model": np.asarray(self.model)}
        large = ["expert_ids", "weights"] + ["logits"] * self._logits
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, array in small.items():
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, array)
            for name in large:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    _write_layers_first(file, columns[name], order)

    def _sorted(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """(columns, order of the tokens: by sequence, then as they came)."""
        if not self.num_tokens:
            raise ValueError("nothing was recorded: the model was not called inside the context")
        columns = self._store.columns()
        return columns, np.argsort(columns["sequence"], kind="stable")

    def _valid(self, decode: np.ndarray, phase: Phase) -> np.ndarray:
        lookup("phase", phase, PHASES)
        return np.ones_like(decode) if phase == "all" else decode == (phase == "decode")

    def _add(self, call: Call, outputs: list[tuple[Any, Any, Any]]) -> None:
        started = time.perf_counter()
        rows = np.flatnonzero(call.mask)
        room = len(rows) if self._max_tokens is None else self._max_tokens - self.num_tokens
        kept = rows[:room]
        self.dropped += len(rows) - len(kept)
        self.num_tokens += len(kept)
        if len(kept):
            columns = _to_numpy(outputs, kept, self.num_experts, self._logits)
            columns["sequence"] = call.sequence[kept // call.mask.shape[1]]
            columns["decode"] = np.full(len(kept), call.is_decode)
            self._store.append(columns)
        self.seconds += time.perf_counter() - started


@contextlib.contextmanager
def record(
    model: Any,
    *,
    max_tokens: int | None = None,
    logits: bool = True,
    spill: str | Path | None = None,
    end_ids: Iterable[int] | None = None,
) -> Iterator[Recording]:
    """Records the routing of every token that a `transformers` MoE model sees inside.

    Plain calls, `generate` and evaluation harnesses all work: what counts are the model's own
    calls. Padding is left out by their attention mask. Nothing of the model changes.

    ```python
    with capture.record(model, max_tokens=100_000) as recording:
        model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"))
    trace = recording.trace("decode")
    ```

    **Arguments:**

    - `model`: of one of the families in `moejax.capture.FAMILIES`.
    - `max_tokens`: keep so many tokens and only count the others. A token of L layers takes
        4 L (experts + 1.5 top_k) bytes with logits.
    - `logits`: keep router logits, which is most of the memory.
    - `spill`: a folder for temporary files instead of memory.
    - `end_ids`: tokens that end a row of a decode step: `generate` goes on feeding a row that is
        over until all rows are, and the mask does not say so. None: the model's end and padding
        tokens; `()`: every token counts.

    **Raises:** `ValueError` for a model without known routers, a version of `transformers` outside
    the supported range, and later, from the model's call, for attention masks that hide the padding
    and for routers that did not run.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: allowed is 1 or more, or None")
    layers = find_layers(model)
    recording = Recording(layers, _name(model), max_tokens=max_tokens, logits=logits, spill=spill)
    seen: dict[int, tuple[Any, Any, Any]] = {}

    def finish(call: Call, output: Any) -> None:
        missing = [layer.name for index, layer in enumerate(layers) if index not in seen]
        if missing:
            raise ValueError(
                f"record: {missing[0]} did not run in this call ({len(missing)} of {len(layers)} "
                "routers): a fused kernel in its place?"
            )
        recording._add(call, [seen[index] for index in range(len(layers))])

    tracker = CallTracker(model, end_ids, before=lambda call: seen.clear(), after=finish)

    def watch(index: int, layer: Layer):
        def hook(module: Any, args: tuple, output: Any) -> None:
            if tracker.current is not None:
                seen.setdefault(index, check_output(output, layer))

        return hook

    with tracker.hooks(), contextlib.ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.router.register_forward_hook(watch(index, layer)).remove)
        yield recording


def _name(model: Any) -> str | None:
    name = str(getattr(model.config, "_name_or_path", "") or "")
    return Path(name).name or getattr(model.config, "model_type", None)


def _starts(sequence: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.diff(sequence, prepend=-1)).astype(np.int32)


def _to_numpy(outputs, kept: np.ndarray, num_experts: int, logits: bool) -> dict[str, np.ndarray]:
    """Columns [tokens, layers, ...] of these rows; one transfer for all layers."""
    torch = require_torch()
    device = outputs[0][0].device
    rows = torch.from_numpy(kept).to(device)
    pick = lambda part: torch.stack([out[part].detach().to(device)[rows] for out in outputs], 1)
    weights, ids = pick(1).float(), pick(2)
    # Not every model sorts its choices; the metrics want the strongest first.
    order = weights.argsort(dim=-1, descending=True, stable=True)
    dtype = np.int16 if num_experts < 2**15 else np.int32
    columns = dict(
        expert_ids=ids.gather(-1, order).cpu().numpy().astype(dtype),
        weights=weights.gather(-1, order).cpu().numpy(),
    )
    return columns | ({"logits": pick(0).float().cpu().numpy()} if logits else {})


def _write_layers_first(file: Any, column: np.ndarray, order: np.ndarray) -> None:
    """An array [layers, tokens, ...] in npy format from `column` [tokens, layers, ...]."""
    tokens, layers = column.shape[:2]
    header = dict(
        descr=np.lib.format.dtype_to_descr(column.dtype),
        fortran_order=False,
        shape=(layers, tokens, *column.shape[2:]),
    )
    np.lib.format.write_array_header_1_0(file, header)
    for layer in range(layers):
        file.write(np.ascontiguousarray(column[:, layer][order]).tobytes())
