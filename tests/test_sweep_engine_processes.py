"""The sweep engine on several devices and in several processes: the same rows, to the last bit.

One interpreter forks everything that needs a JAX of its own (before JAX has started, so that a
child can have eight devices, a cluster, or a violent end), because importing takes longer than any
of these sweeps.
"""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from moejax import sweep
from moejax.sweep import Axis, Sweep
from tests.conftest import REPOSITORY


# What a row is: drawn routing, its partition, and arithmetic whose rounding shows everything.
SWEEP_FILE = """
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from moejax.sweep import Axis, Sweep


def fn(config, key):
    loads = jnp.exp(config["shape"] * jax.random.normal(key, (24,)))
    order = jnp.argsort(loads)[::-1]
    mixed = jnp.tanh(loads @ config["weights"]) / jnp.sqrt(1 + config["scale"])
    halved = lambda state: (state[0] + 1, state[1] * 0.7)
    steps, _ = lax.while_loop(lambda state: state[1] > 0.01, halved, (0, loads.max()))
    return dict(
        total=mixed.sum(),
        spread=jnp.std(jnp.exp(-mixed)) * loads.std(),
        first=order[0],
        steps=steps,
        place=config["place"].sum() * config["scale"],
    )


def place(scale):
    return dict(place=np.cos(np.arange(7) * scale))


WEIGHTS = np.sin(np.arange(24 * 9, dtype=np.float32)).reshape(24, 9)
SWEEP = Sweep(
    [
        Axis("weights", {"plain": WEIGHTS, "twice": 2 * WEIGHTS, "short": WEIGHTS[:, :5]}),
        Axis("shape", [0.3, 1.0, 3.0]),
        Axis("scale", list(np.linspace(0, 2, 7))),
    ],
    fn,
    seeds=3,
    prepare=place,
    width=4,
)
"""
ROWS, TILES = 3 * 3 * 7 * 3, 32 + 16

FORKER = """
import os, random, signal, sys, time, warnings

warnings.filterwarnings("ignore")
from moejax import sweep

path, folder, port, seed = sys.argv[1:]
made, _ = sweep.load_file(path)


def child(work):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def devices():
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax

    assert len(jax.devices()) == 8
    for chunk in (None, 1, 5, 11):
        sweep.run(made, f"{folder}/devices-{chunk}", chunk=chunk, progress=False)
    sweep.run(made, f"{folder}/devices-of-8", chunk=7, devices=3, progress=False)


def member(name, rank, slow=0.0):
    def work():
        os.environ["JAX_COORDINATOR_ADDRESS"] = f"localhost:{port}"
        os.environ |= {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}
        assert sweep.join_cluster()
        import jax

        assert jax.process_count() == 2
        slowly = lambda watch: time.sleep(slow)
        sweep.run(made, f"{folder}/{name}", chunk=2, progress=slowly if rank else False)
        open(f"{folder}/{name}-{rank}-done", "w").close()
        # As at the end of an interpreter, which `os._exit` leaves out: all wait for all.
        jax.distributed.shutdown()

    return work


def together(name, dies):
    members = [child(member(name, rank, 0.05 if dies else 0.0)) for rank in (0, 1)]
    if dies:
        parts = f"{folder}/{name}/parts"
        until = time.monotonic() + 120
        # The second dies with some of its parts written, the first goes on.
        while time.monotonic() < until:
            names = os.listdir(parts) if os.path.isdir(parts) else []
            if any(part.startswith("part-") and int(part[5:13]) >= 24 for part in names):
                break
            time.sleep(0.01)
        os.kill(members[1], signal.SIGKILL)
        while not os.path.exists(f"{folder}/{name}-0-done") and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(members[0], signal.SIGKILL)
        [wait(pid) for pid in members]
        return
    assert [wait(pid) for pid in members] == [0, 0]


def killed():
    generator, kills = random.Random(int(seed)), 0
    out = f"{folder}/killed"
    slowly = lambda watch: time.sleep(0.05)
    for _ in range(5):
        pid = child(lambda: sweep.run(made, out, chunk=1, progress=slowly))
        # From before anything is there to some parts; all of them would take five seconds.
        time.sleep(generator.uniform(0.1, 1.2))
        os.kill(pid, signal.SIGKILL)
        kills += wait(pid) == -signal.SIGKILL
    there = sweep.load(out, partial=True).num_rows if os.path.exists(f"{out}/manifest.json") else 0
    assert wait(child(lambda: sweep.run(made, out, progress=False))) == 0
    print(kills, there)


assert wait(child(devices)) == 0
together("cluster", dies=False)
together("half", dies=True)
killed()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The sweep, from a file, as everybody has it."""
    path = tmp_path_factory.mktemp("file") / "small.py"
    path.write_text(SWEEP_FILE)
    return path, sweep.load_file(path)[0]


@pytest.fixture(scope="module")
def expected(made):
    """The rows on one device in one process, in memory."""
    found = sweep.run(made[1]).columns
    assert len(found["total"]) == ROWS
    return found


@pytest.fixture(scope="module")
def forked(made, tmp_path_factory):
    """The folder with everything that ran elsewhere, and what the forker said."""
    folder = tmp_path_factory.mktemp("forked")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(REPOSITORY),
    }
    seed = os.getpid()
    command = [sys.executable, "-c", FORKER, str(made[0]), str(folder), str(port), str(seed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    return folder, done.stdout.split()


def equal(found, expected):
    """To the last bit."""
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column, err_msg=name)


def tiles_of(folder):
    """(first, last) of every part."""
    names = sorted(path.name for path in (folder / "parts").glob("part-*"))
    return [tuple(int(n) for n in name.split(".")[0].split("-")[1:]) for name in names]


@pytest.mark.parametrize("chunk", [1, 7, 48, None])
def test_chunks_of_one_device(made, expected, tmp_path, chunk):
    result = sweep.run(made[1], tmp_path, chunk=chunk)
    equal(result.columns, expected)
    assert result.manifest["tiles"] == TILES
    if chunk is not None:
        # Chunks end with their group, of which there are two.
        assert len(tiles_of(tmp_path)) == -(-32 // chunk) + -(-16 // chunk)


@pytest.mark.parametrize("name", ["None", "1", "5", "11", "of-8"])
def test_eight_devices_give_the_same_bits(forked, expected, name):
    equal(sweep.load(forked[0] / f"devices-{name}").columns, expected)


def test_two_processes_of_a_cluster_give_the_same_bits(forked, expected):
    equal(sweep.load(forked[0] / "cluster").columns, expected)
    assert {first < TILES // 2 for first, _ in tiles_of(forked[0] / "cluster")} == {True, False}


def test_the_parts_of_the_other_process_are_whole(made, forked, expected):
    """One of two was killed, and the sweep resumes, here without a cluster."""
    folder = forked[0] / "half"
    there = sweep.load(folder, partial=True)
    ours = {tile for first, last in tiles_of(folder) for tile in range(first, last + 1)}
    assert set(range(TILES // 2)) <= ours and len(ours) < TILES
    assert not there.complete and there.num_rows >= ROWS // 2
    equal(sweep.run(made[1], folder).columns, expected)


def test_killed_at_random_moments_nothing_is_lost_or_twice(forked, expected):
    kills, there = map(int, forked[1])
    assert kills >= 3 and there < ROWS
    equal(sweep.load(forked[0] / "killed").columns, expected)


FIRST = dict(JAX_COORDINATOR_ADDRESS="first:1234")
OPEN_MPI_4 = dict(OMPI_MCA_orte_hnp_uri="1531576320.0;tcp://10.96.0.1:34911")
OMPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
FOURTH = dict(num_processes=4, process_id=3)


class TestLaunchers:
    @pytest.fixture(autouse=True)
    def nobody(self, monkeypatch):
        ours = ("SLURM_", "OMPI_", "PMI_", "JAX_NUM_PROC", "JAX_PROCESS", "JAX_COORDINATOR")
        for name in list(os.environ):
            if name.startswith(ours):
                monkeypatch.delenv(name)

    def test_alone(self, monkeypatch):
        assert not sweep.join_cluster()
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
        monkeypatch.setenv("SLURM_PROCID", "0")
        assert not sweep.join_cluster()

    @pytest.mark.parametrize(
        "launcher, given",
        [
            (dict(SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="3"), {}),
            (dict(OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="3", **OPEN_MPI_4), {}),
            (dict(OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="3", **FIRST), FOURTH),
            (dict(PMI_SIZE="4", PMI_RANK="3", **FIRST), FOURTH),
            (dict(JAX_NUM_PROCESSES="4", JAX_PROCESS_ID="3", **FIRST), FOURTH),
        ],
    )
    def test_a_launcher_is_seen(self, monkeypatch, launcher, given):
        joined = []
        join = lambda *, shutdown_timeout_seconds=0, **given: joined.append(given)
        monkeypatch.setattr(jax.distributed, "initialize", join)
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        assert sweep.join_cluster() and joined == [given]

    @pytest.mark.parametrize("names", [("PMI_SIZE", "PMI_RANK"), OMPI])
    def test_a_launcher_that_does_not_say_where_the_first_one_is(self, monkeypatch, names):
        for name, value in zip(names, ("4", "3")):
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match="set JAX_COORDINATOR_ADDRESS=HOST:PORT"):
            sweep.join_cluster()

    @pytest.mark.parametrize("size, rank", [("2", "2"), ("two", "0"), ("2", "-1")])
    def test_variables_that_make_no_sense(self, monkeypatch, size, rank):
        monkeypatch.setenv("PMI_SIZE", size)
        monkeypatch.setenv("PMI_RANK", rank)
        with pytest.raises(ValueError, match="PMI_SIZE = "):
            sweep.join_cluster()

    def test_others_that_do_not_answer(self, monkeypatch):
        def initialize(**given):
            raise RuntimeError("deadline exceeded")

        monkeypatch.setattr(jax.distributed, "initialize", initialize)
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
        monkeypatch.setenv("SLURM_PROCID", "0")
        with pytest.raises(ValueError, match="the other 1 processes do not answer: deadline"):
            sweep.join_cluster()

    def test_a_process_of_a_cluster_has_its_share(self, monkeypatch, tmp_path):
        monkeypatch.setattr(jax, "process_count", lambda: 3)
        fn = lambda config, key: dict(y=config["x"])
        made = Sweep([Axis("x", [1.0, 2.0, 3.0, 4.0])], fn, width=1)
        rows = []
        for rank in range(3):
            monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
            before = sum(rows)
            rows.append(sweep.run(made, tmp_path).num_rows - before)
        assert rows == [1, 1, 2] and sweep.load(tmp_path).complete
