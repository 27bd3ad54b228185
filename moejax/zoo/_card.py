"""The model card, written from measurements by `python -m moejax.zoo`."""

import dataclasses
import platform
from importlib.metadata import version

from moejax.zoo._evaluate import Evaluation
from moejax.zoo._model import ZooConfig
from moejax.zoo._train import TrainConfig


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What goes into a card.

    **Arguments:**

    - `train_files`, `train_bytes`, `heldout_files`, `heldout_bytes`: the text.
    - `ngrams`: held-out nats per byte by order.
    - `evaluation`: of the shipped (bfloat16) weights on the held-out files.
    - `num_parameters`, `weights_bytes`: size, and size of the file.
    - `trace_sequences`, `trace_tokens`, `trace_bytes`: the shipped trace.
    - `seconds`, `cpu_seconds`: training time; `processors` of the machine.
    - `forward_seconds`: one compiled forward pass of 1,024 tokens, best of five.
    """

    python: str
    train_files: int
    train_bytes: int
    heldout_files: int
    heldout_bytes: int
    ngrams: dict[int, float]
    evaluation: Evaluation
    num_parameters: int
    weights_bytes: int
    trace_sequences: int
    trace_tokens: int
    trace_bytes: int
    seconds: float
    cpu_seconds: float
    processors: int
    forward_seconds: float


_NGRAM_NAMES = {1: "unigram", 2: "bigram"}


def card(model: ZooConfig, training: TrainConfig, measured: Measurements) -> str:
    """The card as markdown. Every number is measured by the run that wrote it, or configuration."""
    return (
        "\n\n".join(
            [
                "# Model card: the moejax zoo model",
                _what(model, measured),
                _loss_section(measured),
                _routing_section(measured.evaluation),
                _training_section(model, training, measured),
            ]
        )
        + "\n"
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _what(model: ZooConfig, m: Measurements) -> str:
    return (
        f"A decoder-only byte-level language model with {len(model.windows)} MoE layers of "
        f"{model.num_experts} routed experts, top-{model.top_k}, behind a softmax router; "
        f"{m.num_parameters:,} parameters, shipped in bfloat16 ({m.weights_bytes / 1e6:.2f} MB). "
        f"Its routing trace holds {m.trace_sequences} sequences, {m.trace_tokens:,} tokens, with "
        f"router logits ({m.trace_bytes / 1e6:.2f} MB). It is a test subject for routing and "
        "gating, and stands in for no published model.\n\n"
        f"**Data.** Sources of the Python {m.python} standard library, tests and generated tables "
        f"left out: {m.train_files} files, {m.train_bytes:,} bytes to train on and "
        f"{m.heldout_files} whole files, {m.heldout_bytes:,} bytes held out, by the names and "
        "SHA-256 hashes in `data/files.json`. No text ships: evaluation reads the running Python's "
        "own library by that list, and says which files differ."
    )


def _loss_section(m: Measurements) -> str:
    rows = [
        [_NGRAM_NAMES.get(order, f"interpolated {order}-gram"), f"{loss:.3f}"]
        for order, loss in m.ngrams.items()
    ]
    rows.append(["**zoo model**", f"**{m.evaluation.loss:.3f}**"])
    return (
        "## Held-out loss\n\nNats per byte on the held-out files; the n-gram models (Witten-Bell) "
        "are counted on the training files of the same run.\n\n"
        + _table(["model", "nats per byte"], rows)
    )


def _routing_section(e: Evaluation) -> str:
    rows = [
        [str(layer), f"{skew:.2f}", f"{least:.2f}", f"{own:.3f}", f"{control:.3f}", f"{ratio:.1f}"]
        for layer, (skew, least, own, control, ratio) in enumerate(
            zip(
                e.load_skew,
                e.load.min(axis=1) / e.load.mean(axis=1),
                e.document_distance,
                e.shuffled_distance,
                e.distance_ratio,
            )
        )
    ]
    header = ["layer", "max / mean load", "min / mean load", "documents", "shuffled", "ratio"]
    return (
        "## Routing\n\nOn the held-out files: largest and smallest expert load over the mean, and "
        "the mean total-variation distance between two documents' expert use, beside the same "
        "after shuffling the tokens over the documents.\n\n" + _table(header, rows)
    )


def _training_section(model: ZooConfig, training: TrainConfig, m: Measurements) -> str:
    tokens = training.steps * training.batch * training.length
    settings = "\n".join(f"- `{k} = {v!r}`" for k, v in dataclasses.asdict(training).items())
    return (
        f"## Training\n\n{training.steps:,} steps of {training.batch} x {training.length} bytes "
        f"({tokens / 1e6:.1f} M bytes, {tokens / m.train_bytes:.1f} passes over the text) took "
        f"{m.seconds / 60:.0f} minutes, {m.cpu_seconds / 60:.0f} minutes of processor time, on a "
        f"shared machine with {m.processors} CPU cores. A compiled forward pass of 1,024 tokens "
        f"takes {m.forward_seconds:.2f} s there. Python {platform.python_version()}, JAX "
        f"{version('jax')}, Equinox {version('equinox')}, Optax {version('optax')}.\n\n"
        f"{settings}\n\n"
        "To retrain, evaluate and write the package data and this card again, in a checkout:\n\n"
        "```\npython -m moejax.zoo --checkpoint zoo.eqx\n```\n\n"
        "It can be stopped and started again with the same command. On another Python version "
        "the text, and so every number above, differs."
    )
