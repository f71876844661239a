"""Small stores for tests."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from helpers.models import TEXT, tiny, tiny_tokenizer
from knnlm.corpus import Document
from knnlm.datastore.catalog import Catalog
from knnlm.datastore.codecs import Bytes, Plain
from knnlm.datastore.schema import CATALOG_FILE, SegmentRow, StoredDocument, segment_folder
from knnlm.datastore.segments import ArrayWriter
from knnlm.datastore.store import Datastore
from knnlm.io import checksum
from knnlm.lm.causal import CausalLM

WORDS = TEXT.split()
BESIDE = {
    "writer.lock",
    "readers.lock",
    "catalog.db-wal",
    "catalog.db-shm",
}  # no part of the content


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a store by name, the catalog as the statements that make it."""
    made = {}
    for file in sorted(path.rglob("*")):
        if file.name == "catalog.db":
            with sqlite3.connect(file) as connection:
                made[file.name] = "\n".join(connection.iterdump()).encode()
            connection.close()
        elif file.is_file() and file.name not in (*BESIDE, "keys.sums"):  # sums are made when keys are first read
            made[str(file.relative_to(path))] = file.read_bytes()
    return made


def documents(count: int, *, words: int = 30, start: int = 0) -> list[Document]:
    """Make different documents out of the same words."""
    made = []
    for number in range(start, start + count):
        chosen = [WORDS[(number * 7 + step * (1 + number % 5)) % len(WORDS)] for step in range(words + number % 11)]
        made.append(Document(id=f"d{number}", source=f"text.jsonl:{number + 1}", text=" ".join(chosen)))
    return made


def made_store(
    path, keys, values, *, sizes=None, texts=None, segments=2, dtype="float32", offset=None, vocab_size=None, first_id=0
):
    """A store of these keys, in documents of these sizes and hashes of texts, without any model."""
    keys, values = np.asarray(keys, np.float32), np.asarray(values)
    sizes = [len(values)] if sizes is None else list(sizes)
    path.mkdir(parents=True)
    model = {
        "name": "none",
        "tokenizer": "none",
        "width": keys.shape[1],
        "vocab_size": vocab_size or int(values.max()) + 1,
    }
    metadata = {"model": model, "window": {"context": 8, "stride": 4}, "key_dtype": dtype}
    given_offset = None if offset is None else np.asarray(offset, np.float32).tolist()
    catalog = Catalog.create(path / CATALOG_FILE, {"state": "building", "offset": given_offset, **metadata})
    row = number = 0
    for segment, group in enumerate(np.array_split(sizes, min(segments, len(sizes)))):
        first = row
        stored = []
        for size in group.tolist():
            text = str(first_id + number if texts is None else texts[number])
            name = f"d{first_id + number}"
            stored.append(StoredDocument(number, name, f"t:{first_id + number}", segment, row, size, text))
            row, number = row + size, number + 1
        folder = segment_folder(path, segment)
        folder.mkdir(parents=True)
        for name, array, kind in (("keys", keys, dtype), ("values", values, "int32")):
            with ArrayWriter(folder / f"{name}.npy", kind, array.shape[1:]) as writer:
                writer.append(array[first:row])
        sums = [checksum(folder / "keys.npy"), checksum(folder / "values.npy")]
        catalog.add_segment(SegmentRow(segment, first, row - first, 1.0, *sums), stored)
    catalog.put(state="complete")
    catalog.close()
    return Datastore.open(path)


def random_store(path, *, rows=120, width=6, words=5, seed=0, **options):
    """Keys without ties, in ten documents."""
    generator = np.random.default_rng(seed)
    sizes = np.full(10, rows // 10)
    values = generator.integers(0, words, rows)
    # Contexts of one word are near each other, as they are in life.
    keys = generator.normal(size=(rows, width)) + 1.5 * generator.normal(size=(words, width))[values]
    return made_store(path, keys, values, sizes=sizes, segments=3, **options)


def all_keys(store):
    return store.take(torch.arange(store.key_count))


def documents_by_hash(path) -> dict[str, tuple[list[int], np.ndarray]]:
    """Every document by its hash: tokens and keys."""
    with closing(Datastore.open(path)) as store:
        found = {}
        owners = store.entries_of(torch.arange(store.key_count))
        for document in list(store.documents()):
            first, end = document.first_entry, document.first_entry + document.entries
            rows = torch.arange(first, end)
            inside = ((owners >= first) & (owners < end)).nonzero()[:, 0]
            found[document.sha256] = (store.values(rows).tolist(), store.take(inside).numpy())
        return found


def coded_keys(store: Datastore, keys: np.ndarray) -> np.ndarray:
    """What the codec of a store makes of keys, in NumPy."""
    if store.map is not None:
        keys = (keys - store.map.centre.numpy()) @ store.map.matrix.numpy()
    codec = store.codec
    if isinstance(codec, Bytes):
        centre, step = codec.centre.numpy(), codec.step.numpy()
        return centre + step * np.clip(np.rint((keys - centre) / step), -127, 127)
    pieces = keys.reshape(len(keys), codec.columns, -1)
    far = ((pieces[:, :, None] - codec.books.numpy()[None]) ** 2).sum(3)  # (n, W, 256)
    nearest = far.argmin(2)
    return np.stack([codec.books.numpy()[piece, nearest[:, piece]] for piece in range(codec.columns)], 1).reshape(
        len(keys), -1
    )


def check_keys(store: Datastore, keys: np.ndarray) -> None:
    """The keys of a store are these as the model gave them, or as near to them as its codec comes."""
    found = store.take(torch.arange(store.entry_count)).numpy()
    if isinstance(store.codec, Plain) or not len(keys):
        np.testing.assert_allclose(found, keys, atol=4e-3, rtol=2e-3)
        return
    mapped = keys if store.map is None else (keys - store.map.centre.numpy()) @ store.map.matrix.numpy()
    far, right = (np.linalg.norm(these - mapped, axis=1) for these in (found, coded_keys(store, keys)))
    # A key may lie between two codes, and is read in another batch here.
    assert (far <= right + 0.01).all()


def large_model(factor: float, shift: float = 0.0) -> CausalLM:
    """A tiny gpt2 whose FFN input has three dimensions multiplied by `factor` and moved by `shift`."""
    model = tiny("gpt2")
    norm = model.transformer.h[-1].ln_2
    with torch.no_grad():
        norm.weight[:3] *= factor
        norm.bias[:3] += shift
    return CausalLM(model, tiny_tokenizer(), name="large")


KEY_FORMATS = ["int8", "pca12-int8", "codes8"]  # of keys of width 32
