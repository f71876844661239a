"""(context vector → next token) pairs on disk."""

from knnlm.datastore.adding import Added, add
from knnlm.datastore.builder import build
from knnlm.datastore.catalog import StoredDocument
from knnlm.datastore.compacting import Compacted, compact
from knnlm.datastore.compress import compress
from knnlm.datastore.derive import derive
from knnlm.datastore.indexing import build_index, open_index
from knnlm.datastore.keymap import KeyMap
from knnlm.datastore.removing import Removed, evidence, list_documents, remove
from knnlm.datastore.segment import KEY_DTYPES
from knnlm.datastore.store import Datastore

__all__ = [
    "KEY_DTYPES",
    "Added",
    "Compacted",
    "Datastore",
    "KeyMap",
    "Removed",
    "StoredDocument",
    "add",
    "build",
    "build_index",
    "compact",
    "compress",
    "derive",
    "evidence",
    "list_documents",
    "open_index",
    "remove",
]
