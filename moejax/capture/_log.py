"""What a gate inside a model did, step by step."""

from typing import Any, NamedTuple

import numpy as np

from moejax.serving import mean_and_interval


class Measure(NamedTuple):
    """One number. Fields: `mean`; `half`, half-width of its 95 % confidence interval over the
    samples named by `over` (NaN for a single one); `unit`."""

    mean: float
    half: float
    unit: str
    over: str


def measured(values: np.ndarray, unit: str, over: str) -> Measure:
    """Mean of samples, with its interval."""
    mean, half = mean_and_interval(values)
    return Measure(float(mean), float(half), unit, over)


class Kept(NamedTuple):
    """Choices of one gated call, for metrics. Fields: `own_ids` and `own_weights`, the model's,
    strongest first, and `expert_ids`, the gate's: [layers, tokens, top_k]; `scores`
    [layers, tokens, experts]."""

    own_ids: np.ndarray
    own_weights: np.ndarray
    expert_ids: np.ndarray
    scores: np.ndarray


class GateLog:
    """What a gate did while `gated` was open. A step is one batch that the gate saw, such as a
    decode step; calls that it left alone are not in it.

    Arrays over steps: `tokens` [steps]; `moved` and `lost_favorites` [steps, layers], choices that
    the gate took from tokens and tokens that lost their strongest; `time` and `own_time`
    [steps, layers], modelled s of a layer with the gate's choices (and the gate's own steps, where
    costs have them) and with the model's; `gate_seconds` [steps, layers], wall time of the gate in
    this process, to torch and back, without compilation; `kl` [steps], nats of the next-token
    distribution from that of the ungated model (NaN unless asked for).

    `layer_numbers` and `top_k` are the model's; `left_alone` counts tokens that were not the
    gate's; `kept` holds choices where asked for.
    """

    def __init__(self, layer_numbers: list[int], top_k: int, rest_time: float = 0.0):
        self.layer_numbers, self.top_k, self.rest_time = layer_numbers, top_k, rest_time
        self.left_alone = 0
        self.kept: list[Kept] = []
        layers = (0, len(layer_numbers))
        self.tokens = np.zeros(0, np.int64)
        self.moved = np.zeros(layers, np.int64)
        self.lost_favorites = np.zeros(layers, np.int64)
        self.time, self.own_time, self.gate_seconds = (np.zeros(layers) for _ in range(3))
        self.kl = np.zeros(0)

    def add(self, **columns: Any) -> None:
        """Appends steps: one array for each of the columns above."""
        for name, value in columns.items():
            setattr(self, name, np.concatenate([getattr(self, name), value]))

    @property
    def num_steps(self) -> int:
        """Batches that the gate saw."""
        return len(self.tokens)

    @property
    def moved_choices(self) -> int:
        """Choices that were moved to another expert, over all layers."""
        return int(self.moved.sum())

    @property
    def overlap(self) -> float:
        """Part of the model's own choices that stayed; NaN where the gate saw no token."""
        return 1 - _part(self.moved, self.tokens.sum() * self.top_k * len(self.layer_numbers))

    @property
    def retention(self) -> float:
        """Part of the (layer, token) pairs that kept their strongest expert."""
        return 1 - _part(self.lost_favorites, self.tokens.sum() * len(self.layer_numbers))

    @property
    def tbt(self) -> np.ndarray:
        """[steps] modelled s of a step: its MoE layers with the gate, and `rest_time`."""
        return self.time.sum(1) + self.rest_time

    @property
    def own_tbt(self) -> np.ndarray:
        """[steps] the same with the model's own choices and no gate."""
        return self.own_time.sum(1) + self.rest_time

    @property
    def gate_time_per_layer(self) -> np.ndarray:
        """[layers] median wall s of the gate in this process."""
        if not self.num_steps:
            return np.full(len(self.layer_numbers), np.nan)
        return np.median(self.gate_seconds, axis=0)

    def summary(self) -> str:
        """A few lines for people."""
        if not self.num_steps:
            return f"the gate saw no batch; {self.left_alone} tokens were left alone"
        total = self.tokens.sum() * self.top_k * len(self.layer_numbers)
        lines = [
            f"{self.num_steps} steps of {self.tokens.mean():.1f} tokens on average, "
            f"{self.left_alone} tokens left alone",
            f"moved {self.moved_choices} of {total} choices: overlap {self.overlap:.4f}, "
            f"top-1 retention {self.retention:.4f}",
            f"modelled time of a step: {_interval(1e6 * self.tbt)} us, "
            f"{_interval(1e6 * self.own_tbt)} us with the model's own choices",
            f"gate: {1e3 * np.nanmedian(self.gate_time_per_layer):.3f} ms a layer in this process",
        ]
        if not np.all(np.isnan(self.kl)):
            lines.append(f"KL: {_interval(self.kl[~np.isnan(self.kl)])} nats a token")
        return "\n".join(lines)


def _part(count: np.ndarray, total: Any) -> float:
    return float(count.sum() / total) if total else float("nan")


def _interval(values: np.ndarray) -> str:
    mean, half = mean_and_interval(values)
    return f"{mean:.4g}" + ("" if np.isnan(half) else f" +- {half:.2g}")
