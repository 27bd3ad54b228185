"""Routing: which experts each token chose. Loaded from a file or drawn from a distribution.

A reading guide: `_trace.py` is the pytree everything else takes or returns; `_io.py` reads and
writes it; `_batch.py` draws decode batches out of it; `_statistics.py` counts.

Without a trace: `_popularity.py` says how unequal experts are, `_synthesize.py` draws tokens from
that, `_calibrated.py` holds the parameters of each model, and `_calibrate.py` found them: it
descends on the averages of `_expected.py` towards a `_target.py`.
"""

from moejax.routing._batch import decode_batch as decode_batch
from moejax.routing._batch import prefill_batch as prefill_batch
from moejax.routing._calibrate import calibrate as calibrate
from moejax.routing._calibrate import judge as judge
from moejax.routing._calibrated import Calibration as Calibration
from moejax.routing._calibrated import Fit as Fit
from moejax.routing._calibrated import calibrated as calibrated
from moejax.routing._expected import expected_bimodality as expected_bimodality
from moejax.routing._expected import inclusion_probabilities as inclusion_probabilities
from moejax.routing._io import load as load
from moejax.routing._io import save as save
from moejax.routing._popularity import AbstractPopularity as AbstractPopularity
from moejax.routing._popularity import Dirichlet as Dirichlet
from moejax.routing._popularity import LambdaTails as LambdaTails
from moejax.routing._popularity import LogitNormal as LogitNormal
from moejax.routing._statistics import INVALID_COUNT as INVALID_COUNT
from moejax.routing._statistics import Bimodality as Bimodality
from moejax.routing._statistics import bimodality as bimodality
from moejax.routing._statistics import co_activation as co_activation
from moejax.routing._statistics import co_activation_groups as co_activation_groups
from moejax.routing._statistics import next_layer_transitions as next_layer_transitions
from moejax.routing._statistics import tokens_per_expert as tokens_per_expert
from moejax.routing._synthesize import sample_expert_ids as sample_expert_ids
from moejax.routing._synthesize import synthesize as synthesize
from moejax.routing._target import Target as Target
from moejax.routing._target import measure as measure
from moejax.routing._trace import NOT_ROUTED as NOT_ROUTED
from moejax.routing._trace import RoutingTrace as RoutingTrace
from moejax.routing._trace import concat as concat


__all__ = [
    "INVALID_COUNT",
    "NOT_ROUTED",
    "AbstractPopularity",
    "Bimodality",
    "Calibration",
    "Dirichlet",
    "Fit",
    "LambdaTails",
    "LogitNormal",
    "RoutingTrace",
    "Target",
    "bimodality",
    "calibrate",
    "calibrated",
    "co_activation",
    "co_activation_groups",
    "concat",
    "decode_batch",
    "expected_bimodality",
    "inclusion_probabilities",
    "judge",
    "load",
    "measure",
    "next_layer_transitions",
    "prefill_batch",
    "sample_expert_ids",
    "save",
    "synthesize",
    "tokens_per_expert",
]
