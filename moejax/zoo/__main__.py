"""`python -m moejax.zoo`: train, evaluate, and write weights, trace, file list and card."""

import argparse
import dataclasses
import json
import os
import sysconfig
import time
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from moejax.zoo._card import Measurements, card
from moejax.zoo._corpus import join, make_list, read
from moejax.zoo._evaluate import evaluate
from moejax.zoo._model import ByteMoE, ZooConfig
from moejax.zoo._ngram import ngram_losses
from moejax.zoo._store import RECORDED, record_trace, round_to_bf16, save_weights
from moejax.zoo._train import TrainConfig, train


def main(arguments: list[str] | None = None) -> None:
    """Entry point; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m moejax.zoo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="package folder")
    parser.add_argument("--checkpoint", type=Path, help="where to stop and resume")
    parser.add_argument("--steps", type=int, default=TrainConfig.steps)
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    given = parser.parse_args(arguments)
    files = make_list()
    train_text, heldout_text = read("train", files), read("heldout", files)
    config = dataclasses.replace(TrainConfig(), steps=given.steps, seed=given.seed)
    report = lambda line: print(time.strftime("%H:%M:%S"), line, flush=True)
    result = train(join(train_text), config=config, checkpoint=given.checkpoint, log=report)

    data = given.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "files.json").write_text(json.dumps(files, indent=0) + "\n")
    # Everything below is measured on the weights as shipped.
    model = round_to_bf16(result.model)
    save_weights(model, data / "weights.npz")
    sequences = record_trace(model, heldout_text, data / "trace.npz")
    evaluation = evaluate(model, heldout_text)
    report(f"held-out loss {evaluation.loss:.4f}")
    measured = Measurements(
        python=sysconfig.get_python_version(),
        train_files=len(train_text.documents),
        train_bytes=train_text.num_bytes,
        heldout_files=len(heldout_text.documents),
        heldout_bytes=heldout_text.num_bytes,
        ngrams=ngram_losses(join(train_text), join(heldout_text)),
        evaluation=evaluation,
        num_parameters=sum(a.size for a in jax.tree.leaves(eqx.filter(model, eqx.is_array))),
        weights_bytes=(data / "weights.npz").stat().st_size,
        trace_sequences=sequences,
        trace_tokens=sequences * RECORDED,
        trace_bytes=(data / "trace.npz").stat().st_size,
        seconds=result.seconds,
        cpu_seconds=result.cpu_seconds,
        processors=os.cpu_count() or 1,
        forward_seconds=_forward_seconds(model),
    )
    (given.out / "CARD.md").write_text(card(ZooConfig(), config, measured))


def _forward_seconds(model: ByteMoE, tokens: int = 1024, repeats: int = 5) -> float:
    """Least time of a compiled forward pass."""
    forward = eqx.filter_jit(lambda model, tokens: model(tokens))
    text = np.random.default_rng(0).integers(32, 127, tokens).astype(np.int32)
    jax.block_until_ready(forward(model, text))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(forward(model, text))
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
