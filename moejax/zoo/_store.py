"""Weights and trace as package data: how they are written, and how they come back."""

import functools
import io
import json
from importlib import resources
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax.routing import RoutingTrace
from moejax.zoo._corpus import Corpus, join, read
from moejax.zoo._model import ByteMoE, ZooConfig


NAME = "zoo"
# Tokens of a recorded sequence: `CONTEXT` bytes before them are run but not recorded, so that every
# recorded token is routed as in the middle of a decode.
CONTEXT, RECORDED = 256, 64
# Router logits are stored in float16 on a grid this fine, which compresses better.
LOGIT_STEP = 1 / 128


def round_to_bf16(model: ByteMoE) -> ByteMoE:
    """The model with every weight at the nearest bfloat16, in its own dtype: what is shipped."""
    nearest = lambda a: a.astype(jnp.bfloat16).astype(a.dtype) if eqx.is_array(a) else a
    return jax.tree.map(nearest, model)


def save_weights(model: ByteMoE, path: Path) -> None:
    """Writes configuration and bfloat16 weights as an npz (the bit patterns as uint16)."""
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    arrays: dict[str, Any] = {
        f"leaf_{i:03d}": np.asarray(leaf.astype(jnp.bfloat16)).view(np.uint16)
        for i, leaf in enumerate(leaves)
    }
    config = json.dumps({name: getattr(model.config, name) for name in _fields()})
    np.savez(path, config=config, **arrays)


def load_weights(file) -> ByteMoE:
    """The model that `save_weights` wrote, in JAX's default float dtype.

    **Arguments:**

    - `file`: path or open binary file.
    """
    with np.load(file, allow_pickle=False) as stored:
        given = json.loads(str(stored["config"]))
        config = ZooConfig(**{name: _tuples(value) for name, value in given.items()})
        # The structure alone: nothing is drawn, and the leaves come from the file.
        like = eqx.filter_eval_shape(ByteMoE, config, key=jax.random.key(0))
        structure = jax.tree.structure(like)
        leaves = [
            jnp.asarray(stored[f"leaf_{i:03d}"].view(jnp.bfloat16)).astype(jnp.result_type(float))
            for i in range(structure.num_leaves)
        ]
    return jax.tree.unflatten(structure, leaves)


def _fields() -> list[str]:
    return list(ZooConfig.__dataclass_fields__)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _data(name: str) -> io.BytesIO:
    return io.BytesIO((resources.files("moejax.zoo") / "data" / name).read_bytes())


def load() -> ByteMoE:
    """The shipped model. Read on the first call, then shared.

    **Returns:** a `ByteMoE`; its weights are bfloat16 values in JAX's default float dtype.
    """
    return _load(jnp.result_type(float))


@functools.cache
def _load(dtype: np.dtype) -> ByteMoE:
    del dtype  # one model for each setting of JAX's x64 switch, which `load_weights` follows
    return load_weights(_data("weights.npz"))


def trace() -> RoutingTrace:
    """What the shipped model's routers did on held-out files, with router logits.

    Every sequence is 64 consecutive bytes from the middle of a held-out file, after 256 bytes of
    context that are not part of the trace. Logits are rounded to steps of 1/128; the weights are
    the gate's softmax over the chosen experts' logits.
    """
    with np.load(_data("trace.npz"), allow_pickle=False) as stored:
        ids = stored["expert_ids"].astype(np.int32)
        logits = stored["logits"].astype(np.float32)
        starts, num_experts = stored["sequence_start"], int(stored["num_experts"])
    chosen = np.take_along_axis(logits, ids, axis=-1)
    raised = np.exp(chosen - chosen.max(axis=-1, keepdims=True))
    return RoutingTrace(
        ids,
        num_experts,
        weights=raised / raised.sum(axis=-1, keepdims=True),
        logits=logits,
        sequence_start=starts,
        model=NAME,
    )


def trace_sources() -> tuple[tuple[str, int], ...]:
    """Held-out file and offset of the first recorded byte, for each sequence of `trace()`."""
    with np.load(_data("trace.npz"), allow_pickle=False) as stored:
        return tuple(zip(map(str, stored["document"]), map(int, stored["offset"])))


def heldout(max_tokens: int | None = None) -> np.ndarray:
    """Byte values of the held-out files that the running Python has, a zero byte before each.

    They are the shipped model's own held-out text where `read("heldout").matches`;
    `read("heldout").report()` says which files differ.

    **Arguments:**

    - `max_tokens`: at most that many bytes from the start.

    **Returns:** int32, shape `[tokens]`.

    **Raises:** `ValueError` for less than one token.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: allowed is None, or 1 or more")
    return join(read("heldout"))[:max_tokens].astype(np.int32)


def record_trace(model: ByteMoE, corpus: Corpus, path: Path, sequences: int = 264) -> int:
    """Records the routing of evenly spaced windows of the documents and writes it as an npz.

    `moejax.routing.load` reads the file too. **Returns:** the number of sequences.
    """
    places = _places(corpus, sequences)
    texts = {d.name: d.data for d in corpus.documents}
    span = CONTEXT + RECORDED
    windows = np.stack(
        [np.frombuffer(texts[n], np.uint8)[at - CONTEXT : at + RECORDED] for n, at in places]
    ).astype(np.int32)
    ids, logits = [], []
    forward = eqx.filter_jit(lambda model, rows: model.forward(rows))
    for chunk in np.array_split(windows, -(-len(windows) // 24)):
        record = forward(model, chunk)
        for kept, array in ((ids, record.expert_ids), (logits, record.router_logits)):
            rows = np.asarray(array).reshape(len(array), len(chunk), span, -1)
            kept.append(rows[:, :, CONTEXT:])
    join_rows = lambda parts: np.concatenate(parts, axis=1).reshape(
        len(parts[0]), len(places) * RECORDED, -1
    )
    grid = np.round(join_rows(logits) / LOGIT_STEP) * LOGIT_STEP
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            expert_ids=join_rows(ids).astype(np.int8),
            logits=grid.astype(np.float16),
            sequence_start=np.arange(len(places), dtype=np.int32) * RECORDED,
            num_experts=model.config.num_experts,
            model=NAME,
            document=np.array([name for name, _ in places]),
            offset=np.array([at for _, at in places], np.int32),
        )
    return len(places)


def _places(corpus: Corpus, sequences: int) -> list[tuple[str, int]]:
    """Documents and offsets of about even spacing over all the text, none across two files."""
    usable = [d for d in corpus.documents if len(d.data) >= CONTEXT + RECORDED]
    room = np.array([len(d.data) - CONTEXT - RECORDED for d in usable])
    ends = np.cumsum(room + 1)
    positions = (np.arange(sequences) + 0.5) / sequences * ends[-1]
    which = np.searchsorted(ends, positions, side="right")
    inside = (positions - (ends - room - 1)[which]).astype(int)
    return [(usable[w].name, CONTEXT + int(at)) for w, at in zip(which, inside)]
