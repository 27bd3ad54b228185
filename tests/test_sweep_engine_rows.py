"""The sweep engine: its rows are those of a plain loop, whatever the values and the cutting."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import Status, hardware, sweep
from moejax.sweep import Axis, Sweep, conditional
from moejax.sweep._plan import Plan


def loop(axes: dict[str, list], fn, seeds=1) -> dict[str, np.ndarray]:
    """The plain twin: every combination after the other, eagerly; columns as a sweep has them."""
    rows = []
    for *values, seed in itertools.product(*axes.values(), range(seeds)):
        config = dict(zip(axes, values))
        found = fn(config, jax.random.key(seed))
        rows.append(config | dict(seed=seed) | {name: np.asarray(of) for name, of in found.items()})
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def same(result, expected):
    """All columns of `expected`, numbers within rounding."""
    for name, column in expected.items():
        found = result[name]
        if found.dtype.kind == "f":
            np.testing.assert_allclose(found, column, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(found, column, err_msg=name)


def noisy(config, key):
    """Something of every kind."""
    noise = jax.random.uniform(key, (3,)) * config["a"] + config["b"]
    return dict(total=noise.sum(), place=jnp.argmax(noise), large=noise[0] > 1.5)


class Box(eqx.Module):
    """A module with a name, a size that is structure, and numbers."""

    weight: Any
    size: int = eqx.field(static=True)
    name: str = eqx.field(static=True, default="box")


class TestRows:
    def test_numbers_against_a_loop(self):
        axes = dict(a=[0.5, 1.0, 3.0], b=[1, 2])
        result = sweep.run(Sweep([Axis(*of) for of in axes.items()], noisy, seeds=3))
        same(result, loop(axes, noisy, seeds=3))
        assert result.complete and set(result["status"]) == {"ok"}
        assert list(result.columns) == [
            "a", "b", "seed", "total", "place", "large", "status",
        ]  # fmt: skip
        assert result["large"].dtype == bool and result["place"].dtype.kind == "i"

    @settings(max_examples=12)
    @given(
        lengths=st.tuples(st.integers(1, 5), st.integers(1, 4)),
        seeds=st.integers(1, 3),
        width=st.sampled_from([None, 1, 3]),
        chunk=st.integers(1, 9),
        bucket=st.sampled_from(["", "a", "b"]),
    )
    def test_however_they_are_cut(self, lengths, seeds, width, chunk, bucket):
        axes = dict(a=list(np.linspace(1, 2, lengths[0])), b=list(range(lengths[1])))
        options = dict(seeds=seeds, width=width, bucket=tuple(filter(None, [bucket])))
        made = Sweep([Axis(*of) for of in axes.items()], noisy, **options)
        same(sweep.run(made, chunk=chunk), loop(axes, noisy, seeds=seeds))

    def test_static_values_are_python_numbers_and_text(self):
        def fn(config, key):
            assert type(config["n"]) is int and type(config["policy"]) is str
            drawn = jax.random.normal(key, (config["n"],))
            return dict(best=drawn.max() if config["policy"] == "max" else drawn.min())

        axes = dict(n=[2, 5], policy=["max", "min"])
        made = Sweep([Axis(*of, static=True) for of in axes.items()], fn, seeds=4, width=4)
        watched = []
        result = sweep.run(made, progress=watched.append)
        same(result, loop(axes, fn, seeds=4))
        assert watched[-1].compiles == 4 and watched[-1].rows == watched[-1].total == 16

    def test_trees_of_one_structure_share_a_program(self):
        boxes = [Box(jnp.arange(n) + w, n) for n, w in ((3, 0.0), (4, 1.0), (3, 2.0), (3, 5.0))]
        named = dict(zip("pqrs", boxes))
        fn = lambda c, key: dict(x=c["box"].weight.sum() * c["a"] + c["box"].size)
        made = Sweep([Axis("box", named), Axis("a", [1.0, 2.0])], fn, width=2)
        watched = []
        result = sweep.run(made, progress=watched.append)
        expected = [float(box.weight.sum()) * a + box.size for box in boxes for a in (1, 2)]
        assert result["x"].tolist() == expected
        assert result["box"].tolist() == ["p", "p", "q", "q", "r", "r", "s", "s"]
        assert watched[-1].compiles == 2

    def test_large_values_are_not_copied_for_every_row(self):
        """Tiles share them: two tiles of three calls are not full, so there are four."""
        large = {name: jnp.full((200, 100), value) for name, value in (("p", 1.0), ("q", 2.0))}
        fn = lambda c, key: dict(x=c["table"][3, 4] * c["a"])
        made = Sweep([Axis("a", [1.0, 2.0, 3.0]), Axis("table", large)], fn, width=2)
        result = sweep.run(made)
        assert result["x"].tolist() == [1, 2, 2, 4, 3, 6]
        assert result.manifest["tiles"] == 4

    def test_nested_fields_and_names_of_presets(self):
        def fn(config, key):
            system = config["system"]
            return dict(rate=system.gpu.hbm_bandwidth * system.pim.contention + config["a"])

        names, shares = ["1xb200-hbm-pim", "2xh200-hbm-pim"], [0.25, 1.0]
        made = Sweep(
            [
                Axis("system", names, resolve=hardware.get),
                Axis("system.pim.contention", shares),
                Axis("a", [0.0]),
            ],
            fn,
        )
        result = sweep.run(made)
        rates = [float(hardware.get(name).gpu.hbm_bandwidth) for name in names]
        expected = [rate * share for rate in rates for share in shares]
        np.testing.assert_allclose(result["rate"], expected, rtol=1e-6)
        assert result["system"].tolist() == [name for name in names for _ in shares]
        assert result["system.pim.contention"].tolist() == shares * 2

    def test_inner_axes_share_a_draw(self):
        systems = {"slow": Box(jnp.array(1.0), 1), "fast": Box(jnp.array(4.0), 1)}

        def fn(config, key):
            drawn = jax.random.uniform(key, (5,))
            assert config["policy"] == ("sum", "max") and isinstance(config["size"], np.ndarray)
            rates = config["system"].weight[:, None, None] * config["batch"][:, None]
            sizes = config["size"].sum() * config["a"]
            both = jnp.stack([drawn.sum(), drawn.max()]) * sizes
            return dict(
                time=both / rates[:, :, 0, None], draw=drawn[0], at=jnp.arange(2)[None, None]
            )

        axes = [
            Axis("a", [1.0, 2.0]),
            Axis("system", systems, inner=True),
            Axis("batch", [1, 2, 4], inner=True),
            Axis("policy", ["sum", "max"], inner=True),
        ]
        # One that is constant in the program, and has a single value, so no row differs by it.
        axes.append(Axis("size", [3], inner=True, static=True))
        made = Sweep(axes, _with_last(fn), seeds=2, width=2)
        result = sweep.run(made)
        assert result.num_rows == made.num_rows == 2 * 2 * 2 * 3 * 2
        names = ("a", "seed", "system", "batch", "policy")
        found = list(zip(*(result[name].tolist() for name in names), strict=True))
        grid = ([1.0, 2.0], [0, 1], ["slow", "fast"], [1, 2, 4], ["sum", "max"])
        assert found == list(itertools.product(*grid))
        for row in range(result.num_rows):
            a, seed, system, batch, policy = found[row]
            drawn = np.asarray(jax.random.uniform(jax.random.key(seed), (5,)))
            rate = dict(slow=1, fast=4)[system] * batch
            expected = getattr(np, policy)(drawn) * 3 * a / rate
            assert result["time"][row] == pytest.approx(expected, rel=1e-5)
            assert result["draw"][row] == drawn[0]
            assert result["at"][row] == ["sum", "max"].index(policy)

    def test_columns_turn_results_into_text_and_units(self):
        def columns(found):
            names = np.array(["few", "many"])[(found.weight > 1).astype(int)]
            return {"kind": names, "weight_kg": found.weight / 1000}

        fn = lambda c, key: Box(c["a"] + 0.5, 1)
        result = sweep.run(Sweep([Axis("a", [0.0, 1.0])], fn, columns=columns))
        assert result["kind"].tolist() == ["few", "many"]
        np.testing.assert_allclose(result["weight_kg"], [0.0005, 0.0015])

    def test_whole_numbers_and_truth_values_arrive_as_such(self):
        def fn(config, key):
            assert config["n"].dtype == jnp.int32 and config["yes"].dtype == bool
            return dict(x=jnp.where(config["yes"], config["n"], -1))

        result = sweep.run(Sweep([Axis("n", [7, 2**31 - 1]), Axis("yes", [True, False])], fn))
        assert result["x"].tolist() == [7, -1, 2**31 - 1, -1]

    def test_double_precision(self, x64):
        fn = lambda c, key: dict(x=c["a"] + 1e-12, more=c["n"] + 1)
        result = sweep.run(Sweep([Axis("a", [1.0]), Axis("n", [2**40])], fn))
        assert result["x"][0] == 1 + 1e-12 and result["more"].tolist() == [2**40 + 1]

    def test_half_precision_is_widened(self):
        fn = lambda c, key: dict(x=c["a"].astype(jnp.bfloat16))
        result = sweep.run(Sweep([Axis("a", [1.5])], fn))
        assert result["x"].dtype == np.float32 and result["x"][0] == 1.5


def _with_last(fn):
    """Adds a dimension for the last inner axis, of one value, to everything that has some."""

    def wrapped(config, key):
        return {name: x[..., None] if x.ndim else x for name, x in fn(config, key).items()}

    return wrapped


class TestHost:
    def test_prepare_runs_once_for_each_content(self):
        calls = []

        def search(system, b):
            calls.append((float(system.weight), b))
            return dict(place=np.arange(3) * b + float(system.weight))

        def finish(place, seed):
            return dict(sum_=place.sum() + seed)

        fn = lambda c, key: dict(x=c["place"][1] + c["a"], y=c["sum_"])
        axes = [
            Axis("a", [0.0, 100.0]),
            Axis("system", {"p": Box(jnp.array(1.0), 1)}),
            Axis("system.weight", [1.0, 2.0]),
            Axis("b", [10, 20]),
        ]
        result = sweep.run(Sweep(axes, fn, seeds=2, prepare=[search, finish], width=3))
        weight, b, a = result["system.weight"], result["b"], result["a"]
        np.testing.assert_allclose(result["x"], b + weight + a)
        np.testing.assert_allclose(result["y"], 3 * b + 3 * weight + result["seed"])
        assert sorted(calls) == [(1.0, 10), (1.0, 20), (2.0, 10), (2.0, 20)]

    def test_results_that_are_not_those_of_the_first_are_refused(self):
        made = {1: dict(p=1.0), 2: dict(p=2.0, extra=0.0), 3: dict(q=3.0), 4: 5.0}
        twice = lambda p: dict(twice=2 * p)
        fn = lambda c, key: dict(y=c["p"] * c["twice"] + 0 * c["a"])
        first = lambda a: made[int(a)]
        result = sweep.run(Sweep([Axis("a", list(made))], fn, prepare=[first, twice]))
        np.testing.assert_array_equal(result["y"], [2, np.nan, np.nan, np.nan])
        told = "failed: prepare gave {}: the first result has ['p']"
        gave = ["['p', 'extra']", "['q']", "a float"]
        assert result["status"].tolist() == ["ok", *(told.format(text) for text in gave)]

    def test_large_results_of_prepare_are_shared_by_a_tile(self):
        make = lambda b: dict(table=np.full((300, 100), b, np.float32))
        fn = lambda c, key: dict(x=c["table"][1, 2] * c["a"])
        axes = [Axis("a", [1.0, 2.0, 3.0]), Axis("b", [1, 10])]
        result = sweep.run(Sweep(axes, fn, prepare=make))
        assert result["x"].tolist() == [1, 10, 2, 20, 3, 30]
        # The longest run of rows with one table is three.
        assert (result.manifest["width"], result.manifest["tiles"]) == (4, 2)

    def test_the_host_prepares_while_the_devices_work(self):
        """The second chunk is prepared, and on its way, before the first is waited for."""
        events = []

        def make(b):
            events.append(f"prepare {b}")
            return dict(place=np.float32(b))

        told = lambda watch: events.append(f"{watch.rows} rows")
        fn = lambda c, key: dict(x=c["place"] + c["b"])
        sweep.run(Sweep([Axis("b", [1, 2, 3])], fn, prepare=make, width=1), chunk=1, progress=told)
        first = [event for event in dict.fromkeys(events) if event != "0 rows"]
        expected = ["prepare 1", "prepare 2", "1 rows", "prepare 3", "2 rows", "3 rows"]
        assert first == expected

    def test_slow_rows_share_tiles_if_asked_to(self):
        axes = [Axis("a", [1.0, 2.0, 3.0, 4.0]), Axis("steps", [1, 100])]
        for bucket, expected in (((), [{1, 100}] * 4), ("steps", [{1}, {1}, {100}, {100}])):
            made = Sweep(axes, noisy, bucket=bucket, width=2)
            plan = Plan(made, made.prepared())
            calls, own = plan.calls_of(np.arange(plan.num_tiles))
            steps = made.axes[1].labels[made.calls.codes["steps"][calls]]
            assert own.all() and [set(tile.tolist()) for tile in steps] == expected

    def test_results_of_other_shapes_are_programs_of_their_own(self):
        make = lambda n: dict(table=np.ones(n, np.float32))
        fn = lambda c, key: dict(x=c["table"].sum() * c["a"])
        axes = [Axis("n", [2, 5], static=True), Axis("a", [1.0, 3.0])]
        watched = []
        result = sweep.run(Sweep(axes, fn, prepare=make), progress=watched.append)
        assert result["x"].tolist() == [2, 6, 5, 15] and watched[-1].compiles == 2

    def test_text_is_for_the_host(self):
        """It costs no compilation."""
        make = lambda method, b: dict(place=np.float32(len(method) * b))
        fn = lambda c, key: dict(x=c["place"] + c["a"])
        axes = [Axis("method", ["by", "for", "from"]), Axis("b", [1, 10]), Axis("a", [0.5])]
        watched = []
        result = sweep.run(Sweep(axes, fn, prepare=make), progress=watched.append)
        assert result["x"].tolist() == [2.5, 20.5, 3.5, 30.5, 4.5, 40.5]
        assert result["method"].tolist() == ["by", "by", "for", "for", "from", "from"]
        assert watched[-1].compiles == 1

    def test_about_gives_columns_over_the_inner_grid(self):
        about = lambda a, seed: dict(
            source=f"a = {a:g}", twice=2 * seed, name=np.array(["x", "y"])[:, None]
        )
        axes = [
            Axis("a", [1.0, 2.0]),
            Axis("p", ["u", "v"], inner=True),
            Axis("q", [5, 6, 7], inner=True),
        ]
        fn = lambda c, key: dict(x=c["a"] * c["q"][None] * len(c["p"]))
        result = sweep.run(Sweep(axes, fn, seeds=2, about=about))
        assert result["source"].tolist() == ["a = 1"] * 12 + ["a = 2"] * 12
        assert result["twice"].tolist() == ([0] * 6 + [2] * 6) * 2
        assert result["name"].tolist() == (["x"] * 3 + ["y"] * 3) * 4
        assert {n: of["role"] for n, of in result.manifest["columns"].items()} == {
            "row": "row", "a": "axis", "seed": "axis", "p": "axis", "q": "axis",
            "source": "about", "twice": "about", "name": "about", "x": "value", "status": "value",
        }  # fmt: skip


class TestStatus:
    def test_codes_are_named(self):
        fn = lambda c, key: dict(x=c["a"], status=jnp.where(c["a"] > 1, int(Status.BAD_RATE), 0))
        watched = []
        result = sweep.run(Sweep([Axis("a", [1.0, 2.0])], fn), progress=watched.append)
        assert result["status"].tolist() == ["ok", "bad_rate"]
        assert watched[-1].failed == 1

    def test_a_host_function_that_refuses_costs_its_rows(self):
        def search(b):
            if b in (1, 3):
                raise ValueError(f"no place\nfor {b}")
            return dict(place=np.float32(b))

        fn = lambda c, key: dict(x=c["place"] * c["a"], n=jnp.int32(3), yes=c["a"] > 0)
        axes = [Axis("b", [1, 2, 3, 4]), Axis("a", [1.0, 10.0])]
        for width in (1, 3, 8):
            result = sweep.run(Sweep(axes, fn, prepare=search, width=width))
            failed = "failed: no place for 1", "failed: no place for 3"
            expected = [failed[0]] * 2 + ["ok"] * 2 + [failed[1]] * 2 + ["ok"] * 2
            assert result["status"].tolist() == expected
            np.testing.assert_array_equal(
                result["x"], [np.nan, np.nan, 2, 20] + [np.nan] * 2 + [4, 40]
            )
            assert result["b"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
            assert result["yes"].dtype == bool and result["n"].dtype == np.int32

    def test_a_shape_that_is_refused_costs_its_rows(self):
        def fn(config, key):
            if config["n"] == 1:
                raise ValueError("n = 1: allowed is more")
            return dict(x=jnp.ones(config["n"]).sum() * config["a"])

        axes = [Axis("n", [1, 2], static=True), Axis("a", [1.0, 2.0, 3.0])]
        watched = []
        result = sweep.run(Sweep(axes, fn, width=2), progress=watched.append)
        assert result["status"].tolist() == ["failed: n = 1: allowed is more"] * 3 + ["ok"] * 3
        np.testing.assert_array_equal(result["x"], [np.nan] * 3 + [2, 4, 6])
        assert watched[-1].failed == 3 and watched[-1].rows == 6

    def test_where_all_are_refused_it_is_a_mistake(self):
        def fn(config, key):
            raise ValueError("never")

        with pytest.raises(ValueError, match="every row was refused, the first with: never"):
            sweep.run(Sweep([Axis("a", [1.0, 2.0])], fn))

    def test_a_mistake_in_the_function_is_not_hidden(self):
        def fn(config, key):
            raise KeyError("oops")

        with pytest.raises(KeyError, match="oops"):
            sweep.run(Sweep([Axis("a", [1.0])], fn))


def test_conditional_rows_know_what_varied():
    axes = [
        Axis("policy", ["few", "all"], static=True),
        conditional(Axis("limit", [4, 8]), 0, policy="few"),
    ]
    fn = lambda c, key: dict(x=c["limit"] + (100 if c["policy"] == "all" else 0))
    result = sweep.run(Sweep(axes, fn))
    assert result["x"].tolist() == [4, 8, 100] and result["limit"].tolist() == [4, 8, 0]
