"""A context in which a gate of moejax takes the place of a Hugging Face model's own choice."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from moejax._checks import check_non_negative
from moejax._status import Status, raise_if_bad
from moejax.capture import _families as families
from moejax.capture._bridge import to_jax, to_torch
from moejax.capture._calls import Call, CallTracker
from moejax.capture._choose import Choices, Program, choose
from moejax.capture._families import Layer, check_output, find_layers
from moejax.capture._fit import check_fit
from moejax.capture._log import GateLog, Kept
from moejax.capture._reference import Reference
from moejax.capture._versions import require_torch
from moejax.gating import HardwareAwareGate, LayerCosts


@contextlib.contextmanager
def gated(
    model: Any,
    gate: HardwareAwareGate,
    decode_only: bool = True,
    max_tokens: int | None = None,
    *,
    decode_from: int | None = None,
    kl: bool = False,
    costs: LayerCosts | None = None,
    rest_time: float = 0.0,
    keep_choices: bool = False,
    end_ids: Iterable[int] | None = None,
) -> Iterator[GateLog]:
    """Chooses experts by `gate` instead of the model's own router, until the context is left.

    Tokens whose experts stay keep the model's own numbers, to the bit; those that move are weighed
    by the model's own rule. Padding is neither routed nor counted. Equal scores fall as in the
    model, so that a gate without costs changes nothing.

    ```python
    gate = capture.gate_for(model, share, r_comp=-3e3, r_comm=-0.01, token_time=1e-6, protect=1)
    with capture.gated(model, gate) as log:
        model.generate(**inputs)
    print(log.summary())
    ```

    **Arguments:**

    - `model`: of one of the families in `moejax.capture.FAMILIES`.
    - `gate`: for one layer, or with a leading axis of the model's MoE layers. Score, bias and
        groups are the model's: a gate that states others is refused. `gate_for` makes one.
    - `decode_only`: prompts keep the model's own choices. Otherwise all tokens of a call are one
        batch of the gate, row after row.
    - `max_tokens`: calls (with `decode_from`, steps) of more real tokens keep the model's own
        choices, too, as with the `max_rows` of a gate.
    - `decode_from`: take prompts for text that is decoded step by step from this position on: the
        tokens at one position of all rows are one batch. Attention only looks back, so one call
        then shows what decoding that text would. Rows without left padding.
    - `kl`: run every gated call again without the gate, for `log.kl`: twice the time, and a second
        cache.
    - `costs`, `rest_time`: of the modelled time: what a layer costs a machine, by default the
        computation of the busiest node by the gate's own `token_time`, and s of a step outside MoE
        layers.
    - `keep_choices`: keep choices and scores in `log.kept`, for metrics.
    - `end_ids`: as `record`.

    **Raises:** `ValueError` for a model without known routers or one that trains with gradient
    checkpointing, a gate that does not fit, options out of range, and later, from the model's call,
    for scores that are not finite.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: allowed is 1 or more, or None")
    if decode_from is not None and decode_from < 0:
        raise ValueError(f"decode_from = {decode_from}: allowed is 0 or more, or None")
    if costs is not None and (not isinstance(costs, LayerCosts) or costs.token_time.ndim):
        raise ValueError(f"costs = {costs}: allowed is a LayerCosts of one setting, or None")
    check_non_negative("gated", "rest_time", rest_time)
    layers = find_layers(model)
    # The models' own attribute: the methods on top of it change their names between versions.
    if model.training and any(getattr(x, "gradient_checkpointing", False) for x in model.modules()):
        raise ValueError(
            "gated: the model trains with gradient checkpointing, whose backward pass would choose "
            "without the gate: allowed is a model without it, or eval()"
        )
    check_fit(gate, layers)
    run = _Gating(Program.of(gate, costs), layers, decode_only, max_tokens, decode_from)
    run.log = GateLog([layer.number for layer in layers], gate.top_k, rest_time)
    run.reference = Reference(model) if kl else None
    run.keep = keep_choices
    run.tracker = CallTracker(model, end_ids, before=run.begin, after=run.end)
    with run.tracker.hooks(), contextlib.ExitStack() as stack:
        if run.reference is not None:
            stack.callback(run.reference.close)
        for index, layer in enumerate(layers):
            hook = run.hook(index, layer)
            stack.callback(layer.router.register_forward_hook(hook).remove)
        yield run.log


class _Gating:
    """The hooks' state: which rows of the running call are gated, and what layers did so far."""

    log: GateLog
    reference: Reference | None
    tracker: CallTracker
    keep: bool

    def __init__(self, program, layers, decode_only, max_tokens, decode_from):
        self._program, self._layers = program, layers
        self._decode_only, self._max_tokens = decode_only, max_tokens
        self._decode_from = decode_from
        self._valid: np.ndarray | None = None
        self._found: list[tuple[Choices, float]] = []
        self._kept: list[Kept] = []
        self._compiled: set[tuple[int, ...]] = set()
        self._compiling = 0.0

    def begin(self, call: Call) -> None:
        self._found, self._kept = [], []
        self._valid = self._batches(call)
        if self.reference is not None:
            self.reference.before(call, self._valid is not None)

    def _batches(self, call: Call) -> np.ndarray | None:
        """Real tokens of the gate's batches [columns, rows]; None for a call to leave alone."""
        if call.is_decode or (not self._decode_only and self._decode_from is None):
            valid = call.mask.reshape(1, -1)
        elif self._decode_from is not None:
            position = call.past + np.arange(call.mask.shape[1])
            valid = call.mask.T & (position >= self._decode_from)[:, None]
        else:
            return None
        if self._max_tokens is not None:
            valid = valid & (valid.sum(1, keepdims=True) <= self._max_tokens)
        return valid if valid.any() else None

    def hook(self, index: int, layer: Layer):
        number = np.int32(index)

        def replace(module: Any, args: tuple, output: Any) -> Any:
            if self.tracker.current is None or self._valid is None or len(self._found) != index:
                return None
            started, self._compiling = time.perf_counter(), 0.0
            logits, weights, ids = check_output(output, layer)
            with require_torch().no_grad():
                moved = self._choose(number, layer, logits.detach(), weights.detach(), ids)
            if moved is not None:
                rows, new_ids = moved
                score = families.scores(layer.rule, logits[rows])
                new_weights = families.weights(layer.rule, logits[rows], score, new_ids)
                weights = weights.index_put((rows,), new_weights.to(weights.dtype))
                ids = ids.index_put((rows,), new_ids)
            self._found[-1] = (self._found[-1][0], time.perf_counter() - started - self._compiling)
            return None if moved is None else (logits, weights, ids)

        return replace

    def _choose(self, number, layer: Layer, logits, weights, ids) -> tuple[Any, Any] | None:
        """(rows that moved, their experts), or None where none did."""
        torch = require_torch()
        valid = self._valid
        assert valid is not None
        score = families.scores(layer.rule, logits)
        compared = _own_first(families.selection(layer.rule, score), ids)
        order = compared.gather(1, ids).argsort(dim=1, descending=True, stable=True)
        own = ids.gather(1, order)
        columns = lambda x: _columns(x, valid.shape)
        rows = _room(*valid.shape)
        room = np.zeros((len(valid), rows - valid.shape[1]), bool)
        inputs = (
            to_jax(_filled(columns(score), rows)),
            to_jax(_filled(columns(compared), rows)),
            to_jax(_filled(columns(own.int()), rows)),
            np.concatenate([valid, room], axis=1),
        )
        if inputs[0].shape not in self._compiled:
            # Once for the compiler, so that the log's clock sees the gate alone.
            started = time.perf_counter()
            jax.block_until_ready(choose(*self._program, number, *inputs))
            self._compiled.add(inputs[0].shape)
            self._compiling = time.perf_counter() - started
        found = choose(*self._program, number, *inputs)
        if int(found.status) != Status.OK:
            raise_if_bad(layer.name, found.status)
        chosen = to_torch(found.expert_ids, ids.device)[:, : valid.shape[1]]
        self._found.append((found, 0.0))
        real = torch.from_numpy(np.ascontiguousarray(valid)).to(ids.device)
        lost = (columns(own)[..., None] != chosen[:, :, None, :]).all(-1).any(-1) & real
        if self.keep:
            picked = real.nonzero(as_tuple=True)
            weight = columns(weights.gather(1, order)).float()
            arrays = (columns(own), weight, chosen, columns(score))
            self._kept.append(Kept(*(x[picked].cpu().numpy() for x in arrays)))
        column, row = lost.nonzero(as_tuple=True)
        if not len(row):
            return None
        flat = row if len(valid) == 1 else row * len(valid) + column
        return flat, chosen[column, row].to(ids.dtype)

    def end(self, call: Call, output: Any) -> None:
        valid, log = self._valid, self.log
        kl = np.nan
        if self.reference is not None:
            shape = call.mask.shape
            gated = None if valid is None else valid.reshape(shape) if len(valid) == 1 else valid.T
            kl = self.reference.after(call, output, gated)
        if valid is None:
            log.left_alone += call.num_tokens
            return
        if len(self._found) < len(self._layers):
            missing = self._layers[len(self._found)].name
            raise ValueError(f"gated: {missing} did not run in this call: a fused kernel instead?")
        log.left_alone += call.num_tokens - int(valid.sum())
        steps = np.flatnonzero(valid.any(1))
        tokens = valid.sum(1)[steps]
        stack = lambda name: np.stack(
            [np.asarray(getattr(found, name))[steps] for found, _ in self._found], axis=1
        )
        seconds = np.array([seconds for _, seconds in self._found]) / len(steps)
        log.add(
            tokens=tokens,
            moved=tokens[:, None] * log.top_k - stack("kept"),
            lost_favorites=tokens[:, None] - stack("favorites"),
            time=stack("time"),
            own_time=stack("own_time"),
            gate_seconds=np.broadcast_to(seconds, (len(steps), len(seconds))),
            kl=np.full(len(steps), kl),
        )
        if self.keep:
            log.kept.append(Kept(*(np.stack(parts) for parts in zip(*self._kept))))


def _columns(x: Any, shape: tuple[int, ...]) -> Any:
    """[tokens, ...] of a call, row after row, as [columns, rows, ...]."""
    if shape[0] == 1:
        return x[None]
    return x.view(shape[1], shape[0], *x.shape[1:]).transpose(0, 1).contiguous()


def _room(columns: int, rows: int) -> int:
    """Rows that the gate is compiled for: whole prompts differ in length, and few sizes do."""
    return rows if columns > 1 or rows <= 16 else 1 << (rows - 1).bit_length()


def _filled(x: Any, rows: int) -> Any:
    """[columns, rows, ...] with zeros up to so many rows."""
    missing = rows - x.shape[1]
    return x if not missing else require_torch().nn.functional.pad(x, (0, 0, 0, missing))


def _own_first(compared: Any, ids: Any) -> Any:
    """`compared` with the model's own choices ahead of what they tie with, by one rounding step."""
    torch = require_torch()
    others = compared.scatter(1, ids, float("-inf")).max(dim=1, keepdim=True).values
    own = compared.gather(1, ids)
    ahead = torch.nextafter(others, torch.full_like(others, float("inf")))
    return compared.scatter(1, ids, torch.where(own > others, own, ahead))
