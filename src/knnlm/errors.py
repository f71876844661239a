"""The exceptions of knnlm.

    KnnlmError
    ├── CorpusError          a text cannot be read
    ├── ParameterError       a setting is out of range (also a ValueError)
    ├── MissingExtra         an optional package is not installed
    ├── ModelError           a model cannot be opened or used
    │   ├── KeyLayerError    the requested key layer was not found in the model
    │   └── ModelMismatch    a store was built with another model
    ├── DatastoreError       a store cannot be opened, read or written
    │   ├── DatastoreCorrupt   its files contradict its catalog
    │   └── DatastoreBusy      another process is writing to it
    ├── IndexInvalid         an index fails its validation
    └── ClusterError         a Ray cluster cannot be reached, or its workers fail
        └── ShardChanged     a shard has changed, and the state that a search names is not open any more
    UserWarning
    └── KnnlmWarning         a result is valid, but not what was probably expected

The command line prints such an error as one line and exits with code 2; a warning is one line on standard error.
"""

from __future__ import annotations


class KnnlmError(Exception):
    """The base class of all errors that knnlm raises on purpose."""


class KnnlmWarning(UserWarning):
    """A result is valid, but not what was probably expected."""


class CorpusError(KnnlmError):
    """A text cannot be read."""


class ParameterError(KnnlmError, ValueError):
    """A setting is out of range."""


class MissingExtra(KnnlmError):
    """An optional package is not installed."""

    def __init__(self, what: str, package: str, extra: str, *, also: str = "") -> None:
        install = f"pip install 'knnlm[{extra}]'"
        super().__init__(f"{what} needs the package {package}: {install}{f' && {also}' if also else ''}")


class ModelError(KnnlmError):
    """A model cannot be opened or used."""


class KeyLayerError(ModelError):
    """The requested key layer was not found in the model."""


class ModelMismatch(ModelError):
    """A store was built with another model."""


class DatastoreError(KnnlmError):
    """A store cannot be opened, read or written."""


class DatastoreCorrupt(DatastoreError):
    """The files of a store contradict its catalog."""


class DatastoreBusy(DatastoreError):
    """Another process is writing to the store."""


class IndexInvalid(KnnlmError):
    """An index fails its validation."""


class ClusterError(KnnlmError):
    """A Ray cluster cannot be reached, or its workers fail."""


class ShardChanged(ClusterError):
    """A shard was changed after the state that a search names, and no process has that state open."""
