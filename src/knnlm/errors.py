"""All the errors that knnlm raises on purpose. Knows nothing about what goes wrong.

    KnnlmError
    ├── CorpusError          a text cannot be read: which file, which line
    ├── ParameterError       a setting is out of range (also a ValueError)
    ├── MissingExtra         an optional package is not installed: how to install it
    ├── ModelError           a model cannot be opened or used
    │   ├── KeyLayerError    the asked-for place was not found in the model
    │   └── ModelMismatch    a memory was built with another model
    ├── DatastoreError       a memory on disk cannot be opened, read or written
    │   ├── DatastoreCorrupt   its files contradict its catalog
    │   └── DatastoreBusy      another process is writing to it
    └── IndexInvalid         an index does not answer as its keys say it must

The command line prints one of these as a single line and exits with code 2.
"""

from __future__ import annotations


class KnnlmError(Exception):
    """The root: catch it to catch everything that knnlm raises on purpose."""


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
    """The asked-for place was not found in the model."""


class ModelMismatch(ModelError):
    """A memory was built with another model."""


class DatastoreError(KnnlmError):
    """A memory on disk cannot be opened, read or written."""


class DatastoreCorrupt(DatastoreError):
    """The files of a memory contradict its catalog."""


class DatastoreBusy(DatastoreError):
    """Another process is writing to the memory."""


class IndexInvalid(KnnlmError):
    """An index does not answer as its keys say it must."""
