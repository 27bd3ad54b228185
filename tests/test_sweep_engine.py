"""The sweep engine: what a sweep is, and what is refused."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from moejax import hardware, sweep
from moejax.sweep import Axis, Range, Sweep, conditional, product, samples, zipped


def values(sweep_, name):
    """What an axis is, row by row."""
    axis = next(axis for axis in sweep_.axes if axis.name == name)
    return axis.labels[sweep_.calls.codes[name]].tolist()


def nothing(config, key):
    return dict(x=jnp.zeros(()))


class TestDesign:
    def test_product_has_the_first_axis_slowest(self):
        made = Sweep([Axis("a", [1, 2]), Axis("b", [0.5, 1.5, 2.5])], nothing, seeds=[7, 3])
        assert made.num_rows == 12 and made.names == ("a", "b", "seed")
        rows = list(zip(values(made, "a"), values(made, "b"), strict=True))
        assert rows[::2] == list(itertools.product([1, 2], [0.5, 1.5, 2.5]))
        assert made.calls.seeds[made.calls.codes["seed"]].tolist() == [7, 3] * 6

    def test_zip_inside_a_product(self):
        pairs = zipped(Axis("b", [10, 20]), Axis("c", [True, False]))
        for axes in ([Axis("a", [1, 2]), pairs], [product(Axis("a", [1, 2]), pairs)]):
            made = Sweep(axes, nothing)
            rows = list(zip(values(made, "a"), values(made, "b"), values(made, "c"), strict=True))
            assert rows == [(1, 10, True), (1, 20, False), (2, 10, True), (2, 20, False)]

    def test_zip_may_repeat_values(self):
        made = Sweep([zipped(Axis("a", [1, 1, 2]), Axis("b", [5, 6, 5]))], nothing)
        assert values(made, "a") == [1, 1, 2] and values(made, "b") == [5, 6, 5]
        # Equal values are one content.
        assert made.calls.codes["a"].tolist() == [0, 0, 2]

    @pytest.mark.parametrize("otherwise, b", [(8, [4, 8, 8, 8, 4, 8]), (1, [4, 8, 1, 1, 4, 8])])
    def test_conditional_axis_varies_only_there(self, otherwise, b):
        policy = Axis("policy", ["few", "sieve", "all", "many"], static=True)
        limit = conditional(Axis("limit", [4, 8]), otherwise, policy=("few", "many"))
        made = Sweep([policy, limit], nothing)
        rows = ["few", "few", "sieve", "all", "many", "many"]
        assert values(made, "policy") == rows and values(made, "limit") == b

    def test_sobol_points_fill_the_box_evenly(self):
        made = Sweep(samples(64, Range("x", 0.0, 8.0), Range("y", 1, 256, log=True)), nothing)
        x, y = np.array(values(made, "x")), np.log2(values(made, "y"))
        # One point in every elementary interval: the net property that random points lack.
        for column in (x, y):
            assert np.bincount((column * 8).astype(int), minlength=64).tolist() == [1] * 64
        cells = np.bincount(x.astype(int) * 8 + y.astype(int), minlength=64)
        assert cells.tolist() == [1] * 64

    def test_random_points_and_whole_numbers(self):
        ranges = Range("n", 1, 4, whole=True), Range("x", -1.0, 1.0)
        made = Sweep(samples(400, *ranges, method="random", seed=3), nothing)
        counts = np.bincount(values(made, "n"), minlength=5)
        assert counts[0] == 0 and (counts[1:] > 60).all() and len(counts) == 5
        assert min(values(made, "x")) >= -1 and max(values(made, "x")) < 1
        again = Sweep(samples(400, *ranges, method="random", seed=4), nothing)
        assert values(again, "x") != values(made, "x")

    def test_logspace(self):
        np.testing.assert_allclose(sweep.logspace(1, 1000, 4), [1, 10, 100, 1000])

    def test_where_leaves_combinations_out(self):
        axes = [Axis("a", [1, 2, 3]), Axis("b", [1, 2, 3]), Axis("c", [0, 1])]
        made = Sweep(axes, nothing, where=lambda a, b: a <= b)
        assert made.num_rows == 12 and set(zip(values(made, "a"), values(made, "b"))) == {
            (1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3),
        }  # fmt: skip

    def test_set_changes_values_and_nothing_else(self):
        labels = Axis("model", {"small": 1.0, "large": 2.0})
        axes = [labels, zipped(Axis("b", [1, 2]), Axis("c", [3, 4])), samples(4, Range("x", 0, 1))]
        made = Sweep(axes, nothing, seeds=2, width=3)
        changed = made.set({"model": "large", "b": [5, 6], "x": (2, 3), "seeds": [9]})
        assert values(changed, "model") == ["large"] * 8 and set(values(changed, "b")) == {5, 6}
        assert min(values(changed, "x")) >= 2 and changed.seeds.tolist() == [9]
        assert changed.width == 3 and values(changed, "c") == values(made, "c")[:16:2]
        assert made.num_rows == 2 * changed.num_rows * 2


class TestMistakes:
    @pytest.mark.parametrize(
        "make, said",
        [
            (lambda: Axis("a", []), "axis 'a' has no values"),
            (lambda: Sweep([Axis("a", [1, 2, 1])], nothing), "axis 'a' has 1 more than once"),
            (lambda: product(Axis("a", ["x", "x"])), "axis 'a' has x more than once"),
            (lambda: Axis("a", [np.ones(2), np.ones(2)]), "axis 'a' has two equal values"),
            (lambda: Axis("a b", [1]), "name 'a b': allowed are names"),
            (lambda: Axis("a", "text"), "values 'text': allowed is a list"),
            (lambda: Axis("a", 3), "values 3: allowed is a list"),
            (lambda: Axis("a", ["x", 1], static=True), "axis 'a' mixes"),
            (lambda: Axis("a", [True, 1]), "axis 'a' mixes truth values"),
            (lambda: Axis("a", [1, 2**31]), "axis 'a' = 2147483648: allowed are whole numbers"),
            (lambda: Axis("a.b", [1], inner=True), "a nested field can not be inner"),
            (lambda: sweep.logspace(0, 1, 3), "allowed are positive numbers"),
            (lambda: zipped(Axis("a", [1]), Axis("b", [1, 2])), "unequal length {'a': 1, 'b': 2}"),
            (lambda: zipped(Axis("a", [1])), "two axes or more"),
            (lambda: zipped(Axis("a", [1, 1]), Axis("b", [2, 2])), "two configurations of a, b"),
            (lambda: conditional(Axis("a", [1]), 1), "at least one condition"),
            (
                lambda: Sweep(
                    [Axis("batch", [1]), conditional(Axis("a", [1, 2]), 1, bach=1)], nothing
                ),
                "no earlier axis 'bach'; did you mean 'batch'?",
            ),
            (
                lambda: Sweep([Axis("b", [1]), conditional(Axis("a", [1, 2]), 1, b=2)], nothing),
                "axis 'b' has no value 2",
            ),
            (lambda: Range("x", 1, 1), "low < high"),
            (lambda: Range("x", 0, 1, log=True), "allowed is low > 0"),
            (lambda: samples(0, Range("x", 0, 1)), "count = 0"),
            (lambda: samples(2, Range("x", 0, 1), method="sobl"), "allowed are sobol, random"),
            (lambda: Sweep([], nothing), "no axes"),
            (lambda: Sweep([1], nothing), "1 is a int: allowed are axes"),
            (lambda: Sweep([Axis("a", [1]), Axis("a", [2])], nothing), "two axes are called 'a'"),
            (lambda: Sweep([Axis("seed", [1])], nothing), "'seed' is a column of every sweep"),
            (lambda: Sweep([Axis("a", [1])], lambda config: 0), "allowed is fn(config, key)"),
            (
                lambda: Sweep([Axis("a", [1])], nothing, seeds=0),
                "allowed is how many, or different",
            ),
            (lambda: Sweep([Axis("a", [1])], nothing, seeds=[1, 1]), "different whole numbers"),
            (lambda: Sweep([Axis("a", [1])], nothing, width=0), "width = 0: allowed"),
            (lambda: Sweep([Axis("a", [1])], nothing, bucket="b"), "no outer axis 'b'"),
            (
                lambda: Sweep([Axis("batch", [1])], nothing, prepare=lambda bach: {}),
                "prepare: no axis 'bach'; did you mean 'batch'?",
            ),
            (
                lambda: Sweep([Axis("a", [1])], nothing, about=lambda **all: {}),
                "parameter **all: allowed are names of axes",
            ),
            (
                lambda: Sweep([Axis("a", [1])], nothing, where=lambda a: False).num_rows,
                "where leaves no configuration",
            ),
            (
                lambda: Sweep([Axis("batch", [1])], nothing).set({"bacth": [2]}),
                "no axis 'bacth'; did you mean 'batch'?",
            ),
            (
                lambda: Sweep([Axis("m", {"small": 1.0})], nothing).set({"m": ["smal"]}),
                "axis 'm' has no 'smal'; did you mean 'small'?",
            ),
            (
                lambda: Sweep([samples(2, Range("x", 0, 1))], nothing).set({"x": [1, 2, 3]}),
                "x is sampled: allowed are its two ends",
            ),
            (
                lambda: Sweep([samples(2, Range("x", 0, 1))], nothing).set({"x": [0.5, 1]}),
                "x is sampled: allowed are its two ends",
            ),
            (
                lambda: Sweep([Axis("x", [1])], nothing).set({"x": sweep.parse_values("1:5")}),
                "axis 'x' = 1:5 is not sampled: allowed are values",
            ),
            (
                lambda: Sweep([Axis("x", [1])], nothing).set({"seeds": sweep.parse_values("1:5")}),
                "seeds = 1:5: low:high is for what is sampled",
            ),
            (lambda: Axis("x", [1.0, float("nan")]), "axis 'x' has nan: allowed are numbers"),
        ],
    )
    def test_of_a_definition(self, make, said):
        with pytest.raises(ValueError) as error:
            make()
        assert said in str(error.value)

    @pytest.mark.parametrize(
        "name, change, said",
        [
            ("system.pim.contentoin", [0.5], "no field 'contentoin'; did you mean 'contention'?"),
            ("system.scheduler_time", [1e-6, -1.0], "System.scheduler_time"),
            ("sytem.scheduler_time", [1e-6], "no outer axis 'sytem'; did you mean 'system'?"),
        ],
    )
    def test_of_a_nested_field_show_on_the_host(self, name, change, said):
        system = Axis("system", ["1xb200-hbm-pim"], resolve=hardware.get)
        with pytest.raises(ValueError) as error:
            Sweep([system, Axis(name, change)], nothing)
        assert said in str(error.value)

    @pytest.mark.parametrize(
        "fn, options, said",
        [
            (nothing, {}, "axis 'a' changes nothing: fn does not ask for it"),
            (lambda c, key: dict(x=c["a"] * jnp.ones(2)), {}, "column 'x' has shape (2,)"),
            (lambda c, key: dict(a=c["a"]), {}, "column 'a' is there twice"),
            (
                lambda c, key: dict(x=c["text"]),
                {},
                "axis 'text' is text, which fn gets wi",
            ),
            (lambda c, key: dict(x=c["ab"]), {}, "config has no 'ab'; did you mean 'a'?"),
            (lambda c, key: dict(x=c["a"]), dict(prepare=lambda a: 3), "prepare gave a int"),
            (lambda c, key: dict(x=c["a"]), dict(prepare=lambda: dict(a=1)), "is there already"),
            (lambda c, key: dict(x=c["a"]), dict(columns=lambda found: 3), "columns gave 3"),
        ],
    )
    def test_of_a_function(self, fn, options, said):
        with pytest.raises(ValueError) as error:
            axes = [Axis("a", [1.0, 2.0]), Axis("text", ["x", "y"])]
            sweep.run(Sweep(axes, fn, about=lambda text: dict(t=text), **options))
        assert said in str(error.value)

    @pytest.mark.parametrize("chunk", [1, None])
    @pytest.mark.parametrize("values", [("none", 1.0), (1.0, "none")])
    def test_a_column_is_text_or_numbers(self, chunk, values):
        about = lambda a: dict(place=values[int(a)])
        made = Sweep([Axis("a", [0, 1])], lambda c, key: dict(x=c["a"]), about=about, width=1)
        with pytest.raises(ValueError, match="column 'place' holds text for some configurations"):
            sweep.run(made, chunk=chunk)

    def test_text_of_a_function_is_told_where_it_belongs(self):
        with pytest.raises(ValueError, match="fn gave x = 'text': allowed are numbers"):
            sweep.run(Sweep([Axis("a", [1.0])], lambda c, key: dict(x="text", y=c["a"])))

    @pytest.mark.parametrize(
        "options, said",
        [
            (dict(chunk=0), "chunk = 0"),
            (dict(devices=0), "devices = 0"),
            (dict(devices=[]), "at least one"),
            (dict(shard="0/2"), "shard = '0/2'"),
            (dict(shard="two"), "shard = 'two'"),
            (dict(memory=-1), "memory = -1"),
            (dict(memory=float("inf")), "memory = inf"),
            (dict(progress="bar"), "progress = 'bar': allowed are a function, True, False"),
            (dict(memory=1), "choose a smaller width"),
            (dict(resume=False), "resume=False without out"),
        ],
    )
    def test_of_a_run(self, options, said):
        made = Sweep([Axis("a", [1.0])], lambda c, key: dict(x=c["a"]))
        with pytest.raises(ValueError) as error:
            sweep.run(made, **options)
        assert said in str(error.value)
