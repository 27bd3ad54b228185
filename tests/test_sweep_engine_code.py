"""The sweep engine: rows of other code are other rows. What the hash of a function covers."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest

from moejax import sweep
from moejax.cli import main
from moejax.sweep import Axis, Sweep


FILE = """
import functools
import jax.numpy as jnp
import beside_a_sweep
from moejax.sweep import Axis, Sweep

GAIN = 2.0
TABLE = {"b": [1.0, 2.0], "a": frozenset(["x", "y", "z"])}
UNUSED = 1

class Scale:
    factor = 3.0

    def of(self, x):
        return shifted(x) * self.factor

def shifted(x):
    return x + 1.0

def inner(x):
    return Scale().of(x) * GAIN * TABLE["b"][0] + beside_a_sweep.offset(x)

def double(x):
    return 2 * x

def made(bias):
    def fn(config, key):
        return {"y": inner(config["x"]) + bias + config["work"](config["x"])}
    return fn

SWEEP = Sweep(
    [Axis("x", [1.0, 2.0]), Axis("work", {"double": double, "log": jnp.log}, static=True)],
    made(bias=0.5),
)
"""
BESIDE = "SHIFT = 10.0\n\n\ndef offset(x):\n    return x * 0 + SHIFT\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(change=("", ""), beside=("", "")):
        (tmp_path / "file.py").write_text(FILE.replace(*change) if change[0] else FILE)
        text = BESIDE.replace(*beside) if beside[0] else BESIDE
        (tmp_path / "beside_a_sweep.py").write_text(text)
        sys.modules.pop("beside_a_sweep", None)
        return sweep.load_file(tmp_path / "file.py")[0].functions

    # Without a cache of bytecode: it goes by the second of a change.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield write
    sys.modules.pop("beside_a_sweep", None)


@pytest.mark.parametrize(
    "change, role",
    [
        (("GAIN = 2.0", "GAIN = 4.0"), "fn"),
        (('"b": [1.0', '"b": [7.0'), "fn"),
        (('"y", "z"', '"y", "w"'), "fn"),
        (("* GAIN *", "/ GAIN *"), "fn"),
        (("x + 1.0", "x + 2.0"), "fn"),
        (("factor = 3.0", "factor = 4.0"), "fn"),
        (("bias=0.5", "bias=1.5"), "fn"),
        (("return 2 * x", "return 3 * x"), "axis work"),
        (("jnp.log", "jnp.log2"), "axis work"),
    ],
)
def test_what_decides_rows_is_in_the_hash(files, change, role):
    before, after = files(), files(change)
    assert [name for name in before if before[name] != after[name]] == [role]


def test_other_files_of_ones_own_are_too(files):
    assert files()["fn"] != files(beside=("SHIFT = 10", "SHIFT = 11"))["fn"]
    assert files()["fn"] != files(beside=("x * 0", "x * 1"))["fn"]


def test_what_does_not_decide_them_is_not(files):
    assert files() == files(("UNUSED = 1", "UNUSED = 2"))
    assert files() == files(("def double", "def other(x):\n    return x\n\ndef double"))


def test_every_process_has_the_same(files, tmp_path):
    said = []
    expected = files()
    text = "import sys; from moejax import sweep; print(sweep.load_file(sys.argv[1])[0].functions)"
    for seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", text, tmp_path / "file.py"]
        ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        said.append(ran.stdout.strip())
    assert said == [str(expected)] * 2


def test_a_changed_constant_is_refused_by_the_command(files, tmp_path, capsys):
    files()
    command = ["run", str(tmp_path / "file.py"), "--out", str(tmp_path / "out")]
    assert main(command) == 0 and main(command) == 0
    files(("GAIN = 2.0", "GAIN = 4.0"))
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "holds rows of another config" in told and "functions.fn: " in told
    assert "functions.axis" not in told


def table_of(a, memo):
    return dict(b=memo.setdefault(a, a + 1))


def test_a_table_that_fills_up_while_it_runs_is_no_change(tmp_path):
    prepare = _by_name(functools.partial(table_of, memo={}))
    made = Sweep([Axis("a", [1.0, 2.0])], lambda c, key: {"y": c["b"]}, prepare=prepare)
    first = sweep.run(made, tmp_path).columns
    np.testing.assert_array_equal(sweep.run(made, tmp_path)["y"], first["y"])


def _by_name(prepare):
    return lambda a: prepare(a)


def test_methods_and_partials_have_what_they_hold():
    class Gain:
        def __init__(self, by):
            self.by = by

        def __call__(self, config, key, more=0.0):
            return {"y": config["a"] * self.by + more}

        def __repr__(self):
            return f"Gain({self.by})"

    def hash_of(fn):
        return Sweep([Axis("a", [1.0])], fn).functions["fn"]

    assert hash_of(Gain(1.0)) == hash_of(Gain(1.0)) != hash_of(Gain(2.0))
    assert hash_of(Gain(1.0).__call__) != hash_of(Gain(2.0).__call__)
    half, whole = (functools.partial(Gain(1.0), more=more) for more in (0.5, 1.0))
    assert hash_of(half) != hash_of(whole)
