"""Recording inside tiny models of all families: what the trace says is what the model did."""

import numpy as np
import pytest

from moejax import capture, routing
from moejax.capture._versions import check_version
from tests.capture_models import FAMILIES, needs_torch, padded, tiny


needs_torch()
PROMPTS = [[5, 9, 11, 23, 40, 3, 8], [7, 8, 9], [33, 21, 50, 3, 12]]
families = pytest.mark.parametrize("family", FAMILIES)


def generate(model, rows, new=6, **options):
    ids, mask = padded(rows)
    options = dict(max_new_tokens=new, do_sample=False) | options
    return model.generate(ids, attention_mask=mask, **options)


def by_hand(model, ids, mask):
    """Ids [layers, tokens, top_k] and weights of real tokens, from the routers' own outputs."""
    import torch

    seen = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: seen.append(output))
        for module in model.modules()
        if type(module).__name__ in capture.FAMILIES
    ]
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    for hook in hooks:
        hook.remove()
    real = mask.reshape(-1).bool()
    stack = lambda part: torch.stack([output[part][real] for output in seen]).numpy()
    return stack(2), stack(1), stack(0), logits


@families
def test_the_trace_is_what_the_routers_returned(family):
    import torch

    model = tiny(family)
    ids, mask = padded(PROMPTS)
    expert_ids, weights, router_logits, logits = by_hand(model, ids, mask)
    with torch.no_grad(), capture.record(model) as recording:
        inside = model(ids, attention_mask=mask).logits
    assert torch.equal(inside, logits)
    trace = recording.trace()
    trace.check()
    order = np.argsort(-weights, axis=-1, kind="stable")
    assert np.array_equal(trace.expert_ids, np.take_along_axis(expert_ids, order, -1))
    assert np.array_equal(trace.weights, np.take_along_axis(weights, order, -1))
    assert np.array_equal(trace.logits, router_logits)
    assert trace.sequence_start.tolist() == [0, 7, 10]
    assert trace.model == model.config.model_type
    dense = 1 if family.startswith("Deepseek") else 0
    assert recording.layer_numbers == list(range(dense, 3))


@families
def test_padded_prompts_give_the_trace_of_prompts_one_by_one(family):
    model = tiny(family)
    with capture.record(model) as together:
        generate(model, PROMPTS)
    alone = []
    for row in PROMPTS:
        with capture.record(model) as recording:
            generate(model, [row])
        alone.append((recording.trace("decode"), recording.trace("prompt")))
    for phase, expected in zip(("decode", "prompt"), zip(*alone)):
        found, expected = together.trace(phase), routing.concat(expected)
        assert np.array_equal(found.expert_ids, expected.expert_ids)
        assert np.array_equal(found.valid, expected.valid)
        assert np.array_equal(found.sequence_start, expected.sequence_start)
        assert np.allclose(found.logits, expected.logits, atol=1e-4)
    prompts = together.trace("prompt")
    starts = np.append(np.asarray(prompts.sequence_start), prompts.num_tokens)
    lengths = [int(np.asarray(prompts.valid)[a:b].sum()) for a, b in zip(starts, starts[1:])]
    assert lengths == [len(row) for row in PROMPTS]


def test_a_row_that_ended_is_not_recorded_while_others_go_on():
    model = tiny("Mixtral")
    everything = generate(model, PROMPTS, eos_token_id=-1)
    stop = int(everything[1, 8])  # the second token that the second prompt gets
    first_stops = [
        next((i for i, token in enumerate(row[7:].tolist()) if token == stop), 6)
        for row in everything
    ]
    with capture.record(model, end_ids=[stop]) as recording:
        generate(model, PROMPTS, eos_token_id=stop, pad_token_id=0)
    trace = recording.trace("decode")
    assert int(trace.valid.sum()) == sum(min(count, 5) for count in first_stops)
    with capture.record(model, end_ids=()) as recording:
        output = generate(model, PROMPTS, eos_token_id=stop, pad_token_id=0)
    assert int(recording.trace("decode").valid.sum()) == 3 * (output.shape[1] - 7 - 1)


def test_a_harness_of_plain_batches_and_right_padding():
    import torch

    model = tiny("Qwen3Moe")
    with torch.no_grad(), capture.record(model) as recording:
        for rows in (PROMPTS[:2], PROMPTS[2:]):
            ids, mask = padded(rows, side="right")
            model(ids, attention_mask=mask)
    trace = recording.trace()
    assert trace.sequence_start.tolist() == [0, 7, 10]
    alone = []
    for row in PROMPTS:
        with torch.no_grad(), capture.record(model) as one:
            model.model(torch.tensor([row]))  # the model without its head, by position
        alone.append(one.trace())
    assert np.array_equal(trace.expert_ids, routing.concat(alone).expert_ids)


def test_a_prompt_in_pieces_is_a_prompt():
    import torch

    model = tiny("Qwen3Moe")
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        with capture.record(model) as whole:
            model(ids)
        with capture.record(model) as pieces:
            first = model(ids[:, :4], use_cache=True)
            cache = getattr(first, "cache", None) or first.past_key_values
            name = "cache" if hasattr(first, "cache") else "past_key_values"
            model(ids[:, 4:], **{name: cache})
    assert np.array_equal(pieces.trace("prompt").valid, np.ones(7, bool))
    assert pieces.trace().sequence_start.tolist() == [0]
    assert np.array_equal(pieces.trace().expert_ids, whole.trace().expert_ids)


def test_memory_is_bounded_and_spills_to_disk(tmp_path):
    model = tiny("Olmoe")
    with capture.record(model) as memory:
        generate(model, PROMPTS)
    with capture.record(model, max_tokens=11, spill=tmp_path) as disk:
        generate(model, PROMPTS)
    assert disk.num_tokens == 11 and disk.dropped == memory.num_tokens - 11
    assert len(list(tmp_path.glob("*/*"))) == 5
    trace = disk.trace()
    assert trace.num_tokens == 11 and trace.num_sequences == 3
    first = np.concatenate([np.arange(7), 12 + np.arange(3), [20]])
    assert np.array_equal(memory.trace().sequence_start, [0, 12, 20])
    assert np.array_equal(trace.expert_ids, memory.trace().expert_ids[:, first])
    with capture.record(model, logits=False) as small:
        generate(model, PROMPTS)
    assert small.trace().logits is None
    assert np.array_equal(small.trace().expert_ids, memory.trace().expert_ids)


def test_a_saved_trace_reads_back(tmp_path):
    model = tiny("DeepseekV3")
    with capture.record(model, spill=tmp_path) as recording:
        generate(model, PROMPTS)
    recording.save(tmp_path / "trace.npz")
    trace = routing.load(tmp_path / "trace.npz")
    expected = recording.trace()
    for name in ("expert_ids", "weights", "logits", "valid", "sequence_start", "decode"):
        assert np.array_equal(getattr(trace, name), getattr(expected, name)), name
    assert (trace.model, trace.num_experts) == (expected.model, 8)
    assert np.array_equal(trace.decode, recording.trace("decode").valid)
    recording.save(tmp_path / "decode.npz", "decode")
    assert np.array_equal(routing.load(tmp_path / "decode.npz").valid, trace.decode)


def test_what_can_not_be_recorded_is_said():
    import torch

    with (
        pytest.raises(ValueError, match="Linear has no router that is known"),
        capture.record(torch.nn.Linear(2, 2)),
    ):
        pass
    model = tiny("Mixtral")
    with (
        pytest.raises(ValueError, match="max_tokens = 0: allowed is 1 or more"),
        capture.record(model, max_tokens=0),
    ):
        pass
    with (
        pytest.raises(ValueError, match="no folder to write to"),
        capture.record(model, spill="/no/such/folder"),
    ):
        pass
    with capture.record(model) as recording:
        pass
    with pytest.raises(ValueError, match="nothing was recorded"):
        recording.trace()
    ids, _ = padded(PROMPTS)
    with (
        pytest.raises(ValueError, match=r"attention_mask has shape \(3, 1, 7, 7\): allowed is"),
        capture.record(model),
    ):
        model(ids, attention_mask=torch.ones(3, 1, 7, 7, dtype=torch.bool))
    with capture.record(model) as recording, torch.no_grad():
        model(ids)  # after a call that failed
    with pytest.raises(ValueError, match="unknown phase 'prefill'"):
        recording.trace("prefill")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("model", ["allenai/OLMoE-1B-7B-0924", None])
def test_what_is_no_model_is_said(model):
    with (
        pytest.raises(ValueError, match=f"model is a {type(model).__name__}: allowed is a loaded"),
        capture.record(model),
    ):
        pass


def test_a_router_that_did_not_run_is_said(monkeypatch):
    import torch

    model = tiny("Mixtral")
    block = model.model.layers[1].mlp
    monkeypatch.setattr(block, "forward", lambda hidden: hidden)
    with (
        pytest.raises(ValueError, match=r"model.layers.1.mlp.gate did not run .*fused kernel"),
        torch.no_grad(),
        capture.record(model),
    ):
        model(torch.tensor([[3, 4, 5]]))


@pytest.mark.parametrize("version", ["4.57.6", "5.12.0", "6.0.0", "unknown"])
def test_other_versions_are_refused_in_one_line(version):
    with pytest.raises(ValueError, match="allowed is 5.18 or newer, below 6$") as error:
        check_version(version)
    assert str(error.value).startswith(f"transformers {version} is installed")


def test_versions_from_5_18_on_are_accepted():
    for version in ("5.18.0", "5.24.0", "5.31.2"):
        check_version(version)
