"""The scan over commands against one command at a time, and against the list of rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.cost import dram
from tests.oracles import dram as oracle


BANKS, GROUPS, COMMANDS, STREAMS = 8, 4, 12, 3_400


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs run once, so that their compilation is most of the time they take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def random_timing(rng):
    """Any clocks that a DRAM could have: what is in one bank group takes no less than across."""
    pick = lambda low, high: int(rng.integers(low, high + 1))
    short = dict(rcd=(4, 20), rcd_write=(4, 20), rp=(4, 20), ras=(10, 60), rc=(20, 80), wr=(2, 20))
    short |= dict(read_to_precharge=(1, 10), ccd_short=(1, 3), mac_cadence=(1, 8), rrd_short=(1, 4))
    short |= dict(faw=(4, 40), cl=(2, 24), cwl=(2, 12), burst=(1, 3), wtr_short=(1, 8))
    short |= dict(turnaround=(0, 3), rfc=(30, 120), write_cadence=(1, 4), operand=(1, 20))
    short |= dict(drain=(1, 8), result_cadence=(1, 5), result_latency=(1, 30))
    short |= dict(result_to_write=(1, 20), write_to_result=(1, 20))
    t = {name: pick(*bounds) for name, bounds in short.items()}
    for name in ("ccd", "rrd", "wtr"):
        t[f"{name}_long"] = t[f"{name}_short"] + pick(0, 4)
    t |= dict(refi=t["rfc"] + pick(150, 900), precharge_to_refresh=pick(1, t["rp"]))
    return t | dict(mode_in=0, mode_out=0, ck=1, windows=int(rng.choice([1, 2, 4])))


def random_stream(rng):
    """[commands, 4] of kind, count, target, buffer."""
    kinds = rng.choice(7, COMMANDS, p=[0.2, 0.17, 0.13, 0.14, 0.18, 0.09, 0.09])
    kinds = np.where(rng.random(COMMANDS) < 0.05, oracle.KINDS.index("SYNC"), kinds)
    kinds = np.where(rng.random(COMMANDS) < 0.03, oracle.KINDS.index("NOP"), kinds)
    sets = rng.choice([oracle.ALL, oracle.EVEN, oracle.ODD, oracle.FOUR, oracle.FOUR - 1], COMMANDS)
    target = np.where(rng.random(COMMANDS) < 0.5, rng.integers(0, BANKS, COMMANDS), sets)
    count = np.where(np.isin(kinds, [0, 3]), 1, rng.integers(1, 6, COMMANDS))
    count = np.where(kinds == 7, rng.integers(0, 30, COMMANDS), count)
    return np.stack([kinds, count, target, rng.integers(0, 2, COMMANDS)], axis=1)


@pytest.mark.parametrize("dual, breaks", [(False, True), (True, True), (False, False)])
def test_ten_thousand_random_streams(dual, breaks):
    """Three times 3,400: no violation of any pair, and the scan sends what the twin sends."""
    rng = np.random.default_rng([dual, breaks])
    timings = [random_timing(rng) for _ in range(STREAMS)]
    streams = np.stack([random_stream(rng) for _ in range(STREAMS)])
    due = np.array([rng.integers(0, t["refi"]) for t in timings])
    names = [name for name in timings[0] if name != "windows"]
    stacked = {name: np.array([t[name] for t in timings], np.float32) for name in names}
    banks_per_faw = np.array([16 // t["windows"] for t in timings])

    @jax.jit
    @jax.vmap
    def scan(fields, banks_per_faw, stream, due):
        clocks = dram.in_clocks(dram.ChannelTiming(**fields), 16, banks_per_faw)
        layout = dict(num_banks=BANKS, num_groups=GROUPS, dual=dual)
        commands = dram.Stream(*stream.T)
        out = dram.issue(commands, clocks, **layout, first_refresh=due, breaks_runs=breaks)
        return out.first, out.last, out.done, out.refresh

    found = scan(stacked, banks_per_faw, streams.astype(np.int32), due.astype(np.int32))
    first, last, done, refresh = (np.asarray(field) for field in found)
    refreshes = 0
    for i, (t, stream) in enumerate(zip(timings, streams)):
        t["longest"] = 3 * max(t[name] for name in names if name != "refi")
        channel = oracle.Channel(t, BANKS, GROUPS, dual=dual, due=int(due[i]), breaks=breaks)
        assert oracle.gemv_clocks(channel, stream.tolist()) == done[i]
        assert channel.runs == list(zip(first[i].tolist(), last[i].tolist()))
        assert oracle.violations(t, channel.events, BANKS // GROUPS) == []
        sent = [when for when, kind, *_ in channel.events if kind == "REF"]
        assert sent == refresh[i][refresh[i] >= 0].tolist()
        refreshes += len(sent)
    assert refreshes > STREAMS / 10


def test_the_checker_sees_what_is_wrong():
    rng = np.random.default_rng(0)
    t = random_timing(rng) | dict(faw=40, rcd=10, ras=30, rp=12, rrd_short=1, rrd_long=1)
    t |= dict(longest=400, ccd_short=2, ccd_long=3, rfc=100, drain=5)
    bank = lambda *numbers: frozenset((0, number) for number in numbers)
    act = lambda when, number: (when, "ACT", bank(number), [when])
    good = [act(0, 0), (10, "RD", bank(0), []), (40, "PRE", bank(0), [])]
    assert oracle.violations(t, good, 2) == []
    for events, why in [
        ([act(0, 0), (9, "RD", bank(0), [])], "RD"),
        ([act(0, 0), (29, "PRE", bank(0), [])], "PRE"),
        ([act(0, 0), (10, "RD", bank(0), []), (12, "RD", bank(0), [])], "RD"),
        ([(10, "RD", bank(0), [])], "RD to a closed row"),
        ([act(0, 0), act(200, 0)], "ACT of an open row"),
        ([act(0, 0), (300, "REF", bank(*range(8)), [])], "REF with an open row"),
        ([(0, "REF", bank(*range(8)), []), act(99, 0)], "REF"),
        ([act(when, when) for when in range(5)], "five activates in a window"),
        ([(0, "GWRITE", bank(), []), (0, "RDRES", bank(), [])], "GWRITE"),
    ]:
        found = oracle.violations(t, events, 2)
        assert found and any(why in entry[:3:2] or why == entry[0] for entry in found), why
    # Data ties in program order only: this result was read before.
    ready = [act(0, 0), (40, "RDRES", bank(), []), (38, "MAC", bank(0), [])]
    assert oracle.violations(t, ready, 2) == []


def test_a_run_broken_by_a_refresh():
    """By hand: 10 multiplications 4 apart from 10 on, a refresh due at 25."""
    pim_clocks = dict(rcd=10, rp=12, ras=20, rc=32, read_to_precharge=3, mac_cadence=4, rfc=50)
    fields = {name: 1.0 for name in dram.ChannelTiming.__dataclass_fields__}
    fields |= pim_clocks | dict(refi=1000, precharge_to_refresh=12)
    clocks = dram.in_clocks(dram.ChannelTiming(**fields), 1, 1)
    stream = dram.Stream(*jnp.array([[0, 4], [1, 10], [-1, -1], [0, 0]], jnp.int32))
    out = dram.issue(stream, clocks, num_banks=1, num_groups=1, first_refresh=25)
    # 10, 14, 18, 22 | close at 25, refresh at 37, open at 87, go on at 97.
    assert (int(out.before[1]), int(out.break_last[1])) == (4, 22)
    assert (int(out.precharge[1]), int(out.refresh[1])) == (25, 37)
    assert (int(out.open_2[1]), int(out.resume[1]), int(out.last[1])) == (87, 97, 97 + 5 * 4)
    assert int(out.done) == 117 + 4
    patient = dram.issue(
        stream, clocks, num_banks=1, num_groups=1, first_refresh=25, breaks_runs=False
    )
    assert (int(patient.last[1]), int(patient.refresh[1])) == (10 + 9 * 4, -1)
