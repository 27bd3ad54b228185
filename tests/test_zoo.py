"""The zoo: its parts against plain twins, what it ships against what the card promises."""

import dataclasses
import json
import subprocess
import sys
import time
from importlib import resources

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import routing, zoo
from moejax.zoo._attention import _attend
from moejax.zoo._corpus import join
from moejax.zoo._evaluate import evaluate
from moejax.zoo._experts import Experts
from moejax.zoo._optimizer import orthogonalize
from moejax.zoo._store import (
    CONTEXT,
    RECORDED,
    load_weights,
    record_trace,
    round_to_bf16,
    save_weights,
)
from moejax.zoo._train import batch_at
from tests.oracles import zoo as oracle


SMALL = zoo.ZooConfig(
    hidden=32,
    windows=(16, 64),
    num_experts=8,
    top_k=2,
    intermediate=16,
    ngrams=((2, 256), (3, 512)),
    ngram_dim=8,
)
MEASURED = 80_000  # bytes of held-out text that tests run the shipped model over
DATA = resources.files("moejax.zoo") / "data"


@pytest.fixture(scope="module")
def small():
    return zoo.ByteMoE(SMALL, key=jax.random.key(0))


@pytest.fixture(scope="module")
def heldout():
    return zoo.read("heldout")


def test_import_reads_nothing_and_starts_no_backend():
    code = (
        "import sys, moejax.zoo, jax\n"
        "from jax._src import xla_bridge\n"
        "assert 'moejax.zoo._optimizer' not in sys.modules and not xla_bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def evaluation(heldout):
    return evaluate(zoo.load(), heldout, max_tokens=MEASURED)


# --- parts against plain twins ---


@pytest.mark.parametrize("tokens", [5, 700])
def test_experts_match_a_loop_over_tokens(tokens):
    rng = np.random.default_rng(0)
    layer = Experts(6, 4, 5, key=jax.random.key(0))
    x = rng.normal(size=(tokens, 6))
    # Token by token distinct experts, some slots unused, and expert 3 never chosen.
    ids = np.array([rng.permutation([0, 1, 2, 4])[:3] for _ in range(tokens)])
    ids[::4, 2] = routing.NOT_ROUTED
    weights = rng.uniform(size=(tokens, 3))
    expected = oracle.experts(x, np.asarray(layer.up), np.asarray(layer.down), ids, weights)
    got = layer(jnp.asarray(x, jnp.float32), jnp.asarray(ids), jnp.asarray(weights, jnp.float32))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_expert_gradients_match_the_dense_formula():
    layer = Experts(6, 4, 5, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (40, 6))
    ids, weights = zoo.top_k_gate(jax.random.normal(jax.random.key(2), (40, 5)), 2)

    def dense(layer, x):
        inner = jnp.square(jax.nn.relu(jnp.einsum("th,ehi->tei", x, layer.up)))
        each = jnp.einsum("tei,eih->teh", inner, layer.down)
        share = jnp.zeros((40, 5)).at[jnp.arange(40)[:, None], ids].set(weights)
        return jnp.sum(jnp.einsum("te,teh->th", share, each) ** 2)

    routed = lambda layer, x: jnp.sum(layer(x, ids, weights) ** 2)
    for got, expected in zip(
        jax.tree.leaves(jax.grad(routed, (0, 1))(layer, x)),
        jax.tree.leaves(jax.grad(dense, (0, 1))(layer, x)),
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 40, 512])
def test_attention_matches_a_loop_over_tokens(window):
    shape = (1, 1, 300, 8)  # two whole chunks and a part
    query, key, value = (jax.random.normal(jax.random.key(i), shape) for i in range(3))
    expected = oracle.attention(
        *(np.asarray(a)[0, 0] for a in (query * 4 / 8**0.5, key, value)), window
    )
    np.testing.assert_allclose(_attend(query, key, value, window)[0, 0], expected, atol=1e-5)


def test_orthogonalize_leaves_singular_values_near_one():
    matrices = jax.random.normal(jax.random.key(0), (3, 24, 10))
    values = jnp.linalg.svd(orthogonalize(matrices), compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.3


@pytest.mark.parametrize("order", [1, 2, 4])
def test_ngram_loss_matches_dictionaries(order):
    train, held = b"abracadabra, abraham" * 3, b"a bra for abracadabra"
    arrays = (np.frombuffer(text, np.uint8) for text in (train, held))
    got = zoo.ngram_losses(*arrays, max_order=order)
    assert list(got) == list(range(1, order + 1))
    assert got[order] == pytest.approx(oracle.witten_bell(train, held, order), rel=1e-12)


# --- the model ---


def test_logits_do_not_see_the_future(small):
    tokens = np.random.default_rng(0).integers(0, 256, 50)
    changed = tokens.copy()
    changed[30:] = 7
    np.testing.assert_allclose(small(tokens)[:30], small(changed)[:30], atol=1e-5)
    assert np.abs(small(tokens)[30] - small(changed)[30]).max() > 1e-3


def test_hooks(small):
    tokens = np.random.default_rng(0).integers(0, 256, 20)
    logits, router = small(tokens, return_router=True)
    record = small.record(tokens)
    assert logits.shape == (20, 256) and router.shape == (2, 20, 8)
    # The recorded hidden state is what the router multiplies.
    expected = jnp.einsum("lth,lhe->lte", record.gate_inputs, small.routers)
    np.testing.assert_allclose(router, expected, atol=1e-5)
    np.testing.assert_array_equal(record.expert_ids, jax.lax.top_k(router, 2)[1])
    # The model's own gate put in by hand changes nothing; another k does, and is what it says.
    np.testing.assert_allclose(small(tokens, gate=lambda x: zoo.top_k_gate(x, 2)), logits)
    three = small.record(tokens, lambda x: zoo.top_k_gate(x, 3))
    assert three.expert_ids.shape == (2, 20, 3)
    assert np.abs(three.logits - logits).max() > 1e-4


def test_batches_and_vmap_agree(small):
    tokens = np.random.default_rng(0).integers(0, 256, (3, 20))
    forward = eqx.filter_jit(lambda model, rows: model.forward(rows).logits)
    batched = forward(small, tokens).reshape(3, 20, 256)
    each = eqx.filter_jit(lambda model, rows: jax.vmap(model)(rows))(small, tokens)
    np.testing.assert_allclose(each, batched, atol=1e-5)


def test_runs_in_double_precision():
    with jax.enable_x64(True):
        model = eqx.filter_eval_shape(zoo.ByteMoE, SMALL, key=jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((20,), jnp.int32)
        record = eqx.filter_eval_shape(lambda model, row: model.record(row), model, tokens)
        assert record.logits.dtype == record.gate_weights.dtype == jnp.float64
        assert zoo.load().head.dtype == jnp.float64
    assert zoo.load().head.dtype == jnp.float32


# --- the text ---


@pytest.fixture
def library(tmp_path):
    for name, text in {"a.py": "x = 1\n", "b/c.py": "y\n", "test/d.py": "z\n", "e.py": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_list_leaves_out_tests_and_tells_what_differs(library):
    files = zoo.make_list(library)
    names = {**files["train"], **files["heldout"]}
    assert set(names) == {"a.py", "b/c.py"}
    files = {"train": names, "heldout": {"gone.py": "0"}}
    assert zoo.read("train", files, library).matches
    (library / "a.py").write_text("x = 2\n")
    (library / "b/c.py").unlink()
    changed = zoo.read("train", files, library)
    assert changed.differing == ("a.py",) and changed.missing == ("b/c.py",)
    assert "a.py" in changed.report() and "b/c.py" in changed.report()
    with pytest.raises(ValueError, match="no file of the heldout list"):
        zoo.read("heldout", files, library)
    with pytest.raises(ValueError, match="allowed are 'train' and 'heldout'"):
        zoo.read("validation", files, library)


def test_every_epoch_covers_the_text_once():
    text = np.arange(1000, dtype=np.int32)
    config = zoo.TrainConfig(batch=3, length=100)
    rows = np.concatenate([batch_at(text, config, step) for step in range(6)])
    for epoch in (rows[:8], rows[8:16]):
        inside = epoch[:, :-1].ravel()
        assert len(np.unique(inside)) == len(inside)


# --- training ---


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A short training run, stopped once on the way and resumed."""
    text = join(zoo.read("train"))[:400_000]
    config = zoo.TrainConfig(steps=120, batch=8, length=128, learning_rate=6e-3, warmup=10)
    checkpoint = tmp_path_factory.mktemp("zoo") / "checkpoint.eqx"

    class Stop(Exception):
        pass

    def stop(line):
        if line.startswith("step 80 "):
            raise Stop

    run = lambda **options: zoo.train(text, SMALL, config, every=40, **options)
    with pytest.raises(Stop):
        run(checkpoint=checkpoint, log=stop)
    resumed = run(checkpoint=checkpoint, log=lambda line: None)
    return text, run, resumed


def test_training_learns_and_keeps_experts_alive(short_run, heldout):
    text, _, result = short_run
    held = join(heldout)[:20_001]
    counted = zoo.ngram_losses(text, held, 2)
    evaluation = evaluate(result.model, heldout, max_tokens=20_000, length=128, batch=16)
    assert evaluation.loss < 0.5 * (counted[1] + counted[2])
    assert evaluation.load_skew.max() < 6


def test_training_is_the_same_when_stopped_and_resumed(short_run):
    _, run, resumed = short_run
    straight = run(log=lambda line: None)
    assert straight.loss == pytest.approx(resumed.loss, rel=0.02)


def test_weights_survive_the_file(small, tmp_path):
    path = tmp_path / "weights.npz"
    save_weights(small, path)
    back = load_weights(path)
    assert back.config == SMALL
    for got, expected in zip(jax.tree.leaves(back), jax.tree.leaves(round_to_bf16(small))):
        np.testing.assert_array_equal(got, expected)


def test_recorded_trace_is_the_models_routing(small, heldout, tmp_path):
    few = dataclasses.replace(heldout, documents=heldout.documents[:4])
    record_trace(small, few, tmp_path / "trace.npz", sequences=3)
    trace = routing.load(tmp_path / "trace.npz")
    trace.check()
    assert trace.num_sequences == 3 and trace.num_tokens == 3 * RECORDED


# --- what ships ---


def test_shipped_files_are_within_their_sizes():
    assert (DATA / "weights.npz").stat().st_size <= 8e6
    assert (DATA / "trace.npz").stat().st_size <= 4e6
    config = zoo.load().config
    assert len(config.windows) >= 4 and config.num_experts >= 32 and config.top_k >= 4
    files = json.loads((DATA / "files.json").read_text())
    assert not set(files["train"]) & set(files["heldout"])
    assert all(len(digest) == 64 for digest in files["heldout"].values())


def test_shipped_trace_has_skew_and_follows_its_logits():
    trace = zoo.trace()
    trace.check()
    assert trace.num_sequences >= 256
    ids, logits = np.asarray(trace.expert_ids), np.asarray(trace.logits)
    chosen = np.take_along_axis(logits, ids, axis=-1)
    # Logits are rounded to 1/128, so the order may swap within one step.
    assert np.all(np.diff(chosen, axis=-1) <= 1 / 128)
    left_out = np.where((ids[..., None] == np.arange(trace.num_experts)).any(-2), -np.inf, logits)
    assert np.all(left_out.max(-1) <= chosen[..., -1] + 1 / 128)
    load = np.stack([np.bincount(layer.ravel(), minlength=trace.num_experts) for layer in ids])
    skew = load.max(1) / load.mean(1)
    assert np.all((skew > 1.3) & (skew < 6))
    # Skew, but no dead experts.
    assert np.all(load.min(1) > 0.01 * load.mean(1))
    np.testing.assert_allclose(trace.weights.sum(-1), 1, atol=1e-5)


def test_shipped_trace_differs_between_documents():
    trace = zoo.trace()
    names = [name for name, _ in zoo.trace_sources()]
    sequence = np.repeat(np.unique(names, return_inverse=True)[1], RECORDED)
    own = _mean_distance(np.asarray(trace.expert_ids), sequence)
    shuffled = np.random.default_rng(0).permutation(sequence)
    control = _mean_distance(np.asarray(trace.expert_ids), shuffled)
    # A trace this short leaves much noise in the control; the whole text is measured below.
    assert np.all(own >= 1.5 * control)


def _mean_distance(ids, document):
    """Mean total-variation distance between documents of at least 512 recorded tokens."""
    kept = [d for d in np.unique(document) if np.sum(document == d) >= 512]
    shares = np.stack(
        [[np.bincount(row[document == d].ravel(), minlength=32) for d in kept] for row in ids]
    ).astype(float)
    shares /= shares.sum(-1, keepdims=True)
    between = 0.5 * np.abs(shares[:, :, None] - shares[:, None]).sum(-1)
    return between.sum((1, 2)) / (len(kept) * (len(kept) - 1))


def test_reloading_gives_the_stored_choices_back(heldout):
    texts = {d.name: d.data for d in heldout.documents if d.matches}
    places = list(enumerate(zoo.trace_sources()))[::20]
    places = [(i, name, at) for i, (name, at) in places if name in texts]
    if not places:
        pytest.skip(f"this Python has none of the trace's files: {heldout.report()}")
    windows = np.stack(
        [np.frombuffer(texts[n], np.uint8)[at - CONTEXT : at + RECORDED] for _, n, at in places]
    )
    forward = eqx.filter_jit(lambda model, rows: model.forward(rows))
    record = forward(zoo.load(), windows.astype(np.int32))
    layers = len(record.expert_ids)
    keep = lambda a: np.asarray(a).reshape(layers, len(places), CONTEXT + RECORDED, -1)[
        :, :, CONTEXT:
    ]
    trace = zoo.trace()
    stored = np.asarray(trace.expert_ids).reshape(layers, -1, RECORDED, trace.top_k)
    stored = stored[:, [i for i, _, _ in places]]
    # Where an expert differs, its logit must tie with the least chosen one's.
    logits = keep(record.router_logits)
    least = np.sort(logits, axis=-1)[..., -trace.top_k, None]
    assert np.all(np.take_along_axis(logits, stored, axis=-1) >= least - 1e-3)


def test_held_out_loss_beats_the_counted_four_gram(evaluation):
    held = zoo.heldout(MEASURED + 1)
    counted = zoo.ngram_losses(join(zoo.read("train")), held.astype(np.uint8), 4)
    assert evaluation.num_tokens == MEASURED
    assert evaluation.loss < counted[4] < counted[2] < counted[1]


def test_documents_use_experts_differently(evaluation):
    assert np.mean(evaluation.distance_ratio >= 2) >= 0.5
    assert np.all((evaluation.load_skew > 1.3) & (evaluation.load_skew < 6))


def test_forward_of_1024_tokens_takes_less_than_a_second():
    forward = eqx.filter_jit(lambda model, tokens: model(tokens))
    model, tokens = zoo.load(), zoo.heldout(1024)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(forward(model, tokens))
        times.append(time.perf_counter() - start)
    assert min(times[1:]) < 1
