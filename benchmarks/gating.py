"""How fast is the exact gate, against the token loop that one would write in NumPy?

    python benchmarks/gating.py

64 layers or settings of 512 tokens, 64 experts of which 6 are chosen, 32 nodes, in one vmap, on one
host device and over two. `whole`: expert parallel, each expert on one node; `split`: every node
holds a part of every expert. The loop is `tests/oracles/gating.py: numpy_loop`, timed in turn with
the vmap; both must choose the same experts. Also printed: what the gate adds to the forward pass of
the zoo model, and to a plain top-k at 512 tokens and 256 experts.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _timing
from moejax import gating, zoo
from tests.oracles import gating as oracle


SETTINGS, TOKENS, EXPERTS, NODES, TOP_K = 64, 512, 64, 32, 6
R_COMM, TOKEN_TIME = -0.025, 2 * 2048 * 1408 / 5e12
ROUNDS = 9


def expert_parallel(rng: np.random.Generator, experts: int, nodes: int) -> np.ndarray:
    """Whole experts dealt to nodes."""
    return np.eye(nodes, dtype=np.float32)[rng.permutation(experts) % nodes]


def problem(is_whole: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, shares and r_comp of each setting."""
    rng = np.random.default_rng(0)
    scores = jax.nn.softmax(1.5 * rng.normal(size=(SETTINGS, TOKENS, EXPERTS)).astype(np.float32))
    share = np.stack([expert_parallel(rng, EXPERTS, NODES) for _ in range(SETTINGS)])
    if not is_whole:
        share = rng.dirichlet(np.full(NODES, 0.3), (SETTINGS, EXPERTS)).astype(np.float32)
    return np.asarray(scores), share, -np.linspace(1e3, 4.5e4, SETTINGS, dtype=np.float32)


def vmapped():
    """The gate over all settings, divided over the devices there are."""

    def gate(scores, share, r_comp):
        found = gating.hardware_aware_top_k(
            scores,
            share,
            top_k=TOP_K,
            r_comp=r_comp,
            r_comm=R_COMM,
            token_time=TOKEN_TIME,
        )
        return found.expert_ids, found.weights, found.node_load

    mesh = Mesh(np.array(jax.devices()), ("settings",))
    spec = PartitionSpec("settings")
    return jax.jit(jax.shard_map(jax.vmap(gate), mesh=mesh, in_specs=spec, out_specs=spec))


def throughput(name: str) -> None:
    """Loop and vmap in turn, so that a drifting machine slows both."""
    scores, share, r_comp = problem(name == "whole")
    run = vmapped()
    arrays = [jax.device_put(x) for x in (scores, share, r_comp)]
    compile_time = _timing.first_call(lambda: run(*arrays))
    chosen = np.asarray(run(*arrays)[0])
    plain = lambda i: (
        scores[i],
        share[i],
        TOP_K,
        r_comp[i],
        np.float32(R_COMM),
        np.float32(TOKEN_TIME),
    )
    # Nearly: loads that are equal but for rounding may order differently.
    same = [np.mean(oracle.numpy_loop(*plain(i))[0] == chosen[i]) for i in range(0, SETTINGS, 16)]
    fast, slow = [], []
    for i in range(ROUNDS):
        fast.append(_timing.seconds(lambda: run(*arrays), 5) / SETTINGS)
        slow.append(_timing.seconds(lambda i=i: oracle.numpy_loop(*plain(i)), 3))
    ratios = np.array(slow) / np.array(fast)
    print(
        f"{jax.device_count()} device(s), {name}: ratio loop / vmap {np.median(ratios):.1f} "
        f"({ratios.min():.1f} to {ratios.max():.1f}); a batch takes {1e3 * np.median(fast):.3f} ms "
        f"(best {1e3 * min(fast):.3f}), the loop {1e3 * np.median(slow):.2f} ms "
        f"(best {1e3 * min(slow):.2f}); first call {compile_time:.1f} s, "
        f"{np.mean(same):.2%} the same choices",
        flush=True,
    )


def ratio(slow, fast) -> str:
    """Median of ratios, both timed in turn, and the time of one `slow`."""
    pairs = [(_timing.seconds(slow, 3), _timing.seconds(fast, 3)) for _ in range(ROUNDS)]
    ratios, times = [a / b for a, b in pairs], [a for a, _ in pairs]
    return f"x {np.median(ratios):.2f} ({1e3 * np.median(times):.1f} ms)"


def in_the_zoo(length: int = 512, batch: int = 4) -> None:
    """A forward pass with the gate in every layer over one with the model's own."""
    config = zoo.ZooConfig()
    model = zoo.ByteMoE(config, key=jax.random.key(0))
    share = expert_parallel(np.random.default_rng(0), config.num_experts, 16)
    given = dict(top_k=config.top_k, r_comp=-3e4, r_comm=-0.025, token_time=TOKEN_TIME)
    text = jax.random.randint(jax.random.key(1), (batch, length), 32, 127)
    forward = eqx.filter_jit(lambda model, text, gate: model.forward(text, gate).logits)
    # A decode step of 32 requests at a time: each gates on its own.
    groups = lambda gate, logits: jax.vmap(gate.choose)(logits.reshape(-1, 32, config.num_experts))
    per_step = lambda gate: (
        lambda logits: tuple(x.reshape(-1, config.top_k) for x in groups(gate, logits))
    )
    plain = lambda: forward(model, text, None)
    print(f"zoo forward pass, {batch} x {length} tokens, over the one with its own gate:")
    for chunk in (1, 8, 32):
        gate = gating.HardwareAwareGate(share, chunk=chunk, **given)
        steps = eqx.filter_jit(lambda model, text, gate: model.forward(text, per_step(gate)).logits)
        whole = ratio(lambda g=gate: forward(model, text, g.choose), plain)
        stepwise = ratio(lambda g=gate, f=steps: f(model, text, g), plain)
        print(f"  chunk {chunk}: {whole} as one batch, {stepwise} in batches of 32", flush=True)


def beside_plain_top_k(experts: int = 256, nodes: int = 32, top_k: int = 8) -> None:
    """One layer's gate over softmax and top-k."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(TOKENS, experts)), jnp.float32)
    share = expert_parallel(rng, experts, nodes)
    given = dict(top_k=top_k, r_comp=-3e4, r_comm=-0.025, token_time=TOKEN_TIME)
    plain_gate = jax.jit(functools.partial(zoo.top_k_gate, top_k=top_k))
    plain = lambda: plain_gate(logits)
    print(f"gate over plain top-k, {TOKENS} tokens, {experts} experts:")
    for chunk in (1, 8, 32):
        gate = gating.HardwareAwareGate(share, chunk=chunk, **given)
        run = eqx.filter_jit(lambda gate, logits: gate.choose(logits))
        print(f"  chunk {chunk}: {ratio(lambda g=gate, f=run: f(g, logits), plain)}", flush=True)


if __name__ == "__main__":
    if jax.device_count() == 1:
        print(_timing.machine())
    throughput("whole")
    throughput("split")
    if jax.device_count() == 1:
        flags = "--xla_force_host_platform_device_count=2"
        environment = os.environ | {"XLA_FLAGS": flags}
        subprocess.run([sys.executable, __file__], env=environment, check=True)
        in_the_zoo()
        beside_plain_top_k()
