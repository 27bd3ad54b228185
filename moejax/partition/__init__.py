"""Which experts of a layer run on the GPU and which in HBM-PIM.

Read `_base.py` first: `PartitionCosts` is what a policy may look at, `times` the formula for a
layer; `score` says what any choice costs. `sieve` and `best_prefix` share the ladder of
`_ladder.py`; `optimal` is the yardstick; the baselines are `no_exp`, `all_exp`, `few_tokens`,
`pimoe_threshold` and `pimoe_channel`.

`_online.py` runs Sieve on a cost table that learns while batches come.

Every policy has the signature `policy(tokens_per_expert, costs) -> Partition`, takes one layer of
one GPU, and is batched with `jax.vmap`.
"""

from moejax.partition._base import Load as Load
from moejax.partition._base import Partition as Partition
from moejax.partition._base import PartitionCosts as PartitionCosts
from moejax.partition._base import Times as Times
from moejax.partition._base import times as times
from moejax.partition._baselines import all_exp as all_exp
from moejax.partition._baselines import few_tokens as few_tokens
from moejax.partition._baselines import isolated_threshold as isolated_threshold
from moejax.partition._baselines import no_exp as no_exp
from moejax.partition._baselines import pimoe_channel as pimoe_channel
from moejax.partition._baselines import pimoe_threshold as pimoe_threshold
from moejax.partition._online import OnlineRun as OnlineRun
from moejax.partition._online import run_online as run_online
from moejax.partition._optimal import optimal as optimal
from moejax.partition._score import channel_load as channel_load
from moejax.partition._score import load_of as load_of
from moejax.partition._score import score as score
from moejax.partition._sieve import best_prefix as best_prefix
from moejax.partition._sieve import sieve as sieve
from moejax.partition._validate import status_of as status_of


__all__ = [
    "Load",
    "OnlineRun",
    "Partition",
    "PartitionCosts",
    "Times",
    "all_exp",
    "best_prefix",
    "channel_load",
    "few_tokens",
    "isolated_threshold",
    "load_of",
    "no_exp",
    "optimal",
    "pimoe_channel",
    "pimoe_threshold",
    "run_online",
    "score",
    "sieve",
    "status_of",
    "times",
]
