"""How fast is the scan over DRAM commands, against one command at a time in Python?

    python benchmarks/dram.py

A batch of 256 timings of one GEMV (Qwen3's gate and up projections, 8 tokens, HBM-PIM on a B200) in
one vmap, against `tests/oracles/dram.py: Channel` on the same commands; both must end at the same
clock. Also printed: how long a long kernel takes alone, where a step of the scan is all overhead.
"""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _timing
from moejax import hardware
from moejax.cost import dram
from tests.oracles import dram as oracle
from tests.oracles import dram_kernels
from tests.oracles.pim_timing import Device


OUTPUTS, INPUTS, TOKENS, TIMINGS, LOOPED = 1536, 2048, 8, 256, 8
GROUPS = 8


def timings(pim) -> dram.ChannelTiming:
    """The preset's, with a few numbers drawn, stacked."""
    rng = np.random.default_rng(0)
    base = dram.ChannelTiming.of(pim)
    stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (TIMINGS,)), base)
    drawn = {name: rng.integers(10, 24, TIMINGS) * 1e-9 for name in ("rcd", "rp", "cl")}
    return dataclasses.replace(stacked, **drawn)


def looped(pim, timing: dram.ChannelTiming, index: int) -> tuple[int, int]:
    """Commands sent one by one: the clock at the end, and how many there were."""
    field = lambda name: float(getattr(timing, name)[index] / timing.ck[index])
    t = {name: int(np.ceil(field(name) - 0.02)) for name in dram.ChannelTiming.__dataclass_fields__}
    t["windows"] = -(-int(pim.banks) // int(pim.banks_per_faw))
    channel = oracle.Channel(t, 1, 1, due=t["refi"])
    for command in dram_kernels.b200(Device(), OUTPUTS, INPUTS, TOKENS, GROUPS, "token_outer"):
        channel.run(*command)
    return channel.done, len(channel.events)


def against_the_twin() -> None:
    """Both in turn, so that a drifting machine slows both."""
    pim = hardware.PIMS["hbm-pim"].build()
    batch = timings(pim)
    one = lambda timing: dram.gemv_time(
        OUTPUTS, INPUTS, TOKENS, pim, timing=timing, reduction_groups=GROUPS
    )
    run = jax.jit(jax.vmap(one))
    compile_time = _timing.first_call(lambda: run(batch))
    times = np.asarray(run(batch))
    ratios, fast, slow = [], [], []
    for start in range(5):
        fast.append(_timing.seconds(lambda: run(batch), 3) / TIMINGS)
        loop = lambda start=start: [looped(pim, batch, start + i) for i in range(LOOPED)]
        slow.append(_timing.seconds(loop, 1) / LOOPED)
        ratios.append(slow[-1] / fast[-1])
        for i, (done, _) in enumerate(loop()):
            assert round(float(times[start + i] / batch.ck[0])) == done
    commands = looped(pim, batch, 0)[1]
    print(f"{TIMINGS} timings of {OUTPUTS} x {INPUTS}, {TOKENS} tokens, {commands} commands each:")
    print(f"  vmap {1e6 * np.median(fast):.0f} us each, one by one {1e3 * np.median(slow):.1f} ms")
    print(f"  ratio {np.median(ratios):.0f}; compilation {compile_time:.1f} s")


def alone() -> None:
    """One configuration: how long the simulation of a long kernel takes."""
    cases = [("b200", "hbm-pim", 32768, 6144, 8), ("samsung", "samsung-hbm2-pim", 14336, 4096, 4)]
    for kernel, name, *shape in cases:
        pim = hardware.PIMS[name].build()
        run = jax.jit(functools.partial(dram.gemv_time, *shape, pim, kernel))
        seconds = _timing.seconds(run, 3)
        simulated = 1e6 * float(run())
        print(f"{kernel} {shape}: {1e3 * seconds:.0f} ms for {simulated:.0f} us of DRAM")


if __name__ == "__main__":
    print(_timing.machine())
    against_the_twin()
    alone()
