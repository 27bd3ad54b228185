"""After a sweep: expressions, selections, means, the best rows, what limits where, the page."""

import base64
import html.parser
import re
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import report
from moejax.report import Selection, evaluate
from moejax.report._average import half_width


TABLE = {
    "policy": np.array(["sieve", "no_exp", "sieve", "no_exp"]),
    "batch": np.array([1, 1, 64, 64]),
    "system.gpu.hbm_bandwidth": np.array([8e12, 8e12, 4e12, 4e12]),
    "tbt_ms": np.array([1.5, 2.0, 10.0, np.nan]),
    "fits": np.array([True, True, False, True]),
}


def rows_of(axes=("policy", "batch"), **columns):
    return report.rows_of(TABLE | {k: np.asarray(v) for k, v in columns.items()}, axes)


# What an expression means, row by row, in plain Python.
MEANINGS = {
    "tbt_ms < 20": lambda r: r["tbt_ms"] < 20,
    "1 < tbt_ms <= 2": lambda r: 1 < r["tbt_ms"] <= 2,
    "policy == 'sieve' and batch > 1": lambda r: r["policy"] == "sieve" and r["batch"] > 1,
    "policy == sieve": lambda r: r["policy"] == "sieve",
    "policy=sieve": lambda r: r["policy"] == "sieve",
    "batch=64": lambda r: r["batch"] == 64,
    "'no_exp' != policy": lambda r: r["policy"] != "no_exp",
    "batch in (1, 2)": lambda r: r["batch"] in (1, 2),
    "policy not in (sieve, no_exp)": lambda r: False,
    "policy in [sieve]": lambda r: r["policy"] == "sieve",
    "not fits or batch < 2": lambda r: not r["fits"] or r["batch"] < 2,
    "~fits & (batch > 1) | (batch == 1)": lambda r: not r["fits"] or r["batch"] == 1,
    "fits": lambda r: r["fits"],
    "system.gpu.hbm_bandwidth > 5e12": lambda r: r["system.gpu.hbm_bandwidth"] > 5e12,
    "700 * batch + 2**3 - batch % 3 // 2": lambda r: 700 * r["batch"] + 8 - r["batch"] % 3 // 2,
    "-batch / 8": lambda r: -r["batch"] / 8,
    "max(batch, 10, 2 * batch) + min(1, batch)": lambda r: max(r["batch"], 10, 2 * r["batch"]) + 1,
    "where(fits, sqrt(batch), log2(batch))": lambda r: r["batch"] ** 0.5 if r["fits"] else 6,
    "1": lambda r: 1,
}  # fmt: skip


@pytest.mark.parametrize("text", MEANINGS)
def test_expressions_mean_what_they_say(text):
    each = [dict(zip(TABLE, line)) for line in zip(*(column.tolist() for column in TABLE.values()))]
    wanted = [MEANINGS[text](row) for row in each]
    found = evaluate(text, TABLE, 4)
    np.testing.assert_allclose(found.astype(float), np.array(wanted, float))
    assert (found.dtype == bool) == isinstance(wanted[0], bool)


@pytest.mark.parametrize(
    "text, said",
    [
        ("tbt < 20", "unknown column 'tbt'; did you mean 'tbt_ms'?"),
        ("system.gpu.hbm_bandwith > 1", "did you mean 'system.gpu.hbm_bandwidth'?"),
        ("policy == siev", "no row has 'siev'; did you mean 'sieve'? (values: no_exp, sieve)"),
        ("policy == 3", "a column of text is compared with a number"),
        ("policy < tbt_ms", "a column of text is compared with a number"),
        ("tbt_ms == 'a'", "a number is compared with the text 'a'"),
        ("where(fits, policy, batch)", "policy is text, not a number"),
        ("policy + 1", "policy is text, not a number"),
        ("logg(batch)", "unknown function 'logg'; did you mean 'log'?"),
        ("log(batch, 2, 3)", "log does not take 3 values"),
        ("max(batch)", "take two values or more"),
        ("tbt_ms <", "is no expression, such as 'tbt_ms < 20'"),
        ("", "is no expression"),
        ("batch; 1", "is no expression"),
        ("(1, 2)", "a list is allowed after `in` only"),
        ("batch if fits else 1", "IfExp is not allowed"),
        ("__import__('os').system('true')", "a call is a function and its values"),
        ("open('x')", "unknown function 'open'"),
        ("batch.__class__", "unknown column 'batch.__class__'"),
        ("(1).real", "a dot is allowed inside of names only"),
        ("[x for x in batch]", "ListComp is not allowed"),
        ("lambda: 1", "Lambda is not allowed"),
        ("b'a' == policy", "is neither a number nor text"),
        ("batch @ batch", "MatMult is not allowed"),
        ("fits is True", "Is is not allowed"),
        ("batch[0]", "Subscript is not allowed"),
        ("1 + " * 400 + "1", "an expression of 1601 characters: allowed are 1000"),
    ],
)
def test_expressions_that_are_refused(text, said):
    with pytest.raises(ValueError) as caught:
        evaluate(text, TABLE, 4)
    assert said in str(caught.value)


def test_numbers_stay_finite_work():
    assert evaluate("9**9**9**9", TABLE, 4).tolist() == [np.inf] * 4
    assert evaluate("batch / 0", TABLE, 4).tolist() == [np.inf] * 4


@settings(max_examples=200)
@given(st.text("batchfis ()<>=+-*/.,'1e\"[]:\\\n&~", max_size=30))
def test_whatever_is_typed_is_a_value_or_a_named_error(text):
    try:
        assert evaluate(text, TABLE, 4).shape == (4,)
    except ValueError as error:
        assert str(error)


def test_columns_and_conditions_in_order():
    rows = rows_of(axes=("policy", "batch"))
    asked = Selection(columns=["a=2*batch", "b = a + 1"], where=["b > 3", "fits"])
    found = report.select(rows, asked)
    assert found["a"].tolist() == [128.0] and found["b"].tolist() == [129.0]
    assert found.values[-2:] == ("a", "b")
    for asked, said in [
        (Selection(columns=["a"]), "--column a: allowed is NAME=EXPRESSION"),
        (Selection(columns=["a==b"]), "allowed is NAME=EXPRESSION"),
        (Selection(columns=["batch=1"]), "column 'batch' is an axis of the sweep"),
        (Selection(where=["batch + 1"]), "is no condition, such as 'tbt_ms < 20'"),
        (Selection(where=["batch > 1", "tbt_ms > 99"]), r"by 'tbt_ms > 99' \(2 rows before it\)"),
        (Selection(over=["polcy"]), "unknown column 'polcy'; did you mean 'policy'"),
        (Selection(over=["tbt_ms"]), r"'tbt_ms' is no axis \(axes: policy, batch\)"),
    ]:
        with pytest.raises(ValueError, match=said):
            report.select(rows, asked)


def seeded():
    rng = np.random.default_rng(0)
    seed, batch = np.tile(np.arange(4), 3), np.repeat([1, 2, 4], 4)
    return report.rows_of(
        {
            "batch": batch,
            "seed": seed,
            "tbt_ms": rng.random(12),
            "count": batch * 3,
            "fits": batch + seed < 5,
            "limited_by": np.array(list("abbaabcccaab")),
            "status": np.where(seed == batch, "bad_rate", "ok"),
        },
        ("batch", "seed"),
    )


def test_means_over_seeds():
    rows = seeded()
    found = report.select(rows, Selection())
    assert found.axes == ("batch",) and "seed" not in found.columns
    for i, batch in enumerate((1, 2, 4)):
        here = (rows["batch"] == batch) & (rows["status"] == "ok")
        assert found["rows"][i] == here.sum()
        assert found["tbt_ms"][i] == pytest.approx(statistics.fmean(rows["tbt_ms"][here]))
        assert found["fits"][i] == all(rows["fits"][here])
        counts = statistics.multimode(sorted(rows["limited_by"][here].tolist()))
        assert found["limited_by"][i] == counts[0]
    assert found["count"].tolist() == [3, 6, 12] and found["count"].dtype.kind == "i"


def test_conditions_are_about_means_unless_they_name_what_is_averaged():
    rows = seeded()
    mean = report.select(rows, Selection())["tbt_ms"]
    found = report.select(rows, Selection(where=[f"tbt_ms < {np.median(mean)}"]))
    assert found["tbt_ms"].tolist() == [min(mean)]
    found = report.select(rows, Selection(where=["seed < 1"]))
    assert found["rows"].tolist() == [1, 1, 1]
    every = report.select(rows, Selection(over=[]))
    assert len(every) == 12 and every.axes == ("batch", "seed")
    ratio = report.select(rows, Selection(columns=["r=count/tbt_ms"]))
    np.testing.assert_allclose(ratio["r"], ratio["count"] / mean)


def test_files_are_joined_on_shared_columns(tmp_path):
    path = tmp_path / "area.csv"
    path.write_text(
        "policy, batch, area_mm2, maker\n"
        "sieve,1,10,a\nsieve,64,20,b\nno_exp,1,30,c\nno_exp,64,40,d\n"
    )
    found = report.select(rows_of(), Selection(join=[path], where=["area_mm2 < 35"]))
    assert found["area_mm2"].tolist() == [10.0, 30.0, 20.0]
    assert found["maker"].tolist() == ["a", "c", "b"]


def test_a_parquet_file_is_joined(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"policy": ["no_exp", "sieve"], "area": [3, 4], "maker": ["a", "b"]})
    parquet.write_table(table, tmp_path / "area.parquet")
    found = report.select(rows_of(), Selection(join=[tmp_path / "area.parquet"]))
    assert found["area"].tolist() == [4, 3, 4, 3] and found["maker"].tolist() == list("baba")


@pytest.mark.parametrize(
    "text, said",
    [
        ("policy,area\nsieve,1\n", "no row with policy=no_exp"),
        ("policy,area\nsieve,1\nsieve,2\nno_exp,3\n", "two rows with policy=sieve"),
        ("polcy,area\nsieve,1\n", r"has no column of the sweep \(it has polcy, area\)"),
        ("policy,batch\nsieve,1\n", "has nothing but columns of the sweep"),
        ("policy,area\nsieve\n", "row 2: 1 cells for 2 columns"),
        ("batch,area\nx,1\n", "column 'batch' holds text, that of the sweep numbers"),
        ("policy,area\n", "no rows below a line of names"),
    ],
)
def test_files_that_do_not_fit(text, said, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=said):
        report.select(rows_of(), Selection(join=[tmp_path / "a.csv"]))


def test_best_of_one_and_of_several():
    rows = rows_of(rate=[5.0, 9.0, 9.0, 99.0])
    assert report.best(rows, ["tbt_ms"])["tbt_ms"].tolist() == [1.5, 2.0, 10.0]
    assert report.best(rows, [], ["tbt_ms"], top=1)["tbt_ms"].tolist() == [10.0]
    front = report.best(rows, ["tbt_ms"], ["rate"])
    assert front["rate"].tolist() == [5.0, 9.0] and front["tbt_ms"].tolist() == [1.5, 2.0]
    failed = rows_of(status=["bad_rate", "ok", "ok", "ok"])
    assert report.best(failed, ["tbt_ms"])["tbt_ms"].tolist() == [2.0, 10.0]
    for minimize, maximize, said in [
        ([], [], "name what to --minimize or --maximize"),
        (["tbt_ms"], ["tbt_ms"], "an objective is named twice"),
        (["policy"], [], "column 'policy' holds text"),
        (["tbt"], [], "did you mean 'tbt_ms'"),
    ]:
        with pytest.raises(ValueError, match=said):
            report.best(rows, minimize, maximize)
    with pytest.raises(ValueError, match="no row has tbt_ms"):
        report.best(rows.take(np.array([3])), ["tbt_ms"])


def test_what_limits_is_said_or_found():
    said = report.limits_of(rows_of(limited_by=["pim", "hbm", "pim", "-"]))
    assert said.names == ("hbm", "pim") and said.of_row.tolist() == [1, 0, 1, -1]
    times = dict(gpu_ms=[9, 9, 9, 9.0], compute_ms=[1, 5, 1, 1.0], hbm_ms=[2, 1, 1, np.nan])
    found = report.limits_of(rows_of(**times, comm_ms=[0, 0, 3.0, 0]))
    names = [found.names[i] if i >= 0 else None for i in found.of_row]
    assert names == ["hbm", "compute", "comm", None]
    assert found.source == "the largest of compute_ms, hbm_ms, comm_ms"
    near = report.limits_of(rows_of(comp_us=[1, 2, 3, 4], comm_us=[4, 3, 2, 1]))
    assert near.names == ("comp", "comm") and near.of_row.tolist() == [1, 1, 0, 0]
    assert report.limits_of(rows_of(comm_ms=[1, 1, 1, 1], pim_us=[1, 1, 1, 1])) is None


class Page(html.parser.HTMLParser):
    """Elements that are open at the end, attributes that could load something, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def swept():
    batch, policy, seed = (x.ravel() for x in np.meshgrid([1, 8, 64], ["a<b>", "sieve"], [0, 1]))
    batch = batch.astype(int)
    status = np.where((batch == 64) & (policy == "sieve"), "empty_batch", "ok")
    tbt = np.where(status == "ok", batch + 0.1 * seed.astype(int), np.nan)
    columns = dict(
        batch=batch, policy=policy, seed=seed.astype(int), tbt_ms=tbt,
        throughput_per_gpu_tok_s=batch / tbt, status=status,
        limited_by=np.where(batch > 1, "pim", "hbm"),
    )  # fmt: skip
    return report.rows_of(columns, ("batch", "policy", "seed"), "my sweep")


def test_the_page_is_whole_and_loads_nothing():
    text = report.report(swept(), config={"axes": ["</pre><script>"]}, conditions=["batch > 0"])
    page = Page(text)
    assert page.open == []
    assert page.links and all(link.startswith("data:image/png;base64,") for link in page.links)
    for link in page.links:
        assert base64.b64decode(link.split(",")[1])[:4] == b"\x89PNG"
    assert not re.search(r"https?:|url\(|@import|<script|<link", text)
    for words in (
        "my sweep", "12 rows, 3 axes, 2 failed", "Rows that no other beats", "What limits where",
        "empty_batch", "the batch has no tokens", "policy = sieve (100%)", "a<b>", "batch > 0",
        "Where it comes from", "rows where",
    ):  # fmt: skip
        assert words in page.text, words
    assert (
        report.report(swept(), config={"axes": ["</pre><script>"]}, conditions=["batch > 0"])
        == text
    )


def test_the_page_says_what_limits_where():
    page = report.report(swept())
    # Of the ten rows that did not fail, four have batch 1.
    assert 'title="hbm 40.0%">40%' in page and 'title="pim 60.0%">60%' in page
    row = re.search(r"<tr><td>8</td>.*?</tr>", page).group()
    assert 'title="pim 100.0%">100%' in row


def test_the_page_without_pictures_and_without_anything():
    program = """
import sys
sys.modules["matplotlib"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
from tests.test_report import swept, Page
from moejax import report
page = Page(report.report(swept()))
assert page.links == [] and "What limits where" in page.text and "pip install" in page.text
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    nothing = swept().take(np.arange(12) >= 0)
    nothing.columns["status"] = np.full(12, "failed: <b>")
    page = Page(report.report(nothing))
    assert "failed: <b>" in page.text and "12 failed" in page.text
    lone = report.rows_of({"x": [1.0]}, ("x",))
    assert "Axes" in Page(report.report(lone)).text


def test_objectives_of_the_page():
    page = Page(report.report(swept(), minimize=["throughput_per_gpu_tok_s"]))
    assert "least throughput_per_gpu_tok_s; means over seed" in page.text
    with pytest.raises(ValueError, match="did you mean 'tbt_ms'"):
        report.report(swept(), minimize=["tbt"])


def test_intervals_of_infinite_numbers_are_not_known():
    column, group = np.array([1.0, 3.0, np.inf, 2.0, np.inf, np.inf]), np.array([0, 0, 1, 1, 2, 2])
    # Student's t of one degree of freedom at 97.5 %: 12.706.
    half = half_width(column, group)
    assert half[0] == pytest.approx(12.706, abs=1e-3) and np.isnan(half[1:]).all()
