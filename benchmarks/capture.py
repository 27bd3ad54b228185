"""What recording and gating add to a Hugging Face model, and to each of its MoE layers.

    python benchmarks/capture.py

A model of random weights with the MoE layers of OLMoE (64 experts, top-8) at a quarter of its
width, four layers, on the CPU in one thread. Decode steps with a cache at several batch sizes and a
prompt call, each plain, recorded, and gated, in turn: medians of wall time and of the process's CPU
time, which other load hardly touches, and the CPU time added for each MoE layer. The gate has no
costs: it runs as any other but moves no choice, so that the experts have the same work.
"""

import contextlib
import sys
import time
from pathlib import Path

import jax
import numpy as np


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _timing
from moejax import capture


LAYERS, EXPERTS, TOP_K, NODES, WIDTH = 4, 64, 8, 16, 512
BATCHES = (1, 8, 32)
ROUNDS = 15


def olmoe():
    """A model of random weights."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.OlmoeConfig(
        vocab_size=1024,
        hidden_size=WIDTH,
        intermediate_size=WIDTH // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.OlmoeForCausalLM(config).eval()


def step(model, batch: int, tokens: int):
    """A call of so many new tokens, after a prompt of 16 where it is one of each."""
    import torch

    prompt = torch.randint(1, 1024, (batch, 16))
    new = torch.randint(1, 1024, (batch, tokens))

    def clock(run) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - wall, time.process_time() - cpu

    def call() -> tuple[float, float]:
        with torch.no_grad():
            if tokens > 1:
                return clock(lambda: model(new, use_cache=True))
            output = model(prompt, use_cache=True)
            return clock(lambda: model(new, cache=output.cache, use_cache=True))

    return call


def measure(model, gate, batch: int, tokens: int) -> dict[str, np.ndarray]:
    """Median [wall, CPU] ms of a call, by what is around it; rounds take turns."""
    call = step(model, batch, tokens)
    around = {
        "plain": contextlib.nullcontext,
        "recorded": lambda: capture.record(model),
        "gated": lambda: capture.gated(model, gate, decode_only=tokens == 1),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in around}
    for _ in range(ROUNDS):
        for name, context in around.items():
            with context():
                call()  # compiled, or taken from the compiler's memory
                found[name].append(call())
    return {name: 1e3 * np.median(times, axis=0) for name, times in found.items()}


def main() -> None:
    import torch

    torch.set_num_threads(1)
    model = olmoe()
    share = np.eye(NODES)[np.arange(EXPERTS) % NODES]
    gate = capture.gate_for(model, share, r_comp=0.0, r_comm=0.0, token_time=1e-6)
    print(f"{_timing.machine()}, torch {torch.__version__}; medians of {ROUNDS}")
    print(f"{LAYERS} layers of {EXPERTS} experts, top-{TOP_K}, hidden {WIDTH}, {NODES} nodes")
    print("ms: wall, CPU      " + "".join(f"{n:>18s}" for n in ("plain", "recorded", "gated")))
    for batch, tokens in [*((batch, 1) for batch in BATCHES), (8, 64)]:
        found = measure(model, gate, batch, tokens)
        what = f"decode, batch {batch}" if tokens == 1 else f"prompts, {batch} x {tokens}"
        cells = "".join(f"{wall:9.2f}{cpu:9.2f}" for wall, cpu in found.values())
        record, gated = ((found[n][1] - found["plain"][1]) / LAYERS for n in ("recorded", "gated"))
        print(f"{what:19s}{cells}   a layer, CPU: +{record:.3f} recorded, +{gated:.3f} gated")
    recording_us(model)


def recording_us(model) -> None:
    """What recording costs a token and layer in a long prompt, with logits and without."""
    import torch

    ids = torch.randint(1, 1024, (8, 128))
    for logits in (True, False):
        with torch.no_grad(), capture.record(model, logits=logits) as recording:
            for _ in range(5):
                model(ids)
        each = 1e6 * recording.seconds / recording.num_tokens / LAYERS
        print(f"recording, logits {'on' if logits else 'off'}: {each:.2f} us a token and layer")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
