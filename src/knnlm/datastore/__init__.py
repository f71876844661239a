"""(context vector → next token) pairs on disk."""

from knnlm.datastore.builder import KEY_DTYPES, build
from knnlm.datastore.catalog import StoredDocument
from knnlm.datastore.indexing import build_index, open_index
from knnlm.datastore.store import Datastore

__all__ = ["KEY_DTYPES", "Datastore", "StoredDocument", "build", "build_index", "open_index"]
