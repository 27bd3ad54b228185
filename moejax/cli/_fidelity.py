"""`moejax fidelity`: what a gate costs a Hugging Face model on a text, and what it gains."""

import argparse
import json
import math
import time

import numpy as np

from moejax.capture import Fidelity, fidelity, load_gate
from moejax.cli._capture import add_model_options, load, read_text, writable
from moejax.cli._format import finite, table, use_cache, whole
from moejax.cli._progress import progress_line
from moejax.gating import LayerCosts


EXAMPLES = """\
examples:
  moejax fidelity ./my-checkpoint text.txt --gate gate.eqx --batch 32 --length 128
  moejax fidelity allenai/OLMoE-1B-7B-0924 text.txt --gate gate.eqx -o fidelity.json

The gate comes from Python: capture.save_gate(capture.gate_for(model, share, r_comp=-3e3,
r_comm=-0.01, token_time=1e-6, protect=1), "gate.eqx"). Windows of a batch are decoded side by
side, so --batch is the batch that the gate sees."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "fidelity",
        help="what a gate does to a Hugging Face model on a text",
        description="Cuts a text into windows, runs them with and without the gate as if they were "
        "decoded, and prints every metric with its 95 % confidence interval.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a hub id, or the folder of a checkpoint")
    parser.add_argument("text", help="a text file")
    parser.add_argument("--gate", required=True, metavar="EQX", help="of moejax.capture.save_gate")
    parser.add_argument("--batch", type=whole(1), default=8, help="windows a batch (default 8)")
    parser.add_argument("--length", type=whole(3), default=128, help="of a window (default 128)")
    parser.add_argument("--windows", type=whole(1), default=64, help="at most (default 64)")
    parser.add_argument(
        "--decode-from", type=whole(0), help="first gated position (default: half the length)"
    )
    parser.add_argument(
        "--expert-rows", type=whole(0), default=64, help="tokens to run all experts on (default 64)"
    )
    parser.add_argument("--gate-step-us", type=finite, help="modelled time of a step of the gate")
    parser.add_argument("--visit-us", type=finite, help="modelled time of a token on a node")
    parser.add_argument("--rest-us", type=finite, default=0.0, help="of a step outside MoE layers")
    parser.add_argument("-o", "--out", metavar="JSON", help="write the numbers, too")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints one row per metric."""
    use_cache()
    started = time.monotonic()
    out = None if options.out is None else writable(options.out)
    gate = load_gate(options.gate)
    text = read_text(options.text)
    tokenizer, model = load(options)
    tokens = _windows(tokenizer, text, options)
    found = fidelity(
        model,
        tokens,
        gate,
        batch=options.batch,
        decode_from=options.decode_from,
        costs=_costs(gate, options),
        rest_time=1e-6 * options.rest_us,
        expert_rows=options.expert_rows,
        progress=progress_line("fidelity"),
    )
    print(_table(found))
    print(f"\n{found.log.summary()}")
    print(
        f"{len(tokens) // options.batch * options.batch} windows of {options.length} tokens, "
        f"{options.batch} side by side; {time.monotonic() - started:.1f} s"
    )
    if out is not None:
        rows = {name: measure._asdict() for name, measure in found.measures.items()}
        for row in rows.values():
            row["half"] = None if math.isnan(row["half"]) else row["half"]
        out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {out}")


def _windows(tokenizer, text: str, options: argparse.Namespace) -> np.ndarray:
    ids = np.asarray(tokenizer(text, verbose=False)["input_ids"])
    count = min(len(ids) // options.length, options.windows)
    if count < options.batch:
        raise ValueError(
            f"{options.text}: {len(ids)} tokens are {count} windows of {options.length}: allowed "
            f"is at least --batch {options.batch} of them"
        )
    return ids[: count * options.length].reshape(count, options.length)


def _costs(gate, options: argparse.Namespace) -> LayerCosts | None:
    if options.gate_step_us is None and options.visit_us is None:
        return None
    if gate.token_time.ndim:
        raise ValueError("--visit-us, --gate-step-us: allowed for gates with one token_time")
    visit, step = (1e-6 * (us or 0.0) for us in (options.visit_us, options.gate_step_us))
    return LayerCosts(gate.token_time, visit, step, top_k=gate.top_k)


def _table(found: Fidelity) -> str:
    rows = []
    for name, measure in found.measures.items():
        half = "" if math.isnan(measure.half) else f"+-{measure.half:.3g}"
        rows.append((name, f"{measure.mean:.5g}", half, measure.unit, measure.over))
    return table(("metric", "mean", "95%", "unit", "over"), rows)
