"""Build one shard of a text on each of several machines, and add documents to a sharded store.

The text is split into consecutive parts of whole documents with about as many bytes each. Every machine reads all
of the text to find its part, which is quick beside the model; so the parts depend on the text only, and the documents
of all shards, one after another, are those of a build on one machine.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

from knnlm.corpus import Document, text_bytes
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.codecs import Storage
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.schema import CATALOG_FILE
from knnlm.datastore.shards import CALIBRATED, SHARD, ShardPart, update_manifest
from knnlm.datastore.staging import StagedAddition
from knnlm.datastore.store import Datastore, text_hash
from knnlm.errors import CorpusError, DatastoreError, ModelMismatch, ParameterError
from knnlm.ingest.pipeline import tokenise
from knnlm.ingest.segment_builder import batch_documents, calibrate
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import identity_difference
from knnlm.lm.windows import WindowShape

_Result = TypeVar("_Result")

ReadText = Callable[[], Iterable[Document]]


@dataclass(frozen=True)
class Calibration:
    """Offset, map and codec of the keys of one shard, for the others."""

    metadata: dict[str, Any]
    files: dict[str, bytes]

    @classmethod
    def of(cls, catalog: Catalog) -> Calibration:
        """Return the calibration of a shard, given its catalog."""
        metadata = {name: catalog.get(name) for name in ("offset", "map", "codec")}
        names = [f"{name}.safetensors" for name in ("map", "codec") if metadata[name] is not None]
        return cls(metadata, {name: catalog.path.with_name(name).read_bytes() for name in names})


@dataclass(frozen=True)
class ShardText:
    """One part of a text. `like` is a store whose offset, map and codec the keys of the shard get.

    `calibration` are the same of a shard that is still being built, and was checked before.
    """

    read: ReadText  # all documents of the text, each time from the first on
    part: ShardPart
    bytes: int  # of its documents
    like: Datastore | None = None
    calibration: Calibration | None = None

    def documents(self) -> Iterator[Document]:
        """Return the documents of the part."""
        return islice(iter(self.read()), self.part.first, self.part.end)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the shard."""
        return {SHARD: asdict(self.part)}

    def check(self, lm: CausalLM, storage: Storage, window: WindowShape) -> None:
        """Raise if the shard would not fit beside the others."""
        name = f"{self.part.number}/{self.part.of}"
        if self.calibration is not None:
            return
        if self.like is None:
            if storage.fitted and self.part.number > 1:
                raise ParameterError(
                    f"All shards need one codec, and keys as {storage} have a fitted one. Build --shard "
                    f"1/{self.part.of} first, then --shard {name} --like FOLDER with the folder of the first."
                )
            return
        if (change := identity_difference(self.like.model, lm.identity)) is not None:
            raise ModelMismatch(
                f"{self.like.path} was built with {self.like.model.get('name')} ({change[0]} {change[1]}), but the "
                f"loaded model is {lm.name} ({change[0]} {change[2]}). Build --shard {name} with the same model."
            )
        if self.like.window != asdict(window):
            raise ParameterError(
                f"{self.like.path} has windows of {self.like.window['context']:,} tokens, shifted by "
                f"{self.like.window['stride']:,}. Build --shard {name} with the same --context and --stride."
            )
        if self.like.storage != str(storage):
            raise ParameterError(
                f"{self.like.path} has keys as {self.like.storage}, not {storage}. Build --shard {name} with "
                f"--key-format {self.like.storage}"
            )

    def prepare(self, catalog: Catalog, lm: CausalLM, window: WindowShape, segment_entries: int) -> None:
        """Write the offset, map and codec of the keys to the catalog of a new shard."""
        if catalog.get(CALIBRATED) is not None:
            self._check_resumed(catalog)
            return
        metadata: dict[str, Any] = {CALIBRATED: True}
        if self.like is None and self.calibration is None:
            # By the first documents of the whole text, as a build on one machine does.
            with closing(tokenise(self.read(), lm)) as tokenised:
                batch = next(batch_documents(tokenised, segment_entries), None)
            offset = None if batch is None else calibrate(lm, batch, window)
            metadata["offset"] = None if offset is None else offset.tolist()
        else:
            given = self.calibration or Calibration.of(first_catalog(self.like))
            metadata |= given.metadata
            for name, content in given.files.items():
                catalog.path.with_name(name).write_bytes(content)
        catalog.put(**{name: value for name, value in metadata.items() if value is not None})

    def _check_resumed(self, catalog: Catalog) -> None:
        """Raise if an unfinished shard has the offset or codec of another store than that which is named now."""
        if self.like is None:
            return
        wanted, folder = Calibration.of(first_catalog(self.like)).metadata, catalog.path.parent
        if differing := [name for name, value in wanted.items() if catalog.get(name) != value]:
            raise DatastoreError(
                f"{folder} is an unfinished build with another {differing[0]} than {self.like.path}. Finish it with "
                "the same --like, or remove it."
            )


def first_catalog(store: Datastore | None) -> Catalog:
    """Return the catalog of a store, or that of the first of its shards, beside which its codec is."""
    assert store is not None
    return (store.shards or [store])[0].catalog


@dataclass(frozen=True)
class TextSizes:
    """The sizes of all documents of a text, and a digest of them."""

    read: ReadText
    sizes: array[int]
    digest: str

    def parts(self, of: int) -> list[ShardText]:
        """Return the parts of the text, of whole documents and about as many bytes each."""
        total = len(self.sizes)
        if total < of:
            raise CorpusError(f"The text has {total:,} documents, which are too few for {of} shards.")
        cuts = _cuts(self.sizes, of)
        return [
            ShardText(self.read, ShardPart(number, of, first, end, total, self.digest), sum(self.sizes[first:end]))
            for number, (first, end) in enumerate(pairwise(cuts), 1)
        ]


def scan_text(read: ReadText) -> TextSizes:
    """Read all of a text once; `read` returns all of its documents at each call."""
    sizes, digest = array("q"), hashlib.sha256()
    for document in read():
        sizes.append(text_bytes(document))
        digest.update(f"{document.id}\0{text_hash(document.text, document.source_text)}\0".encode())
    return TextSizes(read, sizes, digest.hexdigest())


def split_text(read: ReadText, number: int, of: int, *, like: Datastore | None = None) -> ShardText:
    """Return part `number`, from 1 to `of`, of a text; `read` returns all of its documents at each call."""
    if not 1 <= number <= of:
        raise ParameterError(f"There is no shard {number}/{of}: write 1/{of} to {of}/{of}.")
    return replace(scan_text(read).parts(of)[number - 1], like=like)


def _cuts(sizes: array[int], of: int) -> list[int]:
    """Return the first document of each part, followed by the number of documents; no part is empty."""
    ends = list(accumulate(sizes))
    cuts, place = [0], 0
    for part in range(1, of):
        target = ends[-1] * part // of
        while place < len(ends) and ends[place] <= target:
            place += 1
        # The document across the target belongs to the side on which most of it is.
        nearer = place < len(ends) and ends[place] - target < target - (ends[place - 1] if place else 0)
        cuts.append(min(max(place + nearer, cuts[-1] + 1), len(sizes) - (of - part)))
    return [*cuts, len(sizes)]


def parse_shard(text: str) -> tuple[int, int]:
    """Return the two numbers of `2/5`."""
    number, slash, of = text.partition("/")
    if not slash or not number.isdecimal() or not of.isdecimal() or not 1 <= int(number) <= int(of):
        raise ParameterError(f"Invalid shard {text!r}: write i/n, from 1/n to n/n, such as 2/5.")
    return int(number), int(of)


def choose_shard(store: Datastore) -> int:
    """Return the shard that documents are added to: that of an interrupted addition, otherwise the smallest."""
    for number, shard in enumerate(store.shards):
        if StagedAddition(shard.path, shard.catalog).folders:
            return number
    return min(range(len(store.shards)), key=lambda number: store.shards[number].entry_count)


def add_to_shard(
    folder: Path, add: Callable[[Path, Callable[[str], bool]], _Result], *, wait: float
) -> tuple[_Result, int]:
    """Call `add` with a shard's folder and whether another shard has a text's hash; also return the new generation."""
    with writer_lock(folder, wait=wait):
        with closing(update_manifest(folder)) as store:
            number, paths = choose_shard(store), [shard.path for shard in store.shards]
        with ExitStack() as stack:
            others = [
                stack.enter_context(closing(Catalog.open(path / CATALOG_FILE)))
                for place, path in enumerate(paths)
                if place != number
            ]
            try:
                added = add(paths[number], lambda sha256: any(other.has_text(sha256) for other in others))
            finally:
                with closing(update_manifest(folder)) as store:
                    generation = store.generation
        return added, generation
