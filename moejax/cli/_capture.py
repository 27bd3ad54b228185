"""`moejax capture`: the routing of a Hugging Face model on prompts, as a trace."""

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

from moejax.capture import PHASES, record, require_transformers
from moejax.cli._format import use_cache, whole
from moejax.cli._progress import progress_line


EXAMPLES = """\
examples:
  moejax capture mistralai/Mixtral-8x7B-v0.1 prompts.txt -o trace.npz --dtype bfloat16
  moejax capture ./my-checkpoint prompts.txt -o trace.npz --max-tokens 100000 --spill /scratch
  moejax trace trace.npz

A hub id is downloaded by transformers; a folder is read as it is. Use --phase decode for a trace
whose statistics and decode batches leave the prompts out."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "capture",
        help="record the routing of a Hugging Face model on prompts",
        description="Generates from every line of a text file and records which experts each token "
        "chose, as npz for moejax.routing.load.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a hub id, or the folder of a checkpoint")
    parser.add_argument("prompts", help="a text file, one prompt a line")
    parser.add_argument("-o", "--out", required=True, metavar="NPZ", help="where the trace goes")
    parser.add_argument(
        "--new-tokens", type=whole(1), default=64, help="to generate for each prompt (default 64)"
    )
    parser.add_argument("--batch", type=whole(1), default=8, help="prompts at a time (default 8)")
    parser.add_argument("--sample", action="store_true", help="draw tokens, not the likeliest")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the draws (default 0)")
    parser.add_argument("--max-tokens", type=whole(1), help="keep so many tokens in all")
    parser.add_argument("--phase", choices=list(PHASES), default="all", help="valid tokens")
    parser.add_argument("--no-logits", action="store_true", help="experts and weights only")
    parser.add_argument("--spill", metavar="DIR", help="keep tokens in files while recording")
    add_model_options(parser)
    parser.set_defaults(run=run)


DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """How a checkpoint is loaded."""
    parser.add_argument("--dtype", default="auto", help=f"{', '.join(DTYPES)} (default auto)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, auto (accelerate)")


def run(options: argparse.Namespace) -> None:
    """Writes the trace and says what is in it and what recording took."""
    use_cache()
    prompts = [line for line in read_text(options.prompts).splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{options.prompts}: holds no prompt")
    out = writable(options.out)
    tokenizer, model = load(options)
    torch = importlib.import_module("torch")
    torch.manual_seed(options.seed)
    settings = dict(max_tokens=options.max_tokens, spill=options.spill)
    progress, started = progress_line("capture"), time.monotonic()
    with record(model, logits=not options.no_logits, **settings) as recording:
        for first in range(0, len(prompts), options.batch):
            texts = prompts[first : first + options.batch]
            inputs = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
            inputs.pop("token_type_ids", None)
            model.generate(
                **inputs,
                max_new_tokens=options.new_tokens,
                do_sample=options.sample,
                pad_token_id=tokenizer.pad_token_id,
            )
            progress(min(first + options.batch, len(prompts)), len(prompts))
            if recording.dropped:
                break
    taken = time.monotonic() - started
    recording.save(out, options.phase)
    trace = f"{len(recording.layer_numbers)} MoE layers, {recording.num_experts} experts"
    full = f" (full: {recording.dropped} more were seen)" if recording.dropped else ""
    per_token = 1e6 * recording.seconds / recording.num_tokens / len(recording.layer_numbers)
    print(
        f"wrote {out}: {recording.model}, {trace}, top-{recording.top_k}, {recording.num_tokens} "
        f"tokens{full}\n{taken:.1f} s, of which recording {recording.seconds:.2f} s "
        f"({per_token:.1f} us a token and layer)"
    )


def writable(path: str) -> Path:
    """A file to write, looked at before hours of work. **Raises:** `ValueError` in one line."""
    out = Path(path)
    if not out.parent.is_dir():
        raise ValueError(f"{out}: no such folder")
    if out.is_dir():
        raise ValueError(f"{out}: is a folder, allowed is a file")
    return out


def read_text(path: str) -> str:
    """A UTF-8 file. **Raises:** `ValueError` where it is not one."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from None


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """(tokenizer, model) of a hub id or folder.

    **Raises:** `ValueError` in one line where there is none, and as `require_transformers`.
    """
    transformers = require_transformers()
    torch = importlib.import_module("torch")
    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype {options.dtype}: allowed is {', '.join(DTYPES)}")
    dtype = "auto" if options.dtype == "auto" else getattr(torch, options.dtype)
    _check_device(torch, options.device)
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    placed = {"device_map": "auto"} if options.device == "auto" else {}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, padding_side="left")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=dtype, **placed
        )
    except Exception as error:  # whatever a config, an index or a file of weights is broken by
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"{options.model}: no model to load ({why})") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    model = model if placed else model.to(options.device)
    return tokenizer, model.eval()


def _check_device(torch: Any, device: str) -> None:
    try:
        # A meta device has no memory, and an absent one no way to make a tensor.
        fine = device == "auto" or torch.empty(1, device=device).device.type != "meta"
        why = "it holds no weights"
    except Exception as error:  # torch asserts, or raises what its backend does
        fine, why = False, " ".join(str(error).split())[:120]
    if not fine:
        raise ValueError(f"--device {device}: allowed is cpu, auto, or a GPU that is here ({why})")
