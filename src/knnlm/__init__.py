"""knnlm gives any language model a memory.

import knnlm

lm = knnlm.CausalLM.open("bundled")                          # or a folder, a .gguf file, a hub name
knnlm.build(knnlm.read("docs/"), "memory", lm=lm)            # one pass over the text, no training
mixture = knnlm.Mixture.open("memory", lm)
print(knnlm.evaluate(mixture, knnlm.read("held-out.txt")))   # perplexity without and with the memory
model = knnlm.KnnForCausalLM(mixture)                        # a transformers model
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knnlm.adaptation import Adaptation, adapt
    from knnlm.corpus import Document, read
    from knnlm.datastore import Added, Compacted, Datastore, Removed, add, build, build_index, compact, compress, remove
    from knnlm.errors import KnnlmError
    from knnlm.evaluation import Evaluation, evaluate
    from knnlm.explanation import explain
    from knnlm.generate import KnnConfig, KnnForCausalLM
    from knnlm.guarding import export, import_arrays, merge, repair, verify
    from knnlm.lm import CausalLM
    from knnlm.memory import KnnMemory
    from knnlm.mixture import Mixture
    from knnlm.sweeping import Sweep, replay, sweep
    from knnlm.trace import Trace, record
    from knnlm.tuning import Tuning, tune

# Where each public name lives. They are imported when first used: torch and transformers take seconds to import, and
# `knnlm --help` needs neither.
_HOMES = {
    "Adaptation": "adaptation",
    "Added": "datastore",
    "CausalLM": "lm",
    "Compacted": "datastore",
    "Datastore": "datastore",
    "Document": "corpus",
    "Evaluation": "evaluation",
    "KnnConfig": "generate",
    "KnnForCausalLM": "generate",
    "KnnMemory": "memory",
    "KnnlmError": "errors",
    "Mixture": "mixture",
    "Removed": "datastore",
    "Sweep": "sweeping",
    "Trace": "trace",
    "Tuning": "tuning",
    "adapt": "adaptation",
    "add": "datastore",
    "build": "datastore",
    "build_index": "datastore",
    "compact": "datastore",
    "compress": "datastore",
    "evaluate": "evaluation",
    "explain": "explanation",
    "export": "guarding",
    "import_arrays": "guarding",
    "merge": "guarding",
    "read": "corpus",
    "record": "trace",
    "remove": "datastore",
    "repair": "guarding",
    "replay": "sweeping",
    "sweep": "sweeping",
    "tune": "tuning",
    "verify": "guarding",
}

__all__ = [
    "Adaptation",
    "Added",
    "CausalLM",
    "Compacted",
    "Datastore",
    "Document",
    "Evaluation",
    "KnnConfig",
    "KnnForCausalLM",
    "KnnMemory",
    "KnnlmError",
    "Mixture",
    "Removed",
    "Sweep",
    "Trace",
    "Tuning",
    "adapt",
    "add",
    "build",
    "build_index",
    "compact",
    "compress",
    "evaluate",
    "explain",
    "export",
    "import_arrays",
    "merge",
    "read",
    "record",
    "remove",
    "repair",
    "replay",
    "sweep",
    "tune",
    "verify",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'knnlm' has no attribute {name!r}")
    return getattr(import_module(f"knnlm.{_HOMES[name]}"), name)
