"""Zoo: a small byte-level MoE language model with its routing, trained by a script in the package.

It exists so that claims about gating can be tried on real logits, hidden states and a real loss
anywhere. It stands in for no published model.

A reading guide: `_model.py` is the network, over `_attention.py` and `_experts.py`; `_corpus.py`
says which text, `_train.py` how it was trained and `_evaluate.py` how it was judged, against the
counted models of `_ngram.py`; `_store.py` reads weights and trace, on the first call of `load` or
`trace` and not before. `CARD.md` holds the measured numbers, and `python -m moejax.zoo` makes
everything again.
"""

from moejax.zoo._corpus import Corpus as Corpus
from moejax.zoo._corpus import Document as Document
from moejax.zoo._corpus import make_list as make_list
from moejax.zoo._corpus import read as read
from moejax.zoo._evaluate import Evaluation as Evaluation
from moejax.zoo._evaluate import evaluate as evaluate
from moejax.zoo._experts import Gate as Gate
from moejax.zoo._experts import top_k_gate as top_k_gate
from moejax.zoo._model import ByteMoE as ByteMoE
from moejax.zoo._model import Record as Record
from moejax.zoo._model import ZooConfig as ZooConfig
from moejax.zoo._ngram import ngram_losses as ngram_losses
from moejax.zoo._store import heldout as heldout
from moejax.zoo._store import load as load
from moejax.zoo._store import trace as trace
from moejax.zoo._store import trace_sources as trace_sources
from moejax.zoo._train import TrainConfig as TrainConfig
from moejax.zoo._train import TrainResult as TrainResult
from moejax.zoo._train import train as train


__all__ = [
    "ByteMoE",
    "Corpus",
    "Document",
    "Evaluation",
    "Gate",
    "Record",
    "TrainConfig",
    "TrainResult",
    "ZooConfig",
    "evaluate",
    "heldout",
    "load",
    "make_list",
    "ngram_losses",
    "read",
    "top_k_gate",
    "trace",
    "trace_sources",
    "train",
]
