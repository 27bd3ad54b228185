"""Capture: real models in and out.

Record what the routers of a Hugging Face model do, put a gate of moejax in their place, read what
serving engines write down about experts, and write what they read. Torch and transformers are
needed for the first two only, and looked for when they are called.

A reading guide: `_families.py` knows the routers, `_calls.py` which tokens a call holds.
`_record.py` records, into a store of `_store.py`. `_gate.py` gates: `_fit.py` holds the gate
against the model, `_choose.py` is its program, `_log.py` what it did, and `_reference.py` runs the
ungated model beside it. `_fidelity.py` puts both on a text. Importers: `_sglang.py`, `_vllm.py`,
`_llama_cpp.py`, `_eplb.py`, and `_arrays.py` for arrays that have to say whether they are logits,
probabilities or ids.
"""

from moejax.capture._arrays import from_array as from_array
from moejax.capture._arrays import kind_of as kind_of
from moejax.capture._arrays import load_array as load_array
from moejax.capture._counts import ExpertCounts as ExpertCounts
from moejax.capture._counts import save_counts as save_counts
from moejax.capture._eplb import load_eplb_weights as load_eplb_weights
from moejax.capture._eplb import plan_of_share as plan_of_share
from moejax.capture._eplb import save_eplb as save_eplb
from moejax.capture._families import FAMILIES as FAMILIES
from moejax.capture._fidelity import Fidelity as Fidelity
from moejax.capture._fidelity import fidelity as fidelity
from moejax.capture._fit import gate_for as gate_for
from moejax.capture._gate import gated as gated
from moejax.capture._gate_file import load_gate as load_gate
from moejax.capture._gate_file import save_gate as save_gate
from moejax.capture._llama_cpp import load_llama_cpp as load_llama_cpp
from moejax.capture._log import GateLog as GateLog
from moejax.capture._log import Measure as Measure
from moejax.capture._record import PHASES as PHASES
from moejax.capture._record import Recording as Recording
from moejax.capture._record import record as record
from moejax.capture._sglang import load_sglang as load_sglang
from moejax.capture._sglang import load_sglang_trace as load_sglang_trace
from moejax.capture._versions import require_transformers as require_transformers
from moejax.capture._vllm import from_routed_experts as from_routed_experts
from moejax.capture._vllm import load_routed_experts as load_routed_experts


__all__ = [
    "FAMILIES",
    "PHASES",
    "ExpertCounts",
    "Fidelity",
    "GateLog",
    "Measure",
    "Recording",
    "fidelity",
    "from_array",
    "from_routed_experts",
    "gate_for",
    "gated",
    "kind_of",
    "load_array",
    "load_eplb_weights",
    "load_gate",
    "load_llama_cpp",
    "load_routed_experts",
    "load_sglang",
    "load_sglang_trace",
    "plan_of_share",
    "record",
    "require_transformers",
    "save_counts",
    "save_eplb",
    "save_gate",
]
