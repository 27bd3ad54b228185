"""Mixture-of-Experts models as sizes.

Read in this order: `Attention` and `Router` say what one layer looks like, `MoEModel` is the whole
transformer with its derived counts and bytes, `Precision` how wide its numbers are. `get` builds a
model by name from `MODELS`, where every number stands with its source, and `from_hf_config` builds
one from a checkpoint's `config.json`.
"""

from moejax.models._attention import Attention as Attention
from moejax.models._base import MoEModel as MoEModel
from moejax.models._hf_config import from_hf_config as from_hf_config
from moejax.models._precision import FORMATS as FORMATS
from moejax.models._precision import Precision as Precision
from moejax.models._preset import ModelPreset as ModelPreset
from moejax.models._preset import SourceRow as SourceRow
from moejax.models._presets import MODELS as MODELS
from moejax.models._presets import get as get
from moejax.models._router import Router as Router


__all__ = [
    "FORMATS",
    "MODELS",
    "Attention",
    "MoEModel",
    "ModelPreset",
    "Precision",
    "Router",
    "SourceRow",
    "from_hf_config",
    "get",
]
