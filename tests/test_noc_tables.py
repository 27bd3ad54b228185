"""Links and time-lines as tables against sums by hand, and what the pictures of them show."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import noc, plot


GB = 1e9


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs run once or twice, so that their compilation is all the time they take."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def line():
    """Nodes 0, 1, 2 in a row; two messages to 2 that meet on the last link, one to 0."""
    topology = noc.mesh(1, 3, bandwidth=[1 * GB, 1 * GB, 2 * GB, 1 * GB])
    valid = [True, True, True, False]
    messages = noc.Messages([0, 1, 2, 0], [2, 2, 1, 1], [4e3, 2e3, 1e3, 9e3], valid)
    return topology, messages


def random_case(kind, **rates):
    rng = np.random.default_rng(0)
    topology = getattr(noc, kind)(3, 4, bandwidth=rng.uniform(1, 2) * GB, **rates)
    ends = rng.integers(12, size=(2, 40))
    return topology, noc.Messages(*ends, rng.uniform(1e3, 9e3, 40), rng.random(40) < 0.8)


@pytest.fixture(scope="module")
def torus():
    topology, messages = random_case("torus")
    return noc.link_rows(topology, noc.simulate(topology, messages))


@pytest.fixture
def ax():
    return plot.figure()[1][0, 0]


class TestColumns:
    # Links 0>1, 1>0, 1>2, 2>1: 4 us, idle, 3 us (1 us of waiting at the start), 1 us.
    def test_by_hand(self):
        topology, messages = line()
        table = noc.columns(topology, noc.simulate(topology, messages))
        assert table["makespan_us"] == pytest.approx(4 + 2)
        assert (table["busiest_link"], table["status"]) == ("0>1", "ok")
        assert table["busiest_link_us"] == pytest.approx(4)
        assert table["busiest_link_utilization"] == pytest.approx(4 / 6)
        # 4, 6 and 1 kB over three links in 6 us; their bandwidths add up to 5 GB/s.
        assert table["link_gb_s"] == pytest.approx(11 / 6)
        assert table["share_of_peak"] == pytest.approx(11 / 6 / 5)
        assert table["iterations"] == 0

    def test_batches_with_rows_that_are_not_okay(self):
        topology, messages = line()

        def one(bytes):
            sent = eqx.tree_at(lambda m: m.bytes, messages, bytes)
            return noc.simulate(topology, sent)

        bytes = jnp.stack([messages.bytes, 0 * messages.bytes, -messages.bytes])
        table = noc.columns(topology, jax.jit(jax.vmap(one))(bytes))
        assert table["status"].tolist() == ["ok", "ok", "negative_bytes"]
        assert table["busiest_link"].tolist() == ["0>1", "-", "-"]
        np.testing.assert_allclose(table["share_of_peak"], [11 / 30, 0, np.nan], rtol=1e-6)
        np.testing.assert_allclose(table["makespan_us"], [6, 0, np.nan], rtol=1e-6)

    def test_dead_link(self):
        topology, messages = line()
        topology = noc.mesh(1, 3, bandwidth=[1 * GB, 1 * GB, 0, 1 * GB])
        report = noc.simulate(topology, messages)
        table = noc.columns(topology, report)
        assert (table["busiest_link"], table["status"]) == ("1>2", "dead_link")
        assert np.isinf(table["makespan_us"]) and table["link_gb_s"] == 0
        rows = noc.link_rows(topology, report)
        np.testing.assert_array_equal(rows["utilization"], [0, 0, np.nan, 0])
        np.testing.assert_array_equal(rows["gb_s"], 0)
        lanes = noc.timeline_rows(topology, messages)
        assert set(lanes["name"]) == {"0>1", "1>2", "2>1"}
        assert not lanes["utilization"].any()


class TestLinkRows:
    def test_by_hand(self):
        topology, messages = line()
        rows = noc.link_rows(topology, noc.simulate(topology, messages))
        assert rows["name"].tolist() == ["0>1", "1>0", "1>2", "2>1"]
        assert (rows["from"].tolist(), rows["to"].tolist()) == ([0, 1, 1, 2], [1, 0, 2, 1])
        assert (rows["from_x"].tolist(), rows["to_x"].tolist()) == ([0, 1, 1, 2], [1, 0, 2, 1])
        assert not rows["from_y"].any() and not rows["to_switch"].any()
        np.testing.assert_allclose(rows["occupancy_us"], [4, 0, 3, 1], rtol=1e-6)
        np.testing.assert_allclose(rows["utilization"], np.array([4, 0, 3, 1]) / 6, rtol=1e-6)
        np.testing.assert_allclose(rows["gb_s"], np.array([4, 0, 6, 1]) / 6, rtol=1e-6)
        np.testing.assert_allclose(rows["peak_gb_s"], [1, 1, 2, 1], rtol=1e-6)
        assert rows["critical"].tolist() == [True, False, True, False]

    def test_switches(self):
        topology = noc.custom([(0, 2), (1, 2)], bandwidth=GB, num_nodes=2)
        messages = noc.Messages([0], [1], [1e3], [True])
        rows = noc.link_rows(topology, noc.simulate(topology, messages))
        assert (rows["to"] == 2).tolist() == rows["to_switch"].tolist()
        assert (rows["from"] == 2).tolist() == rows["from_switch"].tolist()

    def test_one_report_at_a_time(self):
        topology, messages = line()
        report = noc.simulate(topology, messages)
        both = jax.tree.map(lambda x: jnp.stack([x, x]), report)
        with pytest.raises(ValueError, match=r"report.makespan has shape \(2,\), expected \(\)"):
            noc.link_rows(topology, both)


class TestTimelineRows:
    def test_by_hand(self):
        topology, messages = line()
        rows = noc.timeline_rows(topology, messages)
        assert rows["name"].tolist() == ["0>1", "1>2", "1>2", "2>1"]
        assert rows["message"].tolist() == [0, 1, 0, 2]
        assert (rows["source"].tolist(), rows["destination"].tolist()) == (
            [0, 1, 0, 2],
            [2, 2, 2, 1],
        )
        np.testing.assert_allclose(rows["start_us"], [0, 0, 4, 0], atol=1e-6)
        np.testing.assert_allclose(rows["end_us"], [4, 1, 6, 1], rtol=1e-6)
        assert rows["critical"].tolist() == [True, False, True, False]
        np.testing.assert_allclose(rows["utilization"], np.array([4, 3, 3, 1]) / 6, rtol=1e-6)
        assert noc.timeline_rows(topology, messages, busiest=1)["name"].tolist() == ["0>1"]
        with pytest.raises(ValueError, match="timeline_rows.busiest = 0: allowed is 1 or more"):
            noc.timeline_rows(topology, messages, busiest=0)

    @pytest.mark.parametrize("kind", ["mesh", "torus"])
    def test_adds_up_to_the_report(self, kind):
        topology, messages = random_case(kind, port_bandwidth=1 * GB, hop_latency=1e-7)
        report = noc.simulate(topology, messages)
        rows = noc.timeline_rows(topology, messages, busiest=1000)
        busy = np.bincount(rows["link"], rows["end_us"] - rows["start_us"])
        ports = np.asarray(report.port_occupancy).ravel()
        expected = 1e6 * np.concatenate([report.link_occupancy, ports])
        np.testing.assert_allclose(busy, expected, rtol=1e-4, atol=1e-3)
        of_makespan = rows["utilization"] * float(report.makespan) * 1e6
        np.testing.assert_allclose(of_makespan, expected[rows["link"]], rtol=1e-4)
        # In order of use, links one after the other and messages in the order of their start.
        first = list(dict.fromkeys(rows["link"].tolist()))
        assert (np.diff(busy[first]) <= 1e-6).all()
        same = rows["link"][1:] == rows["link"][:-1]
        assert (rows["start_us"][1:] >= rows["end_us"][:-1] - 1e-4)[same].all()
        # Ports have names of their own.
        assert {"in 0", "out 11"} <= set(rows["name"])
        links = rows["link"][rows["critical"]]
        messages_on_path = np.zeros(40, bool)
        messages_on_path[rows["message"][rows["critical"]]] = True
        np.testing.assert_array_equal(messages_on_path, report.critical_messages)
        on_path = np.isin(np.arange(topology.num_links), links)
        np.testing.assert_array_equal(on_path, report.critical_links)
        # The path is a chain: each use starts when the one before it ends, or a hop later.
        order = np.argsort(rows["start_us"][rows["critical"]], kind="stable")
        start, end = (rows[name][rows["critical"]][order] for name in ("start_us", "end_us"))
        gap = start[1:] - end[:-1]
        assert (np.isclose(gap, 0, atol=1e-3) | np.isclose(gap, 0.1, atol=1e-3)).all()

    def test_nothing_moves(self):
        topology, messages = line()
        idle = eqx.tree_at(lambda m: m.valid, messages, jnp.zeros(4, bool))
        assert all(len(values) == 0 for values in noc.timeline_rows(topology, idle).values())


class TestPictures:
    @pytest.fixture(autouse=True)
    def matplotlib(self):
        pytest.importorskip("matplotlib", reason="figures need matplotlib")

    def test_heat_map_shows_every_link(self, torus, ax, tmp_path):
        assert plot.link_heat_map(torus, ax, title="A torus") is ax
        assert ax.get_title(loc="left") == "A torus"
        arrows = ax.collections[0]
        # What closes a ring of four, or of three, is drawn as two ends.
        wraps = 2 * 3 + 2 * 4
        shares = np.sort(arrows.get_array())
        over = (np.abs(torus["from_x"] - torus["to_x"]) > 1) | (
            np.abs(torus["from_y"] - torus["to_y"]) > 1
        )
        assert over.sum() == wraps and len(arrows.get_paths()) == len(over) + wraps
        expected = np.sort(np.repeat(torus["utilization"], 1 + over))
        np.testing.assert_array_equal(shares, expected)
        assert (arrows.norm.vmin, arrows.norm.vmax) == (0, 1)
        assert sorted(int(text.get_text()) for text in ax.texts if text.get_text().isdigit()) == (
            list(range(12))
        )
        busiest = torus["name"][np.argmax(torus["utilization"])].replace(">", " → ")
        assert any(f"busiest {busiest}: " in text.get_text() for text in ax.texts)
        assert plot.save(ax.figure, tmp_path / "heat.png", dpi=50).stat().st_size > 5000

    def test_critical_links_have_rims_and_dead_ones_dashes(self, ax):
        table = noc.link_rows(line()[0], noc.simulate(*line()))
        table["utilization"][3] = np.nan
        plot.link_heat_map(table, ax, colorbar=False)
        arrows = ax.collections[0]
        # Idle first, then the busier, then what never ends; the critical ones are 2 and 0.
        np.testing.assert_array_equal(arrows.get_linewidths(), [0, 0.9, 0.9, 0.9])
        assert arrows.get_array().mask.tolist() == [False, False, False, True]

    def test_traffic_keeps_to_the_right(self, ax):
        table = noc.link_rows(line()[0], noc.simulate(*line()))
        plot.link_heat_map(table, ax)
        order = np.argsort(table["utilization"] + table["critical"], kind="stable")
        for link, path in zip(order, ax.collections[0].get_paths()):
            going_right = table["to_x"][link] > table["from_x"][link]
            # y grows downwards.
            assert (path.vertices[:, 1].mean() > 0) == going_right

    def test_idle_network(self, torus, ax):
        plot.link_heat_map(torus | {"utilization": np.zeros_like(torus["utilization"])}, ax)
        assert any(text.get_text() == "no traffic" for text in ax.texts)

    def test_heat_map_bad_input(self, torus, ax):
        with pytest.raises(ValueError, match="utilization of link 0>1 = 1.5: allowed is"):
            plot.link_heat_map(torus | {"utilization": torus["utilization"] * 0 + 1.5}, ax)
        twice = {name: np.append(values, values[:1]) for name, values in torus.items()}
        with pytest.raises(ValueError, match="2 rows with from=0.0, to=1.0"):
            plot.link_heat_map(twice, ax)
        with pytest.raises(ValueError, match="'critical' has 1 rows, the others 48"):
            plot.link_heat_map(torus | {"critical": [True]}, ax)
        with pytest.raises(ValueError, match="no column 'gb_s'"):
            plot.link_heat_map({k: v for k, v in torus.items() if k != "gb_s"}, ax)

    def test_timeline(self, ax, tmp_path):
        table = noc.timeline_rows(*line())
        assert plot.link_timeline(table, ax, title="Who when") is ax
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("Time (us)", "Link")
        assert [label.get_text() for label in ax.get_yticklabels()] == ["0 → 1", "1 → 2", "2 → 1"]
        plain, critical = ax.collections
        boxes = [path.get_extents() for path in critical.get_paths()]
        found = [(box.x0, box.x1, round(box.y0 + 0.38)) for box in boxes]
        np.testing.assert_allclose(found, [(0, 4, 0), (4, 6, 1)], atol=1e-5)
        assert len(plain.get_paths()) == 2
        shares = [text.get_text() for text in ax.texts if text.get_text().endswith("%")]
        assert shares == ["67%", "50%", "17%"]
        assert plot.save(ax.figure, tmp_path / "lanes.png", dpi=50).stat().st_size > 2000

    def test_timeline_of_a_dead_link(self, ax):
        topology = noc.mesh(1, 3, bandwidth=[1 * GB, 1 * GB, 0, 1 * GB])
        plot.link_timeline(noc.timeline_rows(topology, line()[1]), ax)
        boxes = [path.get_extents() for bars in ax.collections for path in bars.get_paths()]
        # The one that waits never starts.
        ends = sorted((box.x0, box.x1) for box in boxes)
        np.testing.assert_allclose(ends, [(0, 1), (0, 4), (0, 4)], atol=1e-5)

    def test_timeline_bad_input(self, ax):
        table = noc.timeline_rows(*line())
        with pytest.raises(ValueError, match="a use of 0>1 starts at 5 and ends at 4 us"):
            plot.link_timeline(table | {"start_us": [5.0, 0, 0, 0]}, ax)
        with pytest.raises(ValueError, match="the table is empty"):
            plot.link_timeline({name: [] for name in table}, ax)
