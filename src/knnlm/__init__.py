"""knnlm gives any language model a memory.

import knnlm

lm = knnlm.CausalLM.open("bundled")                          # or a folder, a .gguf file, a hub name
knnlm.build(knnlm.read_documents("docs/"), "memory", lm=lm)            # one pass over the text, no training
mixture = knnlm.Mixture.open("memory", lm)
print(mixture.evaluate(knnlm.read_documents("held-out.txt")))   # perplexity without and with the memory
model = knnlm.KnnForCausalLM(mixture)                        # a transformers model
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knnlm.corpus import Document, read_documents
    from knnlm.datastore.compact import Compacted
    from knnlm.datastore.remove import Removed
    from knnlm.datastore.store import Datastore
    from knnlm.errors import KnnlmError
    from knnlm.evaluation.evaluate import Evaluation
    from knnlm.evaluation.explain import Contribution, NeighbourVote, TokenExplanation
    from knnlm.evaluation.sweep import Sweep
    from knnlm.evaluation.trace import MemoryTrace, Trace
    from knnlm.evaluation.tune import Tuning
    from knnlm.generation.causal import KnnConfig, KnnForCausalLM
    from knnlm.ingest.add import Added
    from knnlm.ingest.build import build
    from knnlm.lm.causal import CausalLM
    from knnlm.maintenance.import_ import import_arrays
    from knnlm.maintenance.merge import merge
    from knnlm.maintenance.repair import repair
    from knnlm.maintenance.verify import verify
    from knnlm.memories import (
        Context,
        KnnMemory,
        Memory,
        MemoryOutput,
        Prediction,
        RetrievedNeighbours,
        Source,
        Span,
    )
    from knnlm.mixture import Mixture, MixtureOptions, MixturePrediction, Retrieved
    from knnlm.training.adapt import Adaptation, adapt

# Where each public name lives. They are imported when first used: torch and transformers take seconds to import, and
# `knnlm --help` needs neither.
_HOMES = {
    "Adaptation": "training.adapt",
    "Added": "ingest.add",
    "CausalLM": "lm.causal",
    "Compacted": "datastore.compact",
    "Context": "memories",
    "Contribution": "evaluation.explain",
    "Datastore": "datastore.store",
    "Document": "corpus",
    "Evaluation": "evaluation.evaluate",
    "KnnConfig": "generation.causal",
    "KnnForCausalLM": "generation.causal",
    "KnnMemory": "memories",
    "KnnlmError": "errors",
    "Memory": "memories",
    "MemoryOutput": "memories",
    "MemoryTrace": "evaluation.trace",
    "Mixture": "mixture",
    "MixtureOptions": "mixture",
    "MixturePrediction": "mixture",
    "NeighbourVote": "evaluation.explain",
    "Prediction": "memories",
    "Removed": "datastore.remove",
    "Retrieved": "mixture",
    "RetrievedNeighbours": "memories",
    "Source": "memories",
    "Span": "memories",
    "Sweep": "evaluation.sweep",
    "TokenExplanation": "evaluation.explain",
    "Trace": "evaluation.trace",
    "Tuning": "evaluation.tune",
    "adapt": "training.adapt",
    "build": "ingest.build",
    "import_arrays": "maintenance.import_",
    "merge": "maintenance.merge",
    "read_documents": "corpus",
    "repair": "maintenance.repair",
    "verify": "maintenance.verify",
}

__all__ = [
    "Adaptation",
    "Added",
    "CausalLM",
    "Compacted",
    "Context",
    "Contribution",
    "Datastore",
    "Document",
    "Evaluation",
    "KnnConfig",
    "KnnForCausalLM",
    "KnnMemory",
    "KnnlmError",
    "Memory",
    "MemoryOutput",
    "MemoryTrace",
    "Mixture",
    "MixtureOptions",
    "MixturePrediction",
    "NeighbourVote",
    "Prediction",
    "Removed",
    "Retrieved",
    "RetrievedNeighbours",
    "Source",
    "Span",
    "Sweep",
    "TokenExplanation",
    "Trace",
    "Tuning",
    "adapt",
    "build",
    "import_arrays",
    "merge",
    "read_documents",
    "repair",
    "verify",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("knnlm")
    if name not in _HOMES:
        raise AttributeError(f"module 'knnlm' has no attribute {name!r}")
    return getattr(import_module(f"knnlm.{_HOMES[name]}"), name)
