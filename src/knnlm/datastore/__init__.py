"""(context vector → next token) pairs on disk."""

from knnlm.datastore.builder import build
from knnlm.datastore.catalog import StoredDocument
from knnlm.datastore.compress import compress
from knnlm.datastore.derive import derive
from knnlm.datastore.indexing import build_index, open_index
from knnlm.datastore.keymap import KeyMap
from knnlm.datastore.segment import KEY_DTYPES
from knnlm.datastore.store import Datastore

__all__ = [
    "KEY_DTYPES",
    "Datastore",
    "KeyMap",
    "StoredDocument",
    "build",
    "build_index",
    "compress",
    "derive",
    "open_index",
]
