"""The tasks of one decoder layer: GPUs with PIM in their memory, or a near-memory system.

Resources of a GPU: `gpu` its arithmetic, `hbm` the bus to its memory, `pim` the units inside the
memory and `pim_bus` their own path for tokens, `net` its link to the others.
"""

import dataclasses

from moejax.schedule._graph import Task, TaskGraph, repeated


GPU_RESOURCES = ("gpu", "hbm", "pim", "pim_bus", "net")
JOINT = ("all_reduce", "all_gather", "dispatch", "combine")
"""Tasks that all GPUs take part in at once."""

_ATTENTION = (
    Task("qkv", ("gpu", "hbm")),
    Task("attention", ("pim",), after=("qkv",)),
    Task("gpu_attention", ("gpu", "hbm"), after=("qkv",)),
    Task("projection", ("gpu", "hbm"), after=("attention", "gpu_attention")),
    Task("all_reduce", ("net",), after=("projection",)),
)


def attention_tasks() -> list[Task]:
    """The attention block: projections on the GPU, decode attention on PIM, prompts (and kinds of
    attention that PIM is no good at) on the GPU."""
    # First of what is ready: it keeps PIM waiting, and the experts of a half batch take longer.
    return [dataclasses.replace(task, phase="attention", priority=4) for task in _ATTENTION]


def expert_tasks(
    *, exposed: bool = False, early_shared: bool = True, shared_bus: bool = False
) -> list[Task]:
    """The routed part of a layer (Sieve, arXiv 2605.11277, execution graph).

    The GPU streams the weights of its experts while it computes them; PIM gets its tokens and
    returns results. Both wait for the decision and for tokens of other GPUs. Where several loads
    are ready at once, results of PIM go first, then its tokens, then weights of routed experts.

    **Arguments:**

    - `exposed`: the dispatch waits for the decision, which nothing then hides; else they start
        together.
    - `early_shared`: shared experts are loaded as soon as the router has run; else with the rest.
    - `shared_bus`: tokens to and from PIM queue behind the GPU's weights, which are one long
        transfer that nothing interrupts; else they have a command path of their own.
    """
    chosen = ("decide", "dispatch")
    bus = ("hbm" if shared_bus else "pim_bus",)
    routed = [
        Task("router", ("gpu", "hbm"), after=("all_reduce",), phase="attention"),
        Task("all_gather", ("net",), after=("router",)),
        Task("metadata", ("gpu",), after=("all_gather",)),
        Task("decide", after=("metadata",), hidden_by=() if exposed else ("dispatch",)),
        Task("dispatch", ("net",), after=("decide",) if exposed else ("metadata",)),
        Task("load_shared", ("hbm",), after=("router" if early_shared else "decide",)),
        Task("shared", ("gpu",), after=("router",), streams=("load_shared",)),
        Task("load_early", ("hbm",), after=("router",)),
        Task("to_pim", bus, after=chosen, priority=2),
        Task("load", ("hbm",), after=("decide",), priority=1),
        Task("gemm", ("gpu",), after=chosen, streams=("load", "load_early")),
        Task("pim", ("pim",), after=("to_pim",)),
        Task("from_pim", bus, after=("pim",), priority=3),
        Task("combine", ("net",), after=("gemm", "from_pim", "shared")),
        Task("sum", ("gpu", "hbm"), after=("combine",)),
    ]
    apart = ("router", "all_gather", "metadata", "decide")
    own = lambda task: task if task.name in apart else dataclasses.replace(task, phase="experts")
    return [own(task) for task in routed]


def layer_graph(
    num_gpus: int = 1,
    *,
    exposed: bool = False,
    early_shared: bool = True,
    shared_bus: bool = False,
    halves: int = 1,
) -> TaskGraph:
    """The execution graph of one layer on `num_gpus` GPUs, which meet where tokens are exchanged.

    Tasks of GPU i are named `NAME@i`, the exchanges (`JOINT`) have one task each.

    With `halves=2` two half batches take turns (dense models with PIM are run that way): while the
    experts of half 1 run, so does the attention of half 2 (tasks `2.NAME`), and while those of half
    2 run, the attention of half 1 for the layer after (`next.NAME`). The attention of half 1 for
    the first layer is not in it.

    **Arguments:**

    - `exposed`, `early_shared`, `shared_bus`: see `expert_tasks`.

    **Raises:** `ValueError` for another number of halves or no GPU.
    """
    if halves not in (1, 2):
        raise ValueError(f"layer_graph: halves = {halves!r}: allowed are 1 and 2")
    if not isinstance(num_gpus, int) or num_gpus < 1:
        raise ValueError(f"layer_graph: num_gpus = {num_gpus!r}: allowed is an int from 1")
    experts = expert_tasks(exposed=exposed, early_shared=early_shared, shared_bus=shared_bus)
    if halves == 1:
        tasks, joint = [*attention_tasks(), *experts], list(JOINT)
    else:
        alone = _without(experts, "all_reduce")
        tasks = [
            *_prefixed("1.", alone),
            *_prefixed("2.", [*attention_tasks(), *experts]),
            *_prefixed("next.", attention_tasks(), start="1.sum"),
        ]
        joint = [f"{half}{name}" for half in ("1.", "2.", "next.") for name in JOINT]
    held = [f"{name}@{i}" for name in GPU_RESOURCES for i in range(num_gpus)]
    present = {task.name for task in tasks}
    return TaskGraph.of(repeated(tasks, num_gpus, [j for j in joint if j in present]), held)


def near_memory_graph(num_layers: int) -> TaskGraph:
    """The layers of a near-memory system one after the other (HDA-MoE, arXiv 2609.08682).

    Tasks of layer l: `attention:l`, `compute:l` and `memory:l` on the nodes, `exchange:l` (dispatch
    and gather) on the network, and `broadcast:l`, copies of experts that are sent while the layer
    before runs and that computing waits for. Broadcasts use a network of their own, as the
    papers' estimate has it.

    **Raises:** `ValueError` for no layer.
    """
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(
            f"near_memory_graph: num_layers = {num_layers!r}: allowed is an int from 1"
        )
    tasks = []
    for layer in range(num_layers):
        before = (f"compute:{layer - 1}",) if layer else ()
        # A copy leaves when the layer before starts, that is, when the one before that has ended.
        sent = (f"compute:{layer - 2}",) if layer > 1 else ()
        tasks += [
            Task(f"broadcast:{layer}", ("broadcast",), after=sent),
            Task(f"attention:{layer}", ("nodes",), after=(*before, f"broadcast:{layer}")),
            Task(f"memory:{layer}", ("nodes",), after=(f"attention:{layer}",)),
            Task(f"exchange:{layer}", ("network",), after=(f"memory:{layer}",)),
            Task(f"compute:{layer}", ("nodes",), after=(f"exchange:{layer}",)),
        ]
    return TaskGraph.of(tasks, ("nodes", "network", "broadcast"))


def _prefixed(prefix: str, tasks: list[Task], start: str | None = None) -> list[Task]:
    """Tasks renamed, those that wait for nothing waiting for `start`."""
    named = lambda names: tuple(prefix + name for name in names)
    found = []
    for task in tasks:
        after = named(task.after)
        if start is not None and not task.waits_for:
            after = (start,)
        phase = None if task.phase is None else prefix + task.phase
        renamed = dict(streams=named(task.streams), hidden_by=named(task.hidden_by))
        found.append(
            dataclasses.replace(task, name=prefix + task.name, after=after, phase=phase, **renamed)
        )
    return found


def _without(tasks: list[Task], name: str) -> list[Task]:
    """Tasks of which none waits for `name`, which has happened before."""
    left = lambda names: tuple(other for other in names if other != name)
    return [dataclasses.replace(task, after=left(task.after)) for task in tasks]
