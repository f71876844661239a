"""knnlm gives any language model a memory.

import knnlm

lm = knnlm.CausalLM.open("bundled")  # or a folder, a .gguf file, a name on the model hub
store = knnlm.build(knnlm.read_documents("docs/"), "docs.store", lm=lm)
mixture = knnlm.Mixture.open("docs.store", lm, memories="knn,cache,ngram")
mixture.tune(knnlm.read_documents("valid.txt"))
print(mixture.evaluate(knnlm.read_documents("held-out.txt")))
print(mixture.generate("The with statement"))
model = knnlm.KnnForCausalLM(mixture)  # a transformers model
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knnlm.cluster.build import build_on_ray
    from knnlm.cluster.search import RemoteSearchOptions, RemoteShards, remote_search
    from knnlm.corpus import Document, DocumentReader, read_documents
    from knnlm.datastore.compact import Compacted
    from knnlm.datastore.remote import Pushed, push_shard
    from knnlm.datastore.remove import Removed
    from knnlm.datastore.schema import StoredDocument
    from knnlm.datastore.shards import Joined, join_shards
    from knnlm.datastore.store import Datastore
    from knnlm.errors import (
        ClusterError,
        CorpusError,
        DatastoreBusy,
        DatastoreCorrupt,
        DatastoreError,
        IndexInvalid,
        KeyLayerError,
        KnnlmError,
        KnnlmWarning,
        MissingExtra,
        ModelError,
        ModelMismatch,
        ParameterError,
        ShardChanged,
    )
    from knnlm.evaluation.evaluate import Evaluation
    from knnlm.evaluation.explain import Contribution, NeighbourVote, TokenExplanation
    from knnlm.evaluation.quality import TranslationQuality
    from knnlm.evaluation.support import SupportFigures
    from knnlm.evaluation.sweep import Sweep
    from knnlm.evaluation.trace import MemoryTrace, Trace
    from knnlm.evaluation.tune import Tuning
    from knnlm.generation.causal import KnnConfig, KnnForCausalLM
    from knnlm.generation.chat import EncodedChat, encode_chat
    from knnlm.generation.seq2seq import KnnForSeq2SeqLM, TranslatedText
    from knnlm.index.base import Index, Neighbours, Vectors
    from knnlm.ingest.build import Added, build, build_shard
    from knnlm.lm.causal import CausalLM
    from knnlm.lm.seq2seq import Seq2SeqLM
    from knnlm.lm.speech import SpeechLM, open_lm
    from knnlm.lm.windows import WindowShape
    from knnlm.maintenance.export import ExportResult
    from knnlm.maintenance.import_ import ImportResult, import_arrays
    from knnlm.maintenance.merge import MergeResult, merge
    from knnlm.maintenance.repair import LostDocument, RepairResult, repair
    from knnlm.maintenance.verify import Problem, Verification, verify
    from knnlm.memories import (
        AutomatonParams,
        CacheMemory,
        Context,
        DecoderMemory,
        KnnMemory,
        Memory,
        MemoryOutput,
        NgramCacheMemory,
        NgramMemory,
        Origin,
        OutputMemory,
        Prediction,
        RetrievedNeighbours,
        Source,
        Span,
    )
    from knnlm.mixture import Mixture, MixtureOptions, MixturePrediction, Retrieved
    from knnlm.mixture.online import OnlineConfig
    from knnlm.mixture.support import SupportModel
    from knnlm.progress import Progress
    from knnlm.training.adapt import Adaptation, adapt
    from knnlm.training.decoder import train_decoder
    from knnlm.training.decoder_trainer import DecoderConfig
    from knnlm.training.metric_learning import KeyMetricConfig, train_key_metric
    from knnlm.training.output_matrix import OutputConfig, train_output
    from knnlm.training.prune import prune

    __version__: str

# The module of each public name, imported at first use: torch and transformers take seconds to import, and
# `knnlm --help` needs neither.
_HOMES = {
    "Adaptation": "training.adapt",
    "Added": "ingest.build",
    "AutomatonParams": "memories",
    "CacheMemory": "memories",
    "CausalLM": "lm.causal",
    "ClusterError": "errors",
    "Compacted": "datastore.compact",
    "Context": "memories",
    "Contribution": "evaluation.explain",
    "CorpusError": "errors",
    "Datastore": "datastore.store",
    "DatastoreBusy": "errors",
    "DatastoreCorrupt": "errors",
    "DatastoreError": "errors",
    "DecoderConfig": "training.decoder_trainer",
    "DecoderMemory": "memories",
    "Document": "corpus",
    "DocumentReader": "corpus",
    "EncodedChat": "generation.chat",
    "Evaluation": "evaluation.evaluate",
    "ExportResult": "maintenance.export",
    "ImportResult": "maintenance.import_",
    "Index": "index.base",
    "IndexInvalid": "errors",
    "Joined": "datastore.shards",
    "KeyLayerError": "errors",
    "KeyMetricConfig": "training.metric_learning",
    "KnnConfig": "generation.causal",
    "KnnForCausalLM": "generation.causal",
    "KnnForSeq2SeqLM": "generation.seq2seq",
    "KnnMemory": "memories",
    "KnnlmError": "errors",
    "KnnlmWarning": "errors",
    "LostDocument": "maintenance.repair",
    "Memory": "memories",
    "MemoryOutput": "memories",
    "MemoryTrace": "evaluation.trace",
    "MergeResult": "maintenance.merge",
    "MissingExtra": "errors",
    "Mixture": "mixture",
    "MixtureOptions": "mixture",
    "MixturePrediction": "mixture",
    "ModelError": "errors",
    "ModelMismatch": "errors",
    "NeighbourVote": "evaluation.explain",
    "Neighbours": "index.base",
    "NgramCacheMemory": "memories",
    "NgramMemory": "memories",
    "OnlineConfig": "mixture.online",
    "Origin": "memories",
    "OutputConfig": "training.output_matrix",
    "OutputMemory": "memories",
    "ParameterError": "errors",
    "Prediction": "memories",
    "Problem": "maintenance.verify",
    "Progress": "progress",
    "Pushed": "datastore.remote",
    "RemoteSearchOptions": "cluster.search",
    "RemoteShards": "cluster.search",
    "Removed": "datastore.remove",
    "RepairResult": "maintenance.repair",
    "Retrieved": "mixture",
    "RetrievedNeighbours": "memories",
    "Seq2SeqLM": "lm.seq2seq",
    "ShardChanged": "errors",
    "Source": "memories",
    "Span": "memories",
    "SpeechLM": "lm.speech",
    "StoredDocument": "datastore.schema",
    "SupportFigures": "evaluation.support",
    "SupportModel": "mixture.support",
    "Sweep": "evaluation.sweep",
    "TokenExplanation": "evaluation.explain",
    "Trace": "evaluation.trace",
    "TranslatedText": "generation.seq2seq",
    "TranslationQuality": "evaluation.quality",
    "Tuning": "evaluation.tune",
    "Vectors": "index.base",
    "Verification": "maintenance.verify",
    "WindowShape": "lm.windows",
    "adapt": "training.adapt",
    "build": "ingest.build",
    "build_on_ray": "cluster.build",
    "build_shard": "ingest.build",
    "encode_chat": "generation.chat",
    "import_arrays": "maintenance.import_",
    "join_shards": "datastore.shards",
    "merge": "maintenance.merge",
    "open_lm": "lm.speech",
    "prune": "training.prune",
    "push_shard": "datastore.remote",
    "read_documents": "corpus",
    "remote_search": "cluster.search",
    "repair": "maintenance.repair",
    "train_decoder": "training.decoder",
    "train_key_metric": "training.metric_learning",
    "train_output": "training.output_matrix",
    "verify": "maintenance.verify",
}

__all__ = [
    "Adaptation",
    "Added",
    "AutomatonParams",
    "CacheMemory",
    "CausalLM",
    "ClusterError",
    "Compacted",
    "Context",
    "Contribution",
    "CorpusError",
    "Datastore",
    "DatastoreBusy",
    "DatastoreCorrupt",
    "DatastoreError",
    "DecoderConfig",
    "DecoderMemory",
    "Document",
    "DocumentReader",
    "EncodedChat",
    "Evaluation",
    "ExportResult",
    "ImportResult",
    "Index",
    "IndexInvalid",
    "Joined",
    "KeyLayerError",
    "KeyMetricConfig",
    "KnnConfig",
    "KnnForCausalLM",
    "KnnForSeq2SeqLM",
    "KnnMemory",
    "KnnlmError",
    "KnnlmWarning",
    "LostDocument",
    "Memory",
    "MemoryOutput",
    "MemoryTrace",
    "MergeResult",
    "MissingExtra",
    "Mixture",
    "MixtureOptions",
    "MixturePrediction",
    "ModelError",
    "ModelMismatch",
    "NeighbourVote",
    "Neighbours",
    "NgramCacheMemory",
    "NgramMemory",
    "OnlineConfig",
    "Origin",
    "OutputConfig",
    "OutputMemory",
    "ParameterError",
    "Prediction",
    "Problem",
    "Progress",
    "Pushed",
    "RemoteSearchOptions",
    "RemoteShards",
    "Removed",
    "RepairResult",
    "Retrieved",
    "RetrievedNeighbours",
    "Seq2SeqLM",
    "ShardChanged",
    "Source",
    "Span",
    "SpeechLM",
    "StoredDocument",
    "SupportFigures",
    "SupportModel",
    "Sweep",
    "TokenExplanation",
    "Trace",
    "TranslatedText",
    "TranslationQuality",
    "Tuning",
    "Vectors",
    "Verification",
    "WindowShape",
    "adapt",
    "build",
    "build_on_ray",
    "build_shard",
    "encode_chat",
    "import_arrays",
    "join_shards",
    "merge",
    "open_lm",
    "prune",
    "push_shard",
    "read_documents",
    "remote_search",
    "repair",
    "train_decoder",
    "train_key_metric",
    "train_output",
    "verify",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("knnlm")
    if name not in _HOMES:
        raise AttributeError(f"module 'knnlm' has no attribute {name!r}")
    return getattr(import_module(f"knnlm.{_HOMES[name]}"), name)
