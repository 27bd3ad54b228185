"""The command line: what it prints, and that a mistake is one line on stderr and status 2."""

import csv
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from moejax import hardware, models
from moejax.cli._format import table
from moejax.serving import LIMITS, POLICIES


MODEL, SYSTEM = "gpt-oss-20b", "1xb200-hbm-pim"
# From the checkpoint's config: 24 layers, every second one with a window of 128 tokens.
LAYERS, HIDDEN, INNER, EXPERTS, KV_HEADS, HEAD_DIM = 24, 2880, 2880, 32, 8, 64
BATCH, CONTEXT = 4, 100_000
# A sweep file; its axes are to be filled in.
AXES = """\
from moejax.sweep import Axis, Sweep

SWEEP = Sweep([{}], lambda config, key: dict(y=2 * config["x"]))
"""


@pytest.fixture(scope="module", autouse=True)
def own_settings(tmp_path_factory):
    """Compiled programs in a folder of their own, little optimized: they run once."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def eval_arguments(*more, **changes):
    """A small `moejax eval`; `None` leaves an option out."""
    options = dict(model=MODEL, system=SYSTEM, batch=BATCH, context=CONTEXT, policy="no_exp,sieve")
    options |= dict(seeds=2) | changes
    given = {name: value for name, value in options.items() if value is not None}
    return ["eval", *(f"--{name}={value}" for name, value in given.items()), *more]


def setting(*changes):
    return [word for change in changes for word in ("--set", change)]


def rows_of(text):
    """The table that output starts with, as dicts of cells, and the lines after it."""
    head, _, foot = text.partition("\n\n")
    header, *lines = (re.split(r"\s{2,}", line.strip()) for line in head.splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines], foot.splitlines()


def milliseconds(row):
    """(gpu, pim, comm) of a row."""
    return [float(part) for part in row["gpu/pim/comm_ms"].split("/")]


def memory_gb(foot):
    line = next(line for line in foot if line.startswith("memory:"))
    return float(line.split()[1])


def config(folder, **changes):
    """A small Mixtral as Hugging Face stores it."""
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=1000)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=4)
    sizes |= dict(num_local_experts=4, num_experts_per_tok=4)
    path = folder / "config.json"
    path.write_text(json.dumps(dict(model_type="mixtral") | sizes | changes))
    return path


class TestMistakes:
    @pytest.mark.parametrize(
        "changes, said",
        [
            (dict(model="gpt-oss-20"), "unknown model 'gpt-oss-20'; did you mean 'gpt-oss-20b'?"),
            (dict(model=""), "unknown model ''"),
            (dict(system="1xb200-hbm-pin"), "'hbm-pin'; did you mean 'hbm-pim'?"),
            (dict(system="1xb20-hbm-pim"), "did you mean '1xb200-hbm-pim'?"),
            (dict(policy="no_exp,siev"), "unknown policy 'siev'; did you mean 'sieve'?"),
            (dict(policy=""), "unknown policy ''"),
            (dict(precision="fp9"), "unknown precision 'fp9'; did you mean 'fp8'?"),
            (dict(batch=0), "--batch: '0': allowed is a whole number from 1"),
            (dict(batch=-3), "'-3': allowed is"),
            (dict(batch=1.5), "'1.5': allowed is"),
            (dict(batch=10**12), "allowed is a whole number from 1 to 2147483647"),
            (dict(context=-1), "--context: '-1': allowed is a finite number"),
            (dict(context="inf"), "--context: 'inf': allowed is"),
            (dict(context="long"), "--context: 'long': allowed is"),
            (dict(seeds=0), "--seeds: '0': allowed is"),
            (dict(seed=-1), "--seed: '-1': allowed is"),
            (dict(correlation=1), "correlation = 1.0: allowed is [0, 1)"),
            (dict(model=None), "required: --model (see moejax eval --help)"),
            (dict(system=None, batch=None), "required: --system, --batch"),
            (dict(polcy="sieve"), "unrecognized arguments: --polcy=sieve"),
        ],
    )
    def test_of_eval(self, refused, changes, said):
        assert said in refused(*eval_arguments(**changes))

    @pytest.mark.parametrize(
        "change, said",
        [
            ("pim.macs_per_uni=32", "'pim.macs_per_uni'; did you mean 'pim.macs_per_unit'?"),
            ("model.topk=3", "unknown field 'topk'; did you mean 'top_k'?"),
            ("pim.macs_per_unit", "--set pim.macs_per_unit: allowed is PATH=VALUE"),
            ("=3", "unknown field ''"),
            ("pim.macs_per_unit=many", "pim.macs_per_unit = 'many': allowed is a number"),
            ("pim.contention=None", "pim.contention = 'None': allowed is a number"),
            ("pim.contention=[0, 1]", "allowed is a number"),
            ("gpu.hbm_bandwidth=0", "GPU.hbm_bandwidth = 0.0: allowed is (0, "),
            ("gpu.hbm_bandwidth=1e39", "GPU.hbm_bandwidth = inf: allowed is (0, "),
            ("pim.contention=2", "contention = 2.0: allowed is [0, 1]"),
            ("pim.macs_per_unit=3.5", "macs_per_unit = 3.5: allowed is a whole number"),
            ("pim.order=outer", "order = 'outer': allowed is one of 'token_outer'"),
            ("link.dedup=perhaps", "link.dedup=perhaps: allowed is true or false"),
            ("pim=3", "pim is no number, word or truth value"),
            ("model.layers=3", "layers is no number, word or truth value"),
            ("num_gpus=0", "num_gpus = 0: allowed is an int of at least 1"),
            ("num_gpus=99999999999", "num_gpus=99999999999: too large"),
            ("attention_tp=2", "attention_tp = 2: allowed is a divisor of 1"),
            ("model.top_k=33", "top_k = 33: allowed is at most num_experts = 32"),
            ("model.top_k=2.5", "top_k = 2.5: allowed is a whole number"),
            ("model.precision.kv_bits=0", "kv_bits = 0.0: allowed is (0, 64]"),
        ],
    )
    def test_of_set(self, refused, change, said):
        assert said in refused(*eval_arguments(*setting(change)))

    def test_of_configs(self, refused, tmp_path):
        path = tmp_path / "config.json"
        one = lambda: refused(*eval_arguments(model=path))
        assert f"{path}: no config.json to read" in one()
        assert "no config.json to read" in refused(*eval_arguments(model=tmp_path))
        path.write_text('{"model_type": ')
        assert f"{path}: not valid JSON" in one()
        path.write_text("[]")
        assert "holds no JSON object" in one()
        path.write_text('{"model_type": "llama", "hidden_size": 64}')
        assert "unknown model_type 'llama' (supported: mixtral," in one()
        path.write_text('{"model_type": "mixtral", "hidden_size": 64}')
        assert "missing key" in one()
        config(tmp_path, num_experts_per_tok=5)
        assert "top_k = 5: allowed is at most num_experts = 4" in one()

    def test_of_traces(self, refused, tmp_path):
        path = tmp_path / "trace.json"
        trace = lambda *more, **changes: refused(*eval_arguments(*more, trace=path, **changes))
        assert f"{path}: no such file" in trace()
        path.write_text("not json")
        assert "neither an npz nor JSON" in trace()
        path.write_text(json.dumps({"0": [[0, 1], [2, 3]], "1": [[0, 3], [1, 2]]}))
        assert "trace of an unnamed model with (layers, experts, top_k) = (2, 32, 2)" in trace()
        small = config(tmp_path, num_experts_per_tok=2)
        assert "batch_size = 4 is more than the trace's 1 sequences" in trace(model=small)
        assert "--reuse draws more than one token" in trace(model=small)
        assert "is more than the trace's 2 valid tokens" in trace("--reuse", model=small)
        other = trace(*setting("model.top_k=1"), model=small, batch=1)
        assert "(2, 4, 2), but" in other and "has (2, 4, 1)" in other
        assert "--reuse: allowed with --trace only" in refused(*eval_arguments("--reuse"))
        assert "--correlation: allowed without --trace" in trace(correlation=0.5)

    def test_of_measured_traces(self, refused, data_dir):
        measured = data_dir / "mixtral-8x7b" / "mtbench-math.npz"
        line = refused(*eval_arguments(trace=measured))
        assert "trace of mixtral-8x7b with (layers, experts, top_k) = (32, 8, 2)" in line
        assert "asked for gpt-oss-20b with (24, 32, 4)" in line
        counts = data_dir / "mixtral-8x7b" / "popularity.npz"
        assert "holds counts, not a trace" in refused("trace", counts)

    def test_of_pim_tables(self, refused, tmp_path):
        path = tmp_path / "times.csv"
        one = lambda **changes: refused(*eval_arguments(**{"pim-table": path}, **changes))
        assert f"{path}: No such file or directory" in one()
        path.write_text("outputs,inputs,tokens,ns\n")
        assert f"{path}, line 1: missing column 'order'" in one()
        path.write_text("outputs,inputs,tokens,order,ns\n8,8,1,token_outer,fast\n")
        assert f"{path}, line 2, column ns: 'fast' is not a number" in one()
        model = models.from_hf_config(config(tmp_path))
        write_table(path, hardware.get(SYSTEM).pim, model, most_tokens=4)
        assert "no PIM times for 5760 x 2880" in one()
        small = dict(model=tmp_path / "config.json", batch=8)
        assert "the PIM table covers 4 tokens of 1024 x 256: allowed is max_batch = 8" in one(
            **small
        )

    @pytest.mark.parametrize(
        "text, said",
        [
            (None, "no sweep file"),
            ("SWEEP = (:\n", ", line 1: invalid syntax"),
            ("import no_such_module\n", "No module named 'no_such_module'"),
            ("cases = 3\n", "defines no SWEEP"),
            ("SWEEP = 3\n", "defines no SWEEP"),
            ("SWEEP = lambda: 3\n", "SWEEP gave a int: allowed is a Sweep"),
            ("def SWEEP():\n    raise ValueError('speed\\n= 0')\n", "speed = 0"),
            (AXES.format("Axis('x', [])"), "axis 'x' has no values"),
            (AXES.format("Axis('x', [1, 2, 1])"), "axis 'x' has 1 more than once"),
            (
                AXES.format("Axis('xy', [1, 2])"),
                "config has no 'x'; did you mean 'xy'?",
            ),
        ],
    )
    def test_of_sweep_files(self, refused, tmp_path, text, said):
        path = tmp_path / "sweep.py"
        if text is not None:
            path.write_text(text)
        assert said in refused("run", path, "--out", tmp_path / "out")

    def test_of_an_output_folder_shows_before_anything_is_computed(self, refused, tmp_path):
        (tmp_path / "out").write_text("a file")
        (tmp_path / "sweep.py").write_text(AXES.format("Axis('x', [1])"))
        line = refused("run", tmp_path / "sweep.py", "--out", tmp_path / "out")
        assert f"{tmp_path / 'out'}: File exists" in line

    @pytest.mark.parametrize(
        "options, said",
        [
            (("--set", "xs=1"), "no axis 'xs'; did you mean 'x'? (known: x, seeds, width, bucket)"),
            (("--set", "x=fast"), "axis 'x': ['fast']: allowed are numbers"),
            (("--set", "x"), "--set x: allowed is NAME=VALUE"),
            (("--set", "x=1", "--set", "x=2"), "--set x is given twice"),
            (("--set", "x=1,,2"), "values '1,,2': allowed are values with commas"),
            (("--set", "x=1:2:0"), "allowed are low:high:count"),
            (("--trace", "a.npz"), "has no option 'trace' (it has none)"),
            (("--chunk", 0), "--chunk: '0': allowed is a whole number from 1"),
            (("--shard", "3/2"), "shard = '3/2': allowed is '1/8' to '8/8'"),
            (("--devices", 99), "devices = 99: allowed is 1 to"),
            (("--memory", 0), "--memory: '0': allowed is a positive number"),
            (("--fresh", "--resume"), "not allowed with argument"),
            (("--fresh", "--shard", "1/2"), "would remove the rows of the others"),
            (("--memory", 1e-12), "choose a smaller width"),
        ],
    )
    def test_of_options_of_run(self, refused, tmp_path, options, said):
        (tmp_path / "sweep.py").write_text(AXES.format("Axis('x', [1])"))
        assert said in refused("run", tmp_path / "sweep.py", "--out", tmp_path / "out", *options)

    @pytest.mark.parametrize(
        "arguments, said",
        [
            ((), "required: COMMAND (see moejax --help)"),
            (("evaluate",), "invalid choice: 'evaluate'"),
            (("list",), "required: what"),
            (("list", "systems"), "invalid choice: 'systems'"),
            (("list", "models", "gpt-oss-20"), "did you mean 'gpt-oss-20b'?"),
            (("list", "hardware", "b20"), "unknown hardware 'b20'; did you mean 'b200'?"),
            (("list", "hardware", "2xb200-hbm-pin"), "did you mean 'hbm-pim'?"),
            (("list", "policies", "siev"), "did you mean 'sieve'?"),
            (("run",), "required: file"),
            (("trace", "nothing.npz"), "nothing.npz: no such file"),
            (("trace", "nothing.npz", "--draws", 0), "--draws: '0': allowed is"),
            (("trace", "nothing.npz", "--num-experts", "x"), "--num-experts: 'x': allowed is"),
        ],
    )
    def test_of_other_commands(self, refused, arguments, said):
        assert said in refused(*arguments)


class TestEval:
    @pytest.fixture
    def evaluated(self, command):
        """Rows by policy and the lines below, of a small evaluation."""

        def run(*more, **changes):
            status, out, err = command(*eval_arguments(*more, **changes))
            assert (status, err) == (0, "")
            rows, foot = rows_of(out)
            return {row["policy"]: row for row in rows}, foot

        return run

    def test_prints_units_limits_and_where_numbers_come_from(self, evaluated):
        rows, foot = evaluated()
        assert list(rows) == ["no_exp", "sieve"]
        assert list(rows["sieve"]) == [
            "policy", "tbt_ms", "tok/s/user", "tok/s/gpu", "vs no_exp (95%)", "experts gpu/pim",
            "limited by", "gpu/pim/comm_ms", "scheduler_ms",
        ]  # fmt: skip
        assert all(row["limited by"] in LIMITS for row in rows.values())
        for row in rows.values():
            tbt = float(row["tbt_ms"])
            assert float(row["tok/s/user"]) == pytest.approx(1000 / tbt, rel=1e-2)
            assert float(row["tok/s/gpu"]) == pytest.approx(BATCH * 1000 / tbt, rel=1e-2)
        assert rows["no_exp"]["vs no_exp (95%)"] == "1.000x +-0.000"
        assert rows["no_exp"]["experts gpu/pim"].endswith("/0.0")
        # One GPU has no communication, so nothing hides 20 us of decision in each layer.
        assert float(rows["sieve"]["scheduler_ms"]) == pytest.approx(LAYERS * 0.020, abs=1e-3)
        text = "\n".join(foot)
        for part in ("gpt-oss-20b (bf16) on 1xb200-hbm-pim, batch 4, context 100000, mean of 2 dr",
                     "routing: synthetic", "GPU efficiency: 1 of bandwidth, 1 of compute",
                     "of 192.0 GB a GPU, fits"):  # fmt: skip
            assert part in text

    def test_baseline_is_compared_with_even_where_it_is_not_shown(self, evaluated):
        alone, _ = evaluated(policy="sieve")
        both, _ = evaluated()
        assert alone == {"sieve": both["sieve"]}

    def test_set_reaches_hardware(self, evaluated):
        before, _ = evaluated()
        faster, foot = evaluated(*setting("pim.macs_per_unit=32"))
        # Attention is bound by the internal bandwidth, and a column is two bytes a lane.
        _, pim, _ = milliseconds(before["no_exp"])
        assert milliseconds(faster["no_exp"])[1] == pytest.approx(pim / 2, abs=1e-3)
        assert "set: pim.macs_per_unit=32" in foot

        free, foot = evaluated(*setting("scheduler_time=0", "pim.contention=1"))
        assert free["sieve"]["scheduler_ms"] == "0.000"
        assert float(free["no_exp"]["tbt_ms"]) > float(before["no_exp"]["tbt_ms"])
        assert "set: scheduler_time=0, pim.contention=1" in foot

    def test_set_reaches_precision(self, evaluated):
        _, wide = evaluated()
        _, narrow = evaluated(*setting("model.precision.kv_bits=8"))
        # Keys and values in the layers without a window, and 128 tokens in the others.
        cached = BATCH * (CONTEXT + 128) * LAYERS / 2 * 2 * KV_HEADS * HEAD_DIM
        assert memory_gb(wide) - memory_gb(narrow) == pytest.approx(cached / 1e9, abs=0.11)

    def test_native_precision(self, evaluated):
        _, wide = evaluated()
        _, native = evaluated(precision="native")
        # 4-bit values with a shared 8-bit scale per 32 of them, instead of 16 bits.
        expert_weights = LAYERS * EXPERTS * 3 * HIDDEN * INNER
        saved = expert_weights * (16 - 4.25) / 8
        assert memory_gb(wide) - memory_gb(native) == pytest.approx(saved / 1e9, abs=0.11)
        assert native[0].startswith("gpt-oss-20b (mxfp4)")

    def test_set_reaches_sizes(self, evaluated):
        rows, _ = evaluated()
        narrower, _ = evaluated(*setting("model.top_k=1"), policy="no_exp")
        experts = lambda row: float(row["experts gpu/pim"].split("/")[0])
        assert experts(narrower["no_exp"]) <= BATCH < experts(rows["no_exp"])

    def test_measured_trace(self, evaluated, data_dir):
        measured = data_dir / "mixtral-8x7b" / "mtbench-math.npz"
        options = dict(model="mixtral-8x7b", batch=16, context=512, policy="no_exp", seeds=1)
        rows, foot = evaluated("--reuse", trace=measured, **options)
        # The README of the data: 0.99 of the 8 experts are active in batches of 16.
        assert float(rows["no_exp"]["experts gpu/pim"].split("/")[0]) == pytest.approx(7.9, abs=0.2)
        assert rows["no_exp"]["vs no_exp (95%)"] == "1.000x"  # one draw has no interval
        assert foot[0].endswith("one draw")
        assert "routing: trace of mixtral-8x7b" in foot

    def test_config_and_pim_table(self, evaluated, tmp_path):
        path, system = tmp_path / "times.csv", hardware.get(SYSTEM)
        model = models.from_hf_config(config(tmp_path))
        options = {"pim-table": path, "model": tmp_path / "config.json", "policy": "all_exp"}
        busy, scales = [], (10_000, 30_000)
        for scale in scales:
            write_table(path, system.pim, model, most_tokens=BATCH, scale=scale)
            rows, _ = evaluated(**options, context=128)
            busy.append(milliseconds(rows["all_exp"])[1])
        # Every token visits all four experts of both layers, so an expert has the whole batch.
        times = [
            system.pim.gemv_time(*shape, BATCH, weight_bits=16, activation_bits=16)
            for shape in shapes_of(model)
        ]
        expected = 2 * 4 * float(sum(times)) * 1000 * (scales[1] - scales[0])
        assert busy[1] - busy[0] == pytest.approx(expected, rel=1e-4, abs=2e-3)


def shapes_of(model):
    """(outputs, inputs) of an expert's two matrices: gate with up, and down."""
    return (2 * model.moe_intermediate, model.hidden), (model.hidden, model.moe_intermediate)


def write_table(path, pim, model, *, most_tokens, scale=1.0):
    """What somebody with a simulator of a PIM would do: its GEMV times for one model as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["outputs", "inputs", "tokens", "order", "ns"])
        for outputs, inputs in shapes_of(model):
            for tokens in range(1, most_tokens + 1):
                bits = dict(weight_bits=16, activation_bits=16)
                seconds = scale * float(pim.gemv_time(outputs, inputs, tokens, **bits))
                writer.writerow([outputs, inputs, tokens, "token_outer", seconds * 1e9])


class TestList:
    def test_registries(self, command):
        status, out, _ = command("list", "models")
        rows, _ = rows_of(out)
        assert status == 0
        assert [row["model"] for row in rows] == list(models.MODELS)
        ours = next(row for row in rows if row["model"] == MODEL)
        assert (ours["moe layers"], ours["experts"], ours["top_k"]) == ("24", "32", "4")
        assert ours["native"] == "mxfp4"

        status, out, _ = command("list", "hardware")
        assert status == 0
        for name in (*hardware.HARDWARE, *hardware.GPUS, *hardware.PIMS):
            assert re.search(f"^{re.escape(name)}  +\\S", out, re.MULTILINE), name

    def test_every_number_has_source_and_confidence(self, command):
        entries = [("models", name, preset) for name, preset in models.MODELS.items()]
        parts = {**hardware.HARDWARE, **hardware.GPUS, **hardware.PIMS}
        entries += [("hardware", name, preset) for name, preset in parts.items()]
        for registry, name, preset in entries:
            status, out, _ = command("list", registry, name)
            header, *lines = out.splitlines()
            assert status == 0
            assert header.split("  ")[0] == "field" and header.endswith("source")
            assert len(lines) == len(preset.sources) > 0, name
            for line, row in zip(lines, preset.sources, strict=True):
                assert line.startswith(row.field + "  ")
                assert row.confidence in ("high", "medium", "low")
                assert re.search(f"  {row.confidence} +{re.escape(row.source)}", line), line
                assert row.note in line

    def test_composed_system(self, command):
        status, out, _ = command("list", "hardware", "3xh100-neupims")
        assert status == 0
        assert re.search("^num_gpus +3 ", out, re.MULTILINE)

    def test_policies(self, command):
        for name in (None, *POLICIES):
            status, out, _ = command("list", "policies", *filter(None, [name]))
            rows, _ = rows_of(out)
            assert status == 0
            assert [row["policy"] for row in rows] == ([name] if name else list(POLICIES))
            for row in rows:
                policy = POLICIES[row["policy"]]
                assert row["what it does"] == policy.description
                assert row["scheduled"] == ("yes" if policy.scheduled else "no")
                assert row["in all"] == ("yes" if policy.compared else "no")


class TestTrace:
    def test_hd_moe_json(self, command, refused, tmp_path):
        path = tmp_path / "experts.json"
        path.write_text(json.dumps({"1": [[0], [0], [1], [2]], "0": [[0], [0], [1], [2]]}))
        status, out, err = command("trace", path, "--num-experts", 4, "--draws", 2)
        assert (status, err) == (0, "")
        first, _, single, whole, last = out.splitlines()
        assert first.endswith(
            "unnamed model, 2 MoE layers, 4 experts, top-1, 4 of 4 tokens valid, in 1 sequences"
        )
        # One token of top-1 routing: the busiest of 4 experts has all of it.
        assert single.split() == ["1", "4.00", "0.25", "1.00", "0.00", "0.00", "0.00"]
        # A batch of 4 has to be all tokens: counts 2, 1, 1, 0.
        assert whole.split() == ["4", "reused", "2.00", "0.75", "0.67", "0.33", "0.00", "0.00"]
        assert last.startswith("decode batches: ")
        assert "does not say how many experts a layer has" in refused("trace", path)
        assert "expert id 2" in refused("trace", path, "--num-experts", 2)

    def test_measured(self, command, refused, data_dir):
        path = data_dir / "mixtral-8x7b" / "mtbench-math.npz"
        status, out, _ = command("trace", path, "--draws", 8)
        assert status == 0
        assert "mixtral-8x7b, 32 MoE layers, 8 experts, top-2" in out
        by_batch = {line.split()[0]: line.split()[1:] for line in out.splitlines()[2:-1]}
        assert by_batch["1"][:3] == ["4.00", "0.25", "1.00"]  # two of eight experts, one token each
        # The README of the data: 1.70 and 0.99 on average over all files.
        load, active = float(by_batch["16"][1]), float(by_batch["16"][2])
        assert (load, active) == pytest.approx((1.70, 0.99), abs=0.2)
        assert "asked for gpt-oss-20b" in refused("trace", path, "--model", MODEL)
        assert "has 8 experts a layer, asked for 9" in refused("trace", path, "--num-experts", 9)


class TestDoctor:
    def test_lists_versions(self, command):
        status, out, err = command("doctor")
        assert (status, err) == (0, "")
        for name in ("python", "moejax", "jax", "jaxlib", "equinox", "optax", "numpy", "scipy"):
            assert re.search(f"^{name} +\\d+\\.", out, re.MULTILINE), name
        assert jax.__version__ in out and np.__version__ in out
        assert re.search("^devices +cpu", out, re.MULTILINE)

    def test_missing_package_is_status_1(self, command, monkeypatch):
        monkeypatch.setattr("moejax.cli._doctor.CORE", ("moejax", "no-such-package"))
        status, out, _ = command("doctor")
        assert status == 1
        assert re.search("^no-such-package +missing", out, re.MULTILINE)

    def test_broken_backend_is_status_1(self, command, monkeypatch):
        def devices():
            raise RuntimeError("Unable to initialize\nbackend 'cuda'")

        monkeypatch.setattr(jax, "devices", devices)
        status, out, _ = command("doctor")
        assert status == 1
        assert re.search("^devices +missing: Unable to initialize backend", out, re.MULTILINE)


def test_tables_align_numbers_right_and_words_left():
    text = table(("name", "count"), [("a", "9"), ("long", "10000")])
    assert text == "name  count\na         9\nlong  10000"
    assert table(("name", "word"), []) == "name  word"


def test_interrupt_is_status_130(command, tmp_path):
    (tmp_path / "sweep.py").write_text("def SWEEP():\n    raise KeyboardInterrupt\n")
    status, out, err = command("run", tmp_path / "sweep.py", "--out", tmp_path)
    assert (status, out, err) == (130, "", "moejax run: interrupted\n")


def test_module_is_the_command():
    help_ = [sys.executable, "-m", "moejax", "--help"]
    result = subprocess.run(help_, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    for name in ("eval", "run", "list", "trace", "doctor"):
        assert re.search(f"^    {name} ", result.stdout, re.MULTILINE)


def test_reader_that_stops_early_is_no_mistake():
    command = [sys.executable, "-m", "moejax", "list", "models", MODEL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
