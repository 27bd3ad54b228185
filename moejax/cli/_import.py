"""`moejax import`: what serving engines write down about experts, as a trace or as counts."""

import argparse
from pathlib import Path

from moejax import capture, routing
from moejax.cli._format import use_cache, whole


FORMATS = {
    "sglang": "counts of its expert distribution recorder, CSV or .pt; ranks are summed",
    "sglang-tokens": "its per_token dumps",
    "vllm": "arrays of routed experts: .npy, .npz, or the JSON of a response",
    "llama.cpp": "CSV of its moe-trace example",
    "eplb": "a weight tensor [layers, experts], .npy or .pt",
    "array": "router logits, probabilities or ids [layers, tokens, ...], .npy or .npz",
}
EXAMPLES = """\
examples:
  moejax import sglang expert_distribution_rank*.csv -o counts.csv
  moejax import vllm request-*.npy --num-experts 128 -o trace.npz
  moejax import llama.cpp moe_trace.csv --top-k 8 --num-experts 128 -o trace.npz
  moejax import array logits.npy --kind logits --top-k 2 -o trace.npz

formats:
""" + "\n".join(f"  {name:14s} {what}" for name, what in FORMATS.items())


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "import",
        help="turn what serving engines dump into a trace or counts",
        description="Writes a trace (.npz) where the files have tokens, and counts of each expert "
        "(.csv) from any of them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("format", choices=list(FORMATS), metavar="FORMAT", help="see below")
    parser.add_argument("files", nargs="+")
    parser.add_argument("-o", "--out", required=True, help="trace (.npz) or counts (.csv)")
    parser.add_argument("--num-experts", type=whole(1), help="of a layer, where files do not say")
    parser.add_argument("--top-k", type=whole(1), help="of a token, where files do not say")
    parser.add_argument("--kind", choices=["logits", "probabilities", "ids"], help="of an array")
    parser.add_argument(
        "--phase", choices=list(capture.PHASES), help="valid tokens (vllm only; all)"
    )
    parser.set_defaults(run=run)


_TAKES = {
    "sglang": ("num_experts",),
    "vllm": ("num_experts", "phase"),
    "llama.cpp": ("num_experts", "top_k"),
    "array": ("num_experts", "top_k", "kind"),
}
"""Options that say what a format's files do not; the other formats take none."""


def run(options: argparse.Namespace) -> None:
    """Reads, writes and says what there was."""
    use_cache()
    for name in ("num_experts", "top_k", "kind", "phase"):
        if getattr(options, name) is not None and name not in _TAKES.get(options.format, ()):
            raise ValueError(f"--{name.replace('_', '-')} says nothing of {options.format} files")
    out = Path(options.out)
    if out.suffix not in (".npz", ".csv"):
        raise ValueError(f"--out {out}: allowed endings are .npz (trace) and .csv (counts)")
    found = _read(options)
    if isinstance(found, routing.RoutingTrace):
        if out.suffix == ".npz":
            routing.save(found, out)
        else:
            capture.save_counts(capture.ExpertCounts.of(found), out)
        print(
            f"wrote {out}: {found.num_layers} MoE layers, {found.num_experts} experts, "
            f"top-{found.top_k}, {found.num_tokens} tokens, {int(found.valid.sum())} valid, in "
            f"{found.num_sequences} sequences"
        )
        return
    if out.suffix != ".csv":
        raise ValueError(f"--out {out}: {options.format} has counts, no tokens: allowed is .csv")
    capture.save_counts(found, out)
    layers, experts = found.counts.shape
    print(f"wrote {out}: {layers} MoE layers, {experts} experts, {found.counts.sum():g} choices")


def _read(options: argparse.Namespace) -> routing.RoutingTrace | capture.ExpertCounts:
    if options.format == "sglang":
        return capture.load_sglang(options.files, num_experts=options.num_experts)
    if options.format == "sglang-tokens":
        return capture.load_sglang_trace(options.files)
    if options.format == "vllm":
        _need(options, "num_experts")
        phase = options.phase or "all"
        return capture.load_routed_experts(options.files, options.num_experts, phase=phase)
    if len(options.files) != 1:
        raise ValueError(f"{len(options.files)} files: allowed is one for {options.format}")
    (file,) = options.files
    if options.format == "eplb":
        return capture.load_eplb_weights(file)
    if options.format == "llama.cpp":
        _need(options, "top_k", "num_experts")
        return capture.load_llama_cpp(file, options.top_k, options.num_experts)
    sizes = dict(top_k=options.top_k, num_experts=options.num_experts, kind=options.kind)
    return capture.load_array(file, **sizes)


def _need(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is needed for {options.format}")
