"""What the zoo's card measures: held-out loss, load skew, and how routing differs by document."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Float, Int
from moejax.zoo._corpus import Corpus, join
from moejax.zoo._experts import Gate
from moejax.zoo._model import ByteMoE, Record


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`.

    **Arguments:**

    - `loss`: nats per byte.
    - `num_tokens`: bytes the loss is a mean over.
    - `load`: share of the (token, choice) pairs that went to each expert, `[layers, experts]`.
    - `document_distance`: mean total-variation distance between the expert use of two documents,
        `[layers]`.
    - `shuffled_distance`: the same after the tokens were shuffled over the documents: what is left
        is sampling noise.
    - `report`: how the text compares with the list of files.
    """

    loss: float
    num_tokens: int
    load: np.ndarray
    document_distance: np.ndarray
    shuffled_distance: np.ndarray
    report: str

    @property
    def load_skew(self) -> np.ndarray:
        """Largest over mean expert load of each layer; 1 is balanced."""
        return self.load.max(axis=1) / self.load.mean(axis=1)

    @property
    def distance_ratio(self) -> np.ndarray:
        """Document distance over the shuffled control, of each layer."""
        return self.document_distance / self.shuffled_distance


def byte_losses(record: Record, targets: Int[Array, " tokens"]) -> Float[Array, " tokens"]:
    """Negative log probability of each target byte, in nats."""
    chosen = jnp.take_along_axis(record.logits, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(record.logits, axis=-1) - chosen


@eqx.filter_jit
def _run(model: ByteMoE, gate: Gate | None, windows: Int[Array, "batch length"]):
    record = model.forward(windows[:, :-1], gate)
    loss = byte_losses(record, windows[:, 1:].reshape(-1))
    return loss, record.expert_ids.astype(jnp.int16)


def evaluate(
    model: ByteMoE,
    corpus: Corpus,
    *,
    gate: Gate | None = None,
    length: int = 512,
    batch: int = 8,
    max_tokens: int | None = None,
    min_document: int = 1024,
    seed: int = 0,
) -> Evaluation:
    """Runs the model over a split, in windows that overlap by half.

    Each byte is predicted once, with at least `length / 2` bytes of context except at the start.

    **Arguments:**

    - `model`: the model; `gate` replaces its gate where given.
    - `corpus`: the text, e.g. `read("heldout")`.
    - `length`, `batch`: bytes of a window, windows at a time.
    - `max_tokens`: stop after that many bytes.
    - `min_document`: documents with fewer bytes count in the loss but not in the distances.
    - `seed`: of the shuffled control.
    """
    text = join(corpus)[: None if max_tokens is None else max_tokens + 1]
    document = np.repeat(
        np.arange(len(corpus.documents)), [len(d.data) + 1 for d in corpus.documents]
    )[: len(text)]
    stride = length // 2
    starts = np.arange(0, max(1, len(text) - 1 - stride), stride)
    padded = np.zeros(starts[-1] + length + 1, np.int32)
    padded[: min(len(text), len(padded))] = text[: len(padded)]
    # One compiled shape: the last batch is filled up with copies of the first window.
    filled = np.concatenate([starts, np.zeros(-len(starts) % batch, np.int64)])
    losses, choices = [], []
    for chunk in filled.reshape(-1, batch):
        windows = jnp.asarray(np.stack([padded[s : s + length + 1] for s in chunk]))
        loss, ids = _run(model, gate, windows)
        losses.append(np.asarray(loss).reshape(batch, length))
        choices.append(np.asarray(ids).reshape(ids.shape[0], batch, length, -1))
    loss_rows = np.concatenate(losses)[: len(starts)]
    id_rows = np.concatenate(choices, axis=1)[:, : len(starts)]
    # The first window counts whole, every later one by its second half.
    first, later = id_rows[:, 0, :stride], id_rows[:, :, stride:]
    loss = np.concatenate([loss_rows[0, :stride], loss_rows[:, stride:].ravel()])
    ids = np.concatenate([first, later.reshape(len(later), -1, later.shape[-1])], axis=1)
    scored = min(len(loss), len(text) - 1)
    loss, ids, document = loss[:scored], ids[:, :scored], document[:scored]
    used = _expert_use(ids, document, model.config.num_experts)
    sizes = np.bincount(document, minlength=len(used[0]))
    chosen = sizes >= min_document
    shuffled = np.random.default_rng(seed).permutation(document)
    control = _expert_use(ids, shuffled, model.config.num_experts)
    return Evaluation(
        float(loss.mean()),
        scored,
        used.sum(axis=1) / used.sum(axis=(1, 2))[:, None],
        _mean_distance(used[:, chosen]),
        _mean_distance(control[:, chosen]),
        corpus.report(),
    )


def _expert_use(ids: np.ndarray, document: np.ndarray, num_experts: int) -> np.ndarray:
    """How often each document used each expert, `[layers, documents, experts]`."""
    documents = int(document.max()) + 1
    cell = document[None, :, None] * num_experts + ids
    counts = [
        np.bincount(layer[ids_of_layer >= 0], minlength=documents * num_experts)
        for layer, ids_of_layer in zip(cell, ids)
    ]
    return np.stack(counts).reshape(len(ids), documents, num_experts)


def _mean_distance(counts: np.ndarray) -> np.ndarray:
    """Mean total-variation distance over all pairs of documents, `[layers]`."""
    share = counts / counts.sum(axis=-1, keepdims=True)
    pairs = np.triu_indices(share.shape[1], 1)
    return np.stack([0.5 * np.abs(s[pairs[0]] - s[pairs[1]]).sum(-1).mean() for s in share])
