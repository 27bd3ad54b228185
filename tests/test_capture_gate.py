"""Gates inside tiny models of all families: nothing moves without costs, and what the pure gate
says with them."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest

from moejax import capture, gating, metrics
from moejax.capture import _families as families
from moejax.capture._bridge import to_jax, to_torch
from moejax.capture._calls import cache_of
from tests.capture_models import FAMILIES, needs_torch, padded, tiny


needs_torch()
PROMPTS = [[5, 9, 11, 23, 40, 3, 8], [7, 8, 9], [33, 21, 50, 3, 12]]
SHARE = np.eye(4)[[0, 1, 2, 3, 1, 0, 3, 2]]
STRONG = dict(r_comp=-1e5, r_comm=0.0, token_time=1e-6, protect=1)
every_family = pytest.mark.parametrize("family", FAMILIES)


def prompts(model):
    ids, mask = padded(PROMPTS)
    return dict(input_ids=ids, attention_mask=mask)


def decode(model, tokens, start, gate=None, **options):
    """(logits of positions from `start` on, log) of a text fed token by token after a prompt."""
    import contextlib

    import torch

    context = contextlib.nullcontext() if gate is None else capture.gated(model, gate, **options)
    with context as log, torch.no_grad():
        output = model(tokens[:, :start], use_cache=True)
        steps = []
        for position in range(start, tokens.shape[1]):
            cache = cache_of(output)
            name = "cache" if getattr(output, "cache", None) is cache else "past_key_values"
            output = model(tokens[:, position : position + 1], use_cache=True, **{name: cache})
            steps.append(output.logits)
    return torch.cat(steps, 1), log


@every_family
def test_without_costs_and_after_the_context_logits_are_the_same_to_the_bit(family):
    import torch

    model = tiny(family)
    gate = capture.gate_for(model, SHARE, r_comp=0.0, r_comm=0.0, token_time=1e-6)
    inputs = prompts(model)
    options = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    with torch.no_grad():
        before = model(**inputs).logits
        generated = model.generate(**inputs, **options, output_logits=True)
        with capture.gated(model, gate, decode_only=False) as log:
            inside = model(**inputs).logits
            again = model.generate(**inputs, **options, output_logits=True)
        after = model(**inputs).logits
    assert log.num_steps == 5 and log.moved_choices == 0
    assert torch.equal(inside, before) and torch.equal(after, before)
    assert all(torch.equal(a, b) for a, b in zip(generated.logits, again.logits, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "DeepseekV3", "GptOss"])
def test_ties_of_half_precision_fall_as_in_the_model(family):
    """Routers whose experts come in equal pairs: every choice is a tie."""
    import torch

    model = copy.deepcopy(tiny(family, "bfloat16"))
    with torch.no_grad():
        for layer in families.find_layers(model):
            layer.router.weight[1::2] = layer.router.weight[::2]
            if layer.rule.bias is not None:
                layer.rule.bias.zero_()
    gate = capture.gate_for(model, SHARE, r_comp=0.0, r_comm=0.0, token_time=1e-6)
    inputs = prompts(model)
    with torch.no_grad():
        before = model(**inputs).logits
        with capture.gated(model, gate, decode_only=False) as log:
            inside = model(**inputs).logits
    assert log.num_steps == 1 and log.moved_choices == 0
    assert torch.equal(inside, before)


@every_family
def test_choices_and_weights_are_those_of_the_pure_gate_on_the_recorded_logits(family):
    import torch

    model = tiny(family)
    # Sigmoids, and scores scaled by a bias, differ by more than probabilities do.
    gate = capture.gate_for(model, SHARE, **(STRONG | dict(protect=0)))
    # Entered last, the recording sees what the gate returns.
    gating = capture.gated(model, gate, decode_only=False)
    with torch.no_grad(), gating as log, capture.record(model) as recording:
        model(**prompts(model))
    trace = recording.trace()
    assert log.moved_choices > 0
    for layer in range(trace.num_layers):
        expected = gate.layer(layer)(trace.logits[layer])
        order = np.argsort(expected.expert_ids, axis=1)
        found = np.argsort(trace.expert_ids[layer], axis=1)
        in_order = lambda x, o: np.take_along_axis(np.asarray(x), o, 1)
        ids = in_order(expected.expert_ids, order)
        assert np.array_equal(in_order(trace.expert_ids[layer], found), ids)
        weights = in_order(trace.weights[layer], found)
        assert np.allclose(weights, in_order(expected.weights, order), rtol=1e-5, atol=1e-6)


@every_family
def test_the_rules_give_the_weights_and_the_order_that_the_model_has(family):
    import torch

    model = tiny(family)
    for layer in families.find_layers(model):
        hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits, weights, ids = layer.router(hidden)
            score = families.scores(layer.rule, logits)
            compared = families.selection(layer.rule, score)
            assert torch.equal(families.weights(layer.rule, logits, score, ids), weights)
        best = compared.topk(layer.rule.top_k, dim=1)[1]
        assert torch.equal(best.sort(1).values, ids.sort(1).values)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Next", "DeepseekV3"])
def test_decode_from_is_decoding_step_by_step(family):
    import torch

    model = tiny(family)
    gate = capture.gate_for(model, SHARE, **STRONG)
    tokens = torch.randint(3, 64, (5, 9), generator=torch.Generator().manual_seed(3))
    slow, steps = decode(model, tokens, 4, gate, kl=True)
    with torch.no_grad(), capture.gated(model, gate, decode_from=4, kl=True) as log:
        fast = model(tokens).logits[:, 4:]
    assert torch.allclose(slow, fast, atol=1e-4)
    assert np.array_equal(log.moved, steps.moved) and log.moved_choices > 0
    assert np.array_equal(log.lost_favorites, steps.lost_favorites)
    assert np.allclose(log.time, steps.time) and np.allclose(log.own_time, steps.own_time)
    assert log.left_alone == steps.left_alone == 20
    assert np.isclose(log.kl[0], steps.kl.mean(), rtol=1e-2, atol=1e-7)


def test_kl_is_that_from_a_model_that_was_never_gated():
    import torch

    model = tiny("Mixtral")
    gate = capture.gate_for(model, SHARE, **STRONG)
    tokens = torch.randint(3, 64, (4, 9), generator=torch.Generator().manual_seed(5))
    with capture.record(model) as outside:  # the second run of each step is nobody's
        gated, log = decode(model, tokens, 3, gate, kl=True)
    assert outside.num_tokens == tokens.numel()
    plain, _ = decode(model, tokens, 3)
    expected = [
        float(metrics.kl(to_jax(plain[:, t]), to_jax(gated[:, t]))) for t in range(plain.shape[1])
    ]
    assert max(expected) > 1e-4
    assert np.allclose(log.kl, expected, rtol=1e-3, atol=1e-7)
    assert "nats a token" in log.summary()


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Next"])
def test_the_model_beside_it_follows_beams(family):
    model = tiny(family)
    gate = capture.gate_for(model, SHARE, r_comp=0.0, r_comm=0.0, token_time=1e-6)
    options = dict(max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=-1)
    options |= dict(return_dict_in_generate=True)
    plain = model.generate(**prompts(model), **options)
    with capture.gated(model, gate, kl=True) as log:
        found = model.generate(**prompts(model), **options)
    assert np.array_equal(found.sequences, plain.sequences)
    assert np.ptp(found.beam_indices.numpy()[:, :5], axis=1).any()  # some changed places
    np.testing.assert_array_equal(log.kl, np.zeros(5))
    cache = cache_of(found)
    assert "reorder_cache" in dir(cache) and "reorder_cache" not in vars(cache)


def test_the_log_counts_what_metrics_count():
    import torch

    model = tiny("Olmoe")
    gate = capture.gate_for(model, SHARE, **(STRONG | dict(r_comp=-1e6, protect=0)))
    costs = gating.LayerCosts(1e-6, 2e-6, 3e-7, top_k=2)
    options = dict(decode_only=False, keep_choices=True, costs=costs, rest_time=1e-3)
    with torch.no_grad(), capture.gated(model, gate, **options) as log:
        model(**prompts(model))
    (kept,) = log.kept
    overlap = metrics.top_k_overlap(kept.own_ids, kept.expert_ids)
    retention = metrics.top1_retention(kept.own_ids, kept.expert_ids)
    assert np.isclose(log.overlap, overlap) and np.isclose(log.retention, retention)
    assert log.retention < 1
    times = [float(costs.layer_time(jnp.asarray(ids), SHARE)) for ids in kept.expert_ids]
    own = [float(costs.layer_time(jnp.asarray(ids), SHARE)) for ids in kept.own_ids]
    assert np.isclose(log.tbt[0], sum(times) + 3 * 15 * 3e-7 + 1e-3)
    assert np.isclose(log.own_tbt[0], sum(own) + 1e-3)
    assert log.gate_time_per_layer.shape == (3,) and np.all(log.gate_time_per_layer > 0)
    assert np.all(np.diff(kept.own_weights) <= 0)
    assert log.tokens.tolist() == [15]


def test_prompts_and_large_batches_are_left_alone():
    model = tiny("Mixtral")
    gate = capture.gate_for(model, SHARE, **STRONG)
    generate = lambda: model.generate(
        **prompts(model), max_new_tokens=4, do_sample=False, eos_token_id=-1
    )
    with capture.gated(model, gate) as log:
        generate()
    assert log.num_steps == 3 and log.left_alone == 15 and log.tokens.tolist() == [3, 3, 3]
    with capture.gated(model, gate, max_tokens=2) as log:
        generate()
    assert log.num_steps == 0 and log.left_alone == 24
    assert np.isnan(log.overlap) and np.isnan(log.gate_time_per_layer).all()
    assert "24 tokens were left alone" in log.summary()
    with capture.gated(model, capture.gate_for(model, SHARE, **STRONG, max_rows=2)) as log:
        generate()
    assert log.num_steps == 3 and log.moved_choices == 0


def test_a_gate_of_each_layer_and_of_another_model():
    import torch

    model = tiny("DeepseekV3")
    both = dict(r_comm=0.0, token_time=1e-6)
    second = capture.gate_for(model, SHARE, r_comp=np.array([0.0, -1e5]), **both)
    with torch.no_grad(), capture.gated(model, second, decode_only=False) as log:
        model(**prompts(model))
    assert log.layer_numbers == [1, 2]
    assert log.moved[0, 0] == 0 < log.moved[0, 1]
    refused = {
        "score = 'softmax': the model has 'sigmoid'": dict(score="softmax"),
        "top_k = 1: the model has 2": dict(top_k=1),
        "layers = 3: the model has 2": dict(r_comp=np.zeros(3), selection_bias=None),
        "layers = 4: the model has 2": dict(token_time=np.ones(4), selection_bias=None),
        "layers = 5: the model has 2": dict(selection_bias=np.zeros((5, 8))),
        "num_groups = 2: the model has 4": dict(num_groups=2, top_groups=1),
        "selection_bias: the model has another": dict(selection_bias=np.ones(8)),
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            capture.gate_for(model, SHARE, **({"r_comp": -1.0} | both | options))
    with pytest.raises(ValueError, match="share, experts = 6: the model has 8"):
        capture.gate_for(tiny("Mixtral"), np.eye(6), r_comp=0.0, **both)
    with pytest.raises(ValueError, match="gate is a str"), capture.gated(model, "gate"):
        pass
    wrong = capture.gate_for(model, SHARE, r_comp=1.0, **both)
    with (
        pytest.raises(ValueError, match="r_comp = 1: allowed is finite, 0 or less"),
        capture.gated(model, wrong),
    ):
        pass


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_tokens=0), "max_tokens = 0: allowed is 1 or more"),
        (dict(decode_from=-1), "decode_from = -1: allowed is 0 or more"),
        (dict(rest_time=-1.0), r"gated.rest_time = -1.0: allowed is"),
        (dict(costs=1e-6), "costs = 1e-06: allowed is a LayerCosts of one setting"),
        (dict(costs=gating.LayerCosts(np.ones(2), top_k=2)), "allowed is a LayerCosts of one"),
    ],
)
def test_options_that_make_no_sense(options, message):
    model = tiny("Mixtral")
    gate = capture.gate_for(model, SHARE, **STRONG)
    with pytest.raises(ValueError, match=message), capture.gated(model, gate, **options):
        pass


def test_scores_that_are_not_finite_name_the_layer():
    import torch

    model = copy.deepcopy(tiny("Mixtral"))
    gate = capture.gate_for(model, SHARE, **STRONG)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.fill_(float("nan"))
    with (
        pytest.raises(ValueError, match="model.layers.1.mlp.gate: a score is NaN"),
        torch.no_grad(),
        capture.gated(model, gate, decode_only=False),
    ):
        model(**prompts(model))


def test_gradients_flow_through_a_gated_model():
    model = copy.deepcopy(tiny("Mixtral"))
    gate = capture.gate_for(model, SHARE, **STRONG)
    ids, mask = padded(PROMPTS)
    with capture.gated(model, gate, decode_only=False) as log:
        model(ids, attention_mask=mask, labels=ids).loss.backward()
    assert log.moved_choices > 0
    router = model.model.layers[0].mlp.gate.weight.grad
    assert bool(router.isfinite().all()) and bool((router != 0).any())


def test_gradients_of_checkpoints_are_refused():
    model = copy.deepcopy(tiny("Mixtral")).train()
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)()
    gate = capture.gate_for(model, SHARE, **STRONG)
    with (
        pytest.raises(ValueError, match="trains with gradient checkpointing"),
        capture.gated(model, gate),
    ):
        pass
    with capture.gated(model.eval(), gate) as log:
        model.generate(**prompts(model), max_new_tokens=2, do_sample=False)
    assert log.num_steps == 1


@pytest.mark.parametrize("inside", [True, False])
def test_a_recording_inside_sees_the_gate_and_one_around_it_the_model(inside):
    import torch

    model = tiny("Olmoe")
    gate = capture.gate_for(model, SHARE, **(STRONG | dict(r_comp=-1e6)))
    with torch.no_grad(), capture.record(model) as plain:
        model(**prompts(model))
    contexts = [capture.gated(model, gate, decode_only=False), capture.record(model)]
    first, second = contexts if inside else reversed(contexts)
    with torch.no_grad(), first as one, second as two:
        model(**prompts(model))
    recording = two if inside else one
    # The first layer, whose hidden states no gate has touched.
    same = np.array_equal(recording.trace().expert_ids[0], plain.trace().expert_ids[0])
    assert same != inside


def test_arrays_cross_without_a_copy():
    import torch

    tensor = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert to_torch(array, tensor.device).data_ptr() == tensor.data_ptr()
    assert np.array_equal(to_jax(tensor.T), tensor.numpy().T)


def test_a_gate_in_a_file_is_the_same(tmp_path):
    gate = capture.gate_for(tiny("DeepseekV3"), SHARE, **(STRONG | dict(r_comp=-np.ones(2))))
    capture.save_gate(gate, tmp_path / "gate.eqx")
    found = capture.load_gate(tmp_path / "gate.eqx")
    for name in vars(gate):
        assert np.array_equal(getattr(found, name), getattr(gate, name)), name
    (tmp_path / "other.eqx").write_bytes(b"{}\n")
    for name, message in (("none.eqx", "no such file"), ("other.eqx", "not a gate that")):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            capture.load_gate(tmp_path / name)
