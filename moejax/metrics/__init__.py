"""What a change of routing costs in quality: numbers from arrays, whatever made them.

A reading guide: `_text.py` compares next-token distributions, `_routing.py` expert choices,
`_experts.py` outputs of experts; `_mask.py` says which positions count. Definitions are those of
HDA-MoE (arXiv 2609.08682). These take a mask, run under `jax.jit` and `jax.vmap`, and have finite
gradients. `_trade.py` compares settings at equal speed-up or equal loss, on the host.
"""

from moejax.metrics._experts import OutputChange as OutputChange
from moejax.metrics._experts import RandomControl as RandomControl
from moejax.metrics._experts import moe_output_change as moe_output_change
from moejax.metrics._experts import substitutability as substitutability
from moejax.metrics._experts import substitutability_control as substitutability_control
from moejax.metrics._routing import changed_ratio as changed_ratio
from moejax.metrics._routing import changed_weight_mass as changed_weight_mass
from moejax.metrics._routing import neighbor_sensitivity as neighbor_sensitivity
from moejax.metrics._routing import replacement_ratio as replacement_ratio
from moejax.metrics._routing import top1_retention as top1_retention
from moejax.metrics._routing import top_k_overlap as top_k_overlap
from moejax.metrics._text import kl as kl
from moejax.metrics._text import merge_ppl_ratios as merge_ppl_ratios
from moejax.metrics._text import merge_rms_shifts as merge_rms_shifts
from moejax.metrics._text import ppl_ratio as ppl_ratio
from moejax.metrics._text import rms_shift as rms_shift
from moejax.metrics._text import top1_agreement as top1_agreement
from moejax.metrics._trade import best_settings as best_settings
from moejax.metrics._trade import loss_at as loss_at
from moejax.metrics._trade import speedup_at as speedup_at


__all__ = [
    "OutputChange",
    "RandomControl",
    "best_settings",
    "changed_ratio",
    "changed_weight_mass",
    "kl",
    "loss_at",
    "merge_ppl_ratios",
    "merge_rms_shifts",
    "moe_output_change",
    "neighbor_sensitivity",
    "ppl_ratio",
    "replacement_ratio",
    "rms_shift",
    "speedup_at",
    "substitutability",
    "substitutability_control",
    "top1_agreement",
    "top1_retention",
    "top_k_overlap",
]
