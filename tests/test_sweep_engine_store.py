"""The sweep engine: what lasts. Parts, resuming, memory, locks, watching, and the command."""

import contextlib
import importlib.util
import io
import json
import os
import re
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import sweep
from moejax.cli import main
from moejax.sweep import Axis, Bar, JsonLog, Sweep, Watch, _pace, _program
from tests.conftest import REPOSITORY


def fn(config, key):
    noise = jax.random.uniform(key, (4,)) * config["a"]
    return dict(total=noise.sum(), place=jnp.argmax(noise))


def about(a):
    return dict(source="low" if a < 1 else "high")


def made(count=11, **options):
    """22 rows in tiles of three."""
    given = dict(seeds=2, width=3, about=about) | options
    return Sweep([Axis("a", np.linspace(0.5, 1.5, count))], fn, **given)


@pytest.fixture(scope="module")
def expected():
    """The rows, in memory."""
    return sweep.run(made()).columns


def equal(found, expected):
    """To the last bit."""
    assert list(found) == list(expected)
    for name, column in expected.items():
        assert found[name].dtype == column.dtype
        np.testing.assert_array_equal(found[name], column, err_msg=name)


def parts(folder):
    return sorted(path.name for path in (folder / "parts").iterdir())


@pytest.fixture
def absent(monkeypatch):
    """Hides a package from those who look before they import."""
    real = importlib.util.find_spec

    def hide(package):
        look = lambda name, *more: None if name == package else real(name, *more)
        monkeypatch.setattr(importlib.util, "find_spec", look)

    return hide


class TestParts:
    @pytest.mark.parametrize("chunk, number", [(1, 8), (3, 3), (8, 1), (100, 1), (None, None)])
    def test_rows_do_not_depend_on_chunks(self, tmp_path, expected, chunk, number):
        result = sweep.run(made(), tmp_path, chunk=chunk)
        equal(result.columns, expected)
        assert number is None or len(parts(tmp_path)) == number
        equal(sweep.load(tmp_path).columns, expected)

    def test_without_pyarrow(self, tmp_path, expected, absent):
        absent("pyarrow")
        result = sweep.run(made(), tmp_path, chunk=3)
        assert [name.split(".")[1] for name in parts(tmp_path)] == ["npz"] * 3
        equal(result.columns, expected)

    def test_parquet_is_a_table_for_everybody(self, tmp_path, expected):
        parquet = pytest.importorskip("pyarrow.parquet")
        sweep.run(made(), tmp_path, chunk=8)
        (path,) = (tmp_path / "parts").iterdir()
        table = parquet.read_table(path)
        assert table.column_names == ["row", *expected]
        order = np.argsort(table["row"].to_numpy())
        assert np.array(table["source"].to_pylist())[order].tolist() == expected["source"].tolist()
        np.testing.assert_array_equal(table["total"].to_numpy()[order], expected["total"])

    def test_manifest(self, tmp_path):
        result = sweep.run(made(), tmp_path)
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        assert manifest == result.manifest
        wanted = dict(format=1, rows=22, tiles=8, width=3, seeds=[0, 1], shape=[11, 2], file=None)
        assert {name: manifest[name] for name in wanted} == wanted
        assert manifest["axes"] == [dict(name="a", kind="traced"), dict(name="seed", kind="seed")]
        assert manifest["columns"]["total"] == dict(dtype="float32", role="value")
        assert manifest["versions"]["jax"] == jax.__version__
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["axes"]["product"][0]["values"] == np.linspace(0.5, 1.5, 11).tolist()

    def test_the_documentation_names_every_key(self, tmp_path):
        text = (REPOSITORY / "docs" / "storage.md").read_text()
        manifest = sweep.run(made(), tmp_path).manifest
        table = text.split("## `manifest.json`")[1].split("## `config.json`")[0]
        documented = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", table, re.M)))
        assert sorted(documented) == sorted(manifest)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [".lock", ".lock-manifest", "config.json", "manifest.json", "parts"]
        assert all(name in text for name in names)

    def test_config_hash_is_that_of_the_content(self, tmp_path):
        hash_of = lambda sweep_, name: sweep.run(sweep_, tmp_path / name).manifest["config_hash"]
        table = {"x": jnp.arange(3.0), "y": jnp.arange(3.0) + 1}
        other = table | {"y": jnp.arange(3.0) + 2}
        use = lambda config, key: dict(x=config["t"].sum())
        first = hash_of(Sweep([Axis("t", table)], use), "1")
        assert first == hash_of(Sweep([Axis("t", dict(table))], use), "2")
        assert first != hash_of(Sweep([Axis("t", other)], use), "3")
        assert first != hash_of(Sweep([Axis("t", table)], use, width=1), "4")


class TestResume:
    def test_only_what_is_missing_is_run(self, tmp_path, expected):
        sweep.run(made(), tmp_path, chunk=1)
        names = parts(tmp_path)
        for name in names[2:5]:
            (tmp_path / "parts" / name).unlink()
        # What a power cut may leave of a part.
        broken = tmp_path / "parts" / names[6]
        broken.write_bytes(broken.read_bytes()[:50])
        (tmp_path / "parts" / f".{names[2]}.77").write_bytes(b"half")
        times = {name: (tmp_path / "parts" / name).stat().st_mtime_ns for name in names[:2]}
        with pytest.raises(ValueError, match="4 of 8 tiles are not there yet"):
            sweep.load(tmp_path)
        some = sweep.load(tmp_path, partial=True)
        assert not some.complete and some.num_rows == 22 - 4 * 3
        equal(sweep.run(made(), tmp_path, chunk=2).columns, expected)
        assert all((tmp_path / "parts" / name).stat().st_mtime_ns == t for name, t in times.items())
        assert parts(tmp_path) == [
            *names[:2], names[2].replace("2.", "3."), names[4], names[5], names[6], names[7],
        ]  # fmt: skip

    def test_a_complete_folder_is_not_run_again(self, tmp_path, expected):
        sweep.run(made(), tmp_path)
        broken = made(about=lambda a: about(a))
        with pytest.raises(ValueError, match="functions.about"):
            sweep.run(broken, tmp_path)
        watched = []
        equal(sweep.run(made(), tmp_path, progress=watched.append).columns, expected)
        assert [(watch.compiles, watch.rows, watch.total) for watch in watched] == [(0, 22, 22)]
        assert sweep.run(made(), tmp_path, resume=False, progress=watched.append).complete
        assert watched[-1].compiles == 1

    def test_another_config_is_refused_with_what_differs(self, tmp_path):
        sweep.run(made(), tmp_path)
        with pytest.raises(ValueError) as error:
            sweep.run(made(10, width=4), tmp_path)
        assert "holds rows of another config" in str(error.value)
        assert "width: 3 -> 4" in str(error.value)
        assert "axes.product.a.values: [0.5, 0.6, 0.7, " in str(error.value)
        assert "seeds" not in str(error.value).split("What changed")[1]

    def test_a_folder_without_a_row_takes_another_config(self, tmp_path, expected):
        def refuse(config, key):
            raise ValueError("no")

        refusing = lambda: Sweep([Axis("a", [1.0])], refuse)
        with pytest.raises(ValueError, match="every row was refused"):
            sweep.run(refusing(), tmp_path)
        # Another shard may be about to write.
        with pytest.raises(ValueError, match="another config"):
            sweep.run(made(), tmp_path, shard="1/2")
        equal(sweep.run(made(), tmp_path).columns, expected)
        with pytest.raises(ValueError, match="another config"):
            sweep.run(refusing(), tmp_path)

    def test_parts_of_another_config_are_refused(self, tmp_path):
        sweep.run(made(), tmp_path / "a", chunk=4)
        sweep.run(made(seeds=3), tmp_path / "b", chunk=4)
        name = parts(tmp_path / "b")[-1]
        (tmp_path / "b" / "parts" / name).rename(tmp_path / "a" / "parts" / name)
        with pytest.raises(ValueError, match="belongs to another sweep"):
            sweep.load(tmp_path / "a")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_interrupted_it_finishes_the_chunk(self, tmp_path, expected, number):
        before = signal.getsignal(number)
        stop = lambda watch: signal.raise_signal(number) if watch.parts == 1 else None
        with pytest.raises(KeyboardInterrupt):
            sweep.run(made(), tmp_path, chunk=2, progress=stop)
        assert signal.getsignal(number) is before
        there = sweep.load(tmp_path, partial=True)
        assert 0 < there.num_rows < 22 and not there.complete
        equal(sweep.run(made(), tmp_path).columns, expected)

    def test_a_second_interrupt_stops_at_once(self, tmp_path):
        def stop(watch):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            sweep.run(made(), tmp_path, progress=stop)
        assert sweep.run(made(), tmp_path).complete


class TestShards:
    def test_of_one_folder_or_of_several(self, tmp_path, expected):
        for shard in ("1/3", "3/3"):
            result = sweep.run(made(), tmp_path / "one", shard=shard, chunk=2)
            assert not result.complete
        with pytest.raises(ValueError, match="of 8 tiles are not there"):
            sweep.load(tmp_path / "one")
        assert sweep.run(made(), tmp_path / "one", shard="2/3").complete
        equal(sweep.load(tmp_path / "one").columns, expected)
        folders = [tmp_path / str(shard) for shard in (1, 2)]
        for at, folder in enumerate(folders, 1):
            sweep.run(made(), folder, shard=f"{at}/2")
        equal(sweep.load(*folders).columns, expected)
        # Another cut into shards may overlap with what is there.
        sweep.run(made(), folders[0], shard="2/3", chunk=1)
        equal(sweep.load(*folders).columns, expected)

    def test_of_different_sweeps_do_not_mix(self, tmp_path):
        sweep.run(made(), tmp_path / "a", shard="1/2")
        sweep.run(made(seeds=3), tmp_path / "b", shard="2/2")
        with pytest.raises(ValueError, match="holds another sweep than"):
            sweep.load(tmp_path / "a", tmp_path / "b")

    def test_a_folder_has_one_writer(self, tmp_path):
        refused = []

        def another(watch, shard=None):
            if not refused:
                with pytest.raises(ValueError, match="is writing here") as error:
                    sweep.run(made(), tmp_path, shard=shard)
                refused.append(str(error.value))

        sweep.run(made(), tmp_path, progress=another)
        assert f"process {os.getpid()} on " in refused.pop()
        other = tmp_path / "shards"
        sweep.run(made(), other, shard="1/2", progress=lambda watch: _refused(other, "1/2"))
        # The other shard may write at the same time.
        sweep.run(made(), other, shard="2/2", progress=lambda watch: _refused(other, None))
        assert sweep.load(other).complete


def _refused(folder, shard):
    with pytest.raises(ValueError, match="is writing here"):
        sweep.run(made(), folder, shard=shard)


class TestMemory:
    @pytest.fixture
    def exhausted(self, monkeypatch):
        """A device that has room for some launches at a time."""

        def limit(room):
            flying = []
            launch, get = _program.Program.launch, jax.device_get

            def start(program, rows):
                if len(flying) >= room:
                    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
                flying.append(rows)
                return launch(program, rows)

            def fetch(results):
                del flying[: len(results)]
                return get(results)

            monkeypatch.setattr(_program.Program, "launch", start)
            monkeypatch.setattr("moejax.sweep._chunks.jax.device_get", fetch)
            monkeypatch.setattr("moejax.sweep._pace.Pace.halve", _counted(flying))

        return limit

    @pytest.mark.parametrize("room, chunk", [(5, 8), (2, 8), (1, 4), (1, None)])
    def test_exhausted_it_halves_and_loses_none(self, tmp_path, expected, exhausted, room, chunk):
        exhausted(room)
        equal(sweep.run(made(), tmp_path, chunk=chunk).columns, expected)
        assert max(len(range(*_ends(name))) + 1 for name in parts(tmp_path)) <= max(room, 1)

    def test_exhausted_when_results_arrive(self, monkeypatch, tmp_path, expected):
        get, calls, watched = jax.device_get, [], []

        def fetch(results):
            calls.append(results)
            if len(calls) == 2:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            return get(results)

        monkeypatch.setattr("moejax.sweep._chunks.jax.device_get", fetch)
        result = sweep.run(made(), tmp_path, chunk=2, progress=watched.append)
        equal(result.columns, expected)
        assert len(calls) > 4 and max(watch.rows for watch in watched) == watched[-1].rows == 22

    def test_a_tile_that_never_fits_is_told(self, exhausted):
        exhausted(0)
        with pytest.raises(ValueError, match="width 3 does not fit the device: RESOURCE_EXHAUSTED"):
            sweep.run(made())

    def test_other_errors_of_the_device_are_not_hidden(self, monkeypatch):
        def launch(program, rows):
            raise jax.errors.JaxRuntimeError("INTERNAL: broken")

        monkeypatch.setattr(_program.Program, "launch", launch)
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
            sweep.run(made())

    def test_chunks_keep_to_the_budget(self, tmp_path, expected):
        """Of two chunks of results on the device, and eight copies of a table of 4 columns."""
        programs = []

        def remember(program, rows):
            programs.append(program)
            return launch(program, rows)

        launch = _program.Program.launch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_program.Program, "launch", remember)
            sweep.run(made())
        program = programs[0]
        for launches, largest in ((1, 1), (3, 3)):
            table = program.out_bytes + 8 * 4 * 3
            memory = program.num_bytes + launches * (2 * program.out_bytes + 8 * table)
            folder = tmp_path / str(launches)
            equal(sweep.run(made(), folder, chunk=8, memory=memory).columns, expected)
            sizes = [last - first + 1 for first, last in map(_ends, parts(folder))]
            assert max(sizes) == largest and sum(sizes) == 8


def _ends(name):
    """First and last tile of a part."""
    return tuple(int(number) for number in name.split(".")[0].split("-")[1:])


def _counted(flying):
    """`Pace.halve`, with the device's memory free again, as it is when results are dropped."""
    halve = _pace.Pace.halve

    def wrapped(pace, *arguments):
        flying.clear()
        return halve(pace, *arguments)

    return wrapped


class Terminal(io.StringIO):
    def isatty(self):
        return True


def watch(rows, total=4, **more):
    known = dict(rows_per_s=2.0, eta_s=30.0, compiles=1, devices=2, failed=0, parts=0) | more
    return Watch(rows=rows, total=total, **known)


class TestWatching:
    @pytest.fixture(autouse=True)
    def terminal(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "100")

    def test_a_narrow_terminal_is_not_wrapped(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        stream = Terminal()
        Bar("sweep", stream)(watch(4))
        assert stream.getvalue() == f"\rsweep [{'#' * 20}] 4/4 rows, \n"

    def test_a_terminal_sees_one_line(self):
        stream = Terminal()
        bar = Bar("sweep", stream)
        bar(watch(1))
        bar(watch(2))  # too soon after the first to be drawn
        bar(watch(4, failed=3))
        bar.close()
        first, last = stream.getvalue().removeprefix("\r").split("\r")
        known = f"sweep [{'#' * 5}{'.' * 15}] 1/4 rows, 2/s, 30 s left, 1 compiled, 2 dev"
        assert first.rstrip() == known and len(first) == len(last.rstrip("\n")) == 99
        assert last.rstrip().endswith("4/4 rows, 2/s, 1 compiled, 2 dev, 3 failed")
        assert stream.getvalue().count("\n") == 1

    @pytest.mark.parametrize("seconds, said", [(100, "100 s"), (600, "10 min"), (9000, "2.5 h")])
    def test_time_left(self, seconds, said):
        stream = Terminal()
        bar = Bar("sweep", stream)
        bar(watch(1, eta_s=seconds))
        assert f"{said} left" in stream.getvalue() and not stream.getvalue().endswith("\n")
        bar.close()
        bar.close()
        assert stream.getvalue().count("\n") == 1

    def test_a_file_sees_nothing(self, capsys):
        stream = io.StringIO()
        Bar("sweep", stream)(watch(4))
        Bar("sweep")(watch(4))
        assert stream.getvalue() == "" and capsys.readouterr() == ("", "")

    def test_log(self):
        stream = io.StringIO()
        sweep.run(made(), chunk=4, progress=JsonLog(stream))
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert all(line["total"] == 22 and line["devices"] == 1 for line in lines)
        rows = [line["rows"] for line in lines]
        assert rows == sorted(rows) and (rows[0], rows[-1]) == (0, 22)
        assert lines[-1]["compiles"] == 1 and lines[-1]["parts"] == 2
        assert "eta_s" not in lines[0] and lines[-1]["rows_per_s"] > 0


class TestResult:
    def test_columns_by_name(self, tmp_path, expected):
        result = sweep.run(made(), tmp_path)
        assert result.axes == ("a", "seed") and result.num_rows == 22
        np.testing.assert_array_equal(result["total"], expected["total"])
        with pytest.raises(ValueError, match="unknown column 'totl'; did you mean 'total'?"):
            result["totl"]
        assert repr(result) == "Result(22 rows, 6 columns)"

    @pytest.mark.parametrize("package", ["pandas", "xarray"])
    def test_packages_that_are_not_there(self, package, monkeypatch):
        monkeypatch.setitem(sys.modules, package, None)
        result = sweep.run(made())
        with pytest.raises(ValueError, match=rf"{package} is not .*moejax\[frames\]"):
            getattr(result, f"to_{package}")()

    def test_pandas(self, expected):
        pytest.importorskip("pandas")
        frame = sweep.run(made()).to_pandas()
        assert list(frame) == list(expected)
        np.testing.assert_array_equal(frame["total"], expected["total"])

    def test_xarray(self, expected):
        xarray = pytest.importorskip("xarray")
        data = sweep.run(made()).to_xarray()
        assert isinstance(data, xarray.Dataset) and dict(data.sizes) == {"a": 11, "seed": 2}
        found = data["total"].sel(seed=1).values
        np.testing.assert_array_equal(found, expected["total"][1::2])

    def test_of_no_sweep(self, tmp_path):
        with pytest.raises(ValueError, match="holds no results of a sweep"):
            sweep.load(tmp_path)
        (tmp_path / "manifest.json").write_text('{"format": 9}')
        with pytest.raises(ValueError, match="format 9: allowed is 1"):
            sweep.load(tmp_path)


FILE = """\
import jax.numpy as jnp
from moejax.sweep import Axis, Sweep


def SWEEP(*, scale="1"):
    fn = lambda config, key: dict(y_ms=config["x"] * float(scale))
    return Sweep([Axis("x", [1.0, 2.0, 4.0])], fn, width=1)


def summary(table):
    return f"{len(table['x'])} rows, {table['y_ms'].sum():g} ms"
"""


class TestCommand:
    @pytest.fixture
    def command(self, tmp_path):
        (tmp_path / "file.py").write_text(FILE)

        def run(*options):
            text, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(errors):
                arguments = ["run", tmp_path / "file.py", "--out", tmp_path / "out", *options]
                status = main([str(argument) for argument in arguments])
            return status, text.getvalue(), errors.getvalue()

        return run

    def test_rows_and_summary(self, command, tmp_path):
        assert command() == (0, f"{tmp_path}/out: 3 rows\n3 rows, 7 ms\n", "")
        assert sweep.load(tmp_path / "out").manifest["file"] == str(tmp_path / "file.py")
        # Nothing is left to do, and the same is said.
        assert command() == (0, f"{tmp_path}/out: 3 rows\n3 rows, 7 ms\n", "")
        status, out, errors = command("--set", "x=1,2")
        assert (status, out) == (2, "") and "x.values: [1.0, 2.0, 4.0] -> [1.0, 2.0]" in errors
        assert command("--set", "x=1:3:3", "--fresh")[1].endswith("3 rows, 6 ms\n")

    @pytest.mark.parametrize(
        "change, seeds, width",
        [("seeds=3", [0, 1, 2], 1), ("seeds=3,5", [3, 5], 1), ("width=2", [0], 2)],
    )
    def test_seeds_and_width(self, command, tmp_path, change, seeds, width):
        assert command("--set", change)[0] == 0
        manifest = sweep.load(tmp_path / "out").manifest
        assert (manifest["seeds"], manifest["width"]) == (seeds, width)

    @pytest.mark.parametrize("change", ["seeds=1.5", "seeds=many", "width=1,2", "width=x"])
    def test_seeds_and_width_that_make_no_sense(self, command, change):
        status, out, errors = command("--set", change)
        assert (status, out) == (2, "") and change.split("=")[0] in errors and "allowed" in errors

    def test_options_of_the_file_are_part_of_the_config(self, command):
        assert command("--option", "scale=2")[1].endswith("3 rows, 14 ms\n")
        assert "options.scale: 2 -> 3" in command("--option", "scale=3")[2]
        status, _, errors = command("--option", "scal=3")
        assert status == 2 and "has no option 'scal'; did you mean 'scale'?" in errors

    def test_shards_and_log(self, command, tmp_path):
        status, out, _ = command("--shard", "1/2", "--json-log", tmp_path / "log.jsonl")
        assert (status, out) == (0, f"{tmp_path}/out: 1 rows of 3; others are not done yet\n")
        last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
        assert last["rows"] == 1
        assert command("--shard", "2/2")[1].endswith("3 rows, 7 ms\n")

    def test_interrupted_it_says_how_to_go_on(self, command, tmp_path, monkeypatch):
        def stop(self):
            yield lambda watch: signal.raise_signal(signal.SIGINT) if watch.parts == 1 else None

        monkeypatch.setattr("moejax.cli._run._watched", contextlib.contextmanager(stop))
        status, out, errors = command("--chunk", 1)
        assert (status, errors) == (130, "moejax run: interrupted\n")
        rows = sweep.load(tmp_path / "out", partial=True).num_rows
        told = f"{tmp_path}/out: {rows} of 3 rows; the same command goes on from here\n"
        assert out == told and rows < 3

    @pytest.mark.parametrize("fresh", [False, True])
    def test_interrupted_before_its_first_row(self, command, tmp_path, fresh):
        stops = "def stop(x):\n    raise KeyboardInterrupt\n\n\ndef summary"
        text = FILE.replace("width=1", "width=1, prepare=stop").replace("def summary", stops)
        (tmp_path / "file.py").write_text(text)
        again = "the command without --fresh" if fresh else "the same command"
        status, out, errors = command(*["--fresh"] * fresh)
        assert (status, errors) == (130, "moejax run: interrupted\n")
        assert out == f"{tmp_path}/out: 0 of 3 rows; {again} goes on from here\n"

    def test_a_misspelt_option(self, command):
        with pytest.raises(SystemExit, match="2"):
            command("--chunks=3")
        with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit):
            main(["run", "file.py", "--resme"])
        told = "moejax run: unrecognized arguments: --resme; did you mean '--resume'?"
        assert errors.getvalue().startswith(told)

    def test_rows_that_are_not_okay_are_told(self, command, tmp_path):
        text = FILE.replace("width=1", "width=1, prepare=prepare").replace(
            "def summary",
            "def prepare(x):\n    if x > 3:\n        raise ValueError('too much')\n    return {}\n"
            "\n\ndef summary",
        )
        (tmp_path / "file.py").write_text(text)
        out = command()[1].splitlines()
        assert out[1] == "1 rows are not okay: failed: too much" and out[2] == "3 rows, nan ms"

    def test_pictures(self, command, tmp_path, absent):
        more = "\ndef figures(table, *, scale='1'):\n    from moejax import plot\n"
        more += "    return {f'empty{scale}': plot.figure()[0]}\n"
        (tmp_path / "file.py").write_text(FILE + more)
        assert command("--no-figures")[1].count("\n") == 2
        pytest.importorskip("matplotlib")
        out = command("--option", "scale=2", "--fresh")[1]
        assert out.splitlines()[-1] == f"wrote {tmp_path}/out/empty2.png"
        absent("matplotlib")
        assert "no pictures: matplotlib is not installed" in command("--option", "scale=2")[1]

    def test_out_is_results_and_the_name_of_the_file(self, tmp_path, monkeypatch, capsys):
        (tmp_path / "file.py").write_text(FILE)
        monkeypatch.chdir(tmp_path)
        assert main(["run", "file.py"]) == 0
        assert capsys.readouterr().out.startswith("results/file: 3 rows\n")
