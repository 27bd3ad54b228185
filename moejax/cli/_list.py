"""`moejax list`: what there is by name, with the source of every number."""

import argparse

from moejax import hardware, models
from moejax._checks import lookup
from moejax.cli._format import number, table
from moejax.serving import POLICIES


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "list",
        help="models, hardware and policies by name, with sources",
        description="Lists a registry, or every number of one entry with source and confidence.",
    )
    parser.add_argument("what", choices=("models", "hardware", "policies"))
    parser.add_argument("name", nargs="?", help="one entry; for hardware also a GPU or a PIM")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints a registry or one entry."""
    show = {"models": _models, "hardware": _hardware, "policies": _policies}
    print(show[options.what](options.name))


def _models(name: str | None) -> str:
    if name is not None:
        return _sources(lookup("model", name, models.MODELS).sources)
    rows = []
    for key in models.MODELS:
        model = models.get(key)
        kinds = "/".join(dict.fromkeys(layer.kind for layer in model.layers))
        rows.append((
            key,
            f"{model.num_parameters / 1e9:.1f}",
            f"{model.num_active_parameters / 1e9:.1f}",
            str(model.num_moe_layers),
            str(model.num_experts),
            str(model.top_k),
            str(model.num_shared_experts),
            kinds,
            model.native_precision.name,
        ))  # fmt: skip
    header = ("model", "params_b", "active_b", "moe layers", "experts", "top_k", "shared",
              "attention", "native")  # fmt: skip
    return table(header, rows)


def _hardware(name: str | None) -> str:
    if name is not None:
        known = {**hardware.HARDWARE, **hardware.GPUS, **hardware.PIMS}
        if name not in known and name[:1].isdigit():
            known[name] = hardware.preset(name)
        return _sources(lookup("hardware", name, known).sources)
    blocks = []
    for title, registry in (
        ("systems", hardware.HARDWARE),
        ("gpus", hardware.GPUS),
        ("pims", hardware.PIMS),
    ):
        rows = [(key, preset.description) for key, preset in registry.items()]
        blocks.append(table((title, ""), rows))
    blocks.append("any <gpus>x<gpu>-<pim> is a system too, such as 2xh100-attacc")
    return "\n\n".join(blocks)


def _policies(name: str | None) -> str:
    chosen = POLICIES if name is None else {name: lookup("policy", name, POLICIES)}
    answer = {True: "yes", False: "no"}
    rows = []
    for key, policy in chosen.items():
        shared = policy.num_groups in (None, 1)
        uses = "all channels" if shared else f"1 of {policy.num_groups} groups"
        facts = answer[policy.scheduled], answer[policy.compared], policy.description
        rows.append((key, uses, *facts))
    header = ("policy", "an expert on PIM uses", "scheduled", "in all", "what it does")
    return table(header, rows)


def _sources(rows) -> str:
    body = [
        (row.field, number(row.value), row.confidence, row.source + (row.note and f" ({row.note})"))
        for row in rows
    ]
    return table(("field", "value (SI)", "confidence", "source"), body)
