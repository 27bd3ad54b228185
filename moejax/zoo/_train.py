"""Training: a number of steps from a seed, stopped and resumed at will, the same every time."""

import dataclasses
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array, Float
from moejax.zoo._corpus import join, read
from moejax.zoo._evaluate import byte_losses
from moejax.zoo._model import NUM_BYTES, ByteMoE, Record, ZooConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train. The result is a function of these numbers and the text alone.

    **Arguments:**

    - `steps`, `batch`, `length`: optimizer steps; sequences per step; bytes per sequence.
    - `learning_rate`, `warmup`, `decay`, `weight_decay`: see `make_optimizer`.
    - `balance`: weight of the load-balance loss (Fedus et al., arXiv 2101.03961, eq. 4, which is
        one for equal loads) while the learning rate is constant, so that no expert dies.
    - `late_balance`: its weight while the rate decays. It is lighter, since real skew must remain:
        with 0.01 to the end one layer's largest load was only 1.17 times the mean.
    - `seed`: of the initial weights and of the order of the text.
    """

    steps: int = 2940
    batch: int = 8
    length: int = 512
    learning_rate: float = 3e-3
    warmup: int = 100
    decay: float = 0.25
    weight_decay: float = 0.02
    balance: float = 0.01
    late_balance: float = 0.001
    seed: int = 0

    @property
    def decay_start(self) -> int:
        """First step of the decay."""
        return self.steps - max(1, int(self.decay * self.steps))

    def balance_at(self, step: int) -> float:
        """Weight of the load-balance loss at a step."""
        return self.balance if step < self.decay_start else self.late_balance


def batch_at(text: np.ndarray, config: TrainConfig, step: int) -> np.ndarray:
    """The windows of one step, `[batch, length + 1]`: epochs of shuffled windows, each epoch cut
    at another offset, so that a step depends on its number alone and resuming changes nothing."""
    windows = (len(text) - 1) // config.length - 1
    if windows < 1:
        raise ValueError(f"{len(text)} bytes of text: too few for one window of {config.length}")
    index = step * config.batch + np.arange(config.batch)
    rows = []
    for epoch, which in zip(index // windows, index % windows):
        rng = np.random.default_rng([config.seed, int(epoch)])
        offset = rng.integers(config.length)
        start = offset + rng.permutation(windows)[which] * config.length
        rows.append(text[start : start + config.length + 1])
    return np.stack(rows)


def balance_loss(record: Record) -> Float[Array, ""]:
    """Mean over layers of experts x sum(load share x mean router probability); one if balanced."""
    layers, _, num_experts = record.router_logits.shape
    probability = jax.nn.softmax(record.router_logits, axis=-1).mean(axis=1)
    ids = record.expert_ids.reshape(layers, -1)
    share = jax.vmap(lambda row: jnp.zeros(num_experts).at[row].add(1 / row.size))(ids)
    return num_experts * jnp.mean(jnp.sum(share * probability, axis=-1))


def _labels(model: ByteMoE):
    """Muon for what multiplies the hidden state; Adam for embeddings, routers and the head."""
    adam = jax.tree.map(lambda _: "adam", model)
    where = lambda m: (
        [m.embedding.project]
        + [b.attention.query_key_value for b in m.blocks]
        + [b.attention.out for b in m.blocks]
        + [b.experts.up for b in m.blocks]
        + [b.experts.down for b in m.blocks]
    )
    labels = eqx.tree_at(where, adam, replace_fn=lambda _: "muon")
    return eqx.tree_at(lambda m: list(m.embedding.tables), labels, replace_fn=lambda _: "table")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What `train` returns.

    **Arguments:**

    - `model`: the trained model in float32.
    - `loss`: mean training loss of the steps since the last report, nats per byte.
    - `seconds`, `cpu_seconds`: wall and processor time of the steps, over all resumed parts.
    """

    model: ByteMoE
    loss: float
    seconds: float
    cpu_seconds: float


def train(
    text: np.ndarray | None = None,
    model_config: ZooConfig | None = None,
    config: TrainConfig | None = None,
    *,
    checkpoint: Path | None = None,
    every: int = 50,
    log: Callable[[str], None] = print,
) -> TrainResult:
    """Trains from the seed, or from `checkpoint` where that file exists.

    **Arguments:**

    - `text`: byte values, shape `[length]`; default the training files of the shipped list, as
        the running Python has them.
    - `model_config`, `config`: shape of the model, and how to train it; default as shipped.
    - `checkpoint`: written every `every` steps, so that training can be stopped and resumed.
    - `log`: called with one line every `every` steps.

    **Raises:** `ValueError` for no steps, bytes out of range, or a checkpoint of another run.
    """
    text = join(read("train")) if text is None else text
    model_config, config = model_config or ZooConfig(), config or TrainConfig()
    if config.steps < 1 or every < 1:
        raise ValueError(f"steps = {config.steps}, every = {every}: allowed is 1 or more")
    if len(text) and not 0 <= int(np.min(text)) <= int(np.max(text)) < NUM_BYTES:
        raise ValueError(f"text holds {np.min(text)} .. {np.max(text)}: allowed is 0 .. 255")
    model = ByteMoE(model_config, key=jax.random.key(config.seed))
    optimizer, step = _make_step(model, config)
    run = float(zlib.crc32(repr((model_config, config)).encode(), zlib.crc32(bytes(text))))
    fresh = np.array([0.0, 0.0, 0.0, np.nan, run])
    state = (model, optimizer.init(jax.tree.leaves(model)), fresh)
    if checkpoint is not None and checkpoint.exists():
        state = _resume(checkpoint, state)
    model, optimizer_state, (start, seconds, cpu_seconds, loss, _) = state

    recent = []
    since, cpu_since = time.monotonic(), time.process_time()
    for number in range(int(start), config.steps):
        tokens = jnp.asarray(batch_at(text, config, number), jnp.int32)
        balance = jnp.asarray(config.balance_at(number), jnp.result_type(float))
        model, optimizer_state, value = step((tokens, balance), model, optimizer_state)
        recent.append(value)
        if (number + 1) % every and number + 1 < config.steps:
            continue
        loss, recent = float(jnp.stack(recent).mean()), []
        now, cpu_now = time.monotonic(), time.process_time()
        seconds, cpu_seconds = seconds + now - since, cpu_seconds + cpu_now - cpu_since
        since, cpu_since = now, cpu_now
        log(f"step {number + 1} of {config.steps}: loss {loss:.4f}, {seconds:.0f} s")
        if checkpoint is not None:
            progress = np.array([number + 1, seconds, cpu_seconds, loss, run])
            _save(checkpoint, (model, optimizer_state, progress))
    return TrainResult(model, float(loss), float(seconds), float(cpu_seconds))


def _resume(checkpoint: Path, fresh):
    """The state of a checkpoint, if it is of the same configuration and text."""
    other = f"{checkpoint} is the checkpoint of another model, configuration or text"
    try:
        state = eqx.tree_deserialise_leaves(checkpoint, fresh)
    except RuntimeError:
        raise ValueError(other) from None
    if state[2][-1] != fresh[2][-1]:
        raise ValueError(other)
    return state


def _make_step(model: ByteMoE, config: TrainConfig):
    """The optimizer, and one compiled step `(inputs, model, state) -> (model, state, loss)`."""
    from moejax.zoo._optimizer import make_optimizer  # the one part that needs Optax

    optimizer = make_optimizer(
        # Leaves in a list: Optax takes a callable tree, and the model is one, for a function.
        jax.tree.leaves(_labels(model)),
        config.learning_rate,
        config.steps,
        warmup=config.warmup,
        decay_start=config.decay_start,
        weight_decay=config.weight_decay,
    )

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, state):
        tokens, balance = inputs

        def objective(model):
            record = model.forward(tokens[:, :-1])
            loss = byte_losses(record, tokens[:, 1:].reshape(-1)).mean()
            return loss + balance * balance_loss(record), loss

        gradients, loss = eqx.filter_grad(objective, has_aux=True)(model)
        updates, state = optimizer.update(jax.tree.leaves(gradients), state, jax.tree.leaves(model))
        updates = jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(updates))
        return eqx.apply_updates(model, updates), state, loss

    return optimizer, step


def _save(path: Path, state) -> None:
    """Written beside and renamed, so that a stop in the middle leaves the old one whole."""
    beside = path.with_suffix(".new")
    eqx.tree_serialise_leaves(beside, state)
    os.replace(beside, path)
