"""Read files, folders, standard input and datasets as documents. Knows nothing about tokens or models.

Everything is streamed: memory is bounded by one part of a document (jsonl: one line), not by the corpus.
Nothing is guessed: what is not clean UTF-8 text is an error that says where it is and what to do about it.

A document, and what its record says besides the text. Knows nothing about files or tokens.

Fields are there to choose documents by: `customer`, `year`. So they are single and short; whatever else a record has
is not kept, since nobody would expect a second text of it in a memory.

Remember which names have been met, in eight bytes each. Knows nothing about what the names are of.
"""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import math
import os
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib import import_module
from itertools import chain
from json import loads
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from knnlm.errors import CorpusError, KnnlmError, MissingExtra

Scalar: TypeAlias = str | int | float | bool | None

Fields: TypeAlias = Mapping[str, Scalar]

LONGEST_FIELD_NAME = 256  # characters in a name or a value

MOST = 64  # fields of a document

LARGEST = 1 << 63  # whole numbers are smaller


@dataclass(frozen=True)
class Document:
    """A text, its name, where a person finds it, and what else its record says."""

    id: str
    source: str
    text: str
    fields: Fields = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.fields and (wrong := fault(self.fields)) is not None:
            raise CorpusError(f"{self.source}: {wrong}")


def fields_of(record: Mapping[str, Any], *, but: Collection[str]) -> dict[str, Scalar]:
    """Give what can be a field of a record, the first ones where there are very many."""
    found: dict[str, Scalar] = {}
    for name, value in record.items():
        if name not in but and len(found) < MOST and _is_name(name) and _is_scalar(value):
            found[_sayable(name)] = _sayable(value) if isinstance(value, str) else value
    return found


def fault(fields: Any) -> str | None:
    """Say what is wrong with fields that somebody gives; None where nothing is."""
    if not isinstance(fields, Mapping):
        return f"fields are not a mapping but {type(fields).__name__}; give name and value of each"
    if len(fields) > MOST:
        return f"{len(fields)} fields, more than {MOST}; leave some out"
    for name, value in fields.items():
        if not _is_name(name) or _sayable(name) != name:
            return f"{str(name)[:40]!r} is no name of a field; give a text of 1 to {LONGEST_FIELD_NAME} characters"
        if not _is_scalar(value) or (isinstance(value, str) and _sayable(value) != value):
            may = f"a finite number, a truth value, or a text of at most {LONGEST_FIELD_NAME} characters"
            return f"the field {name[:40]!r} cannot be kept ({type(value).__name__}); give {may}"
    return None


def written(value: Scalar | Fields) -> str:
    """Write a value, or all fields, as JSON in just one way; so a number is told from the same digits in a text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def ways_to_write(text: str) -> list[str]:
    """Give all values, as JSON, that a person may mean by a text: values compare as they are read."""
    # Other JSON begins otherwise, so that a text in quotation marks is not taken for what is between them.
    return [written(text)] if text.startswith('"') else [written(text), text]


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= LONGEST_FIELD_NAME


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST_FIELD_NAME
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and -LARGEST <= value < LARGEST)


def _sayable(text: str) -> str:
    """Replace what UTF-8 cannot say: JSON may have half a character."""
    return text.encode("utf-8", "replace").decode()


_RECENT = 1 << 15


class HashSet:
    """A set of names that stays small: a Python set takes a hundred bytes for each."""

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._sorted: NDArray[np.uint64] = np.empty(0, np.uint64)

    def add(self, name: str) -> bool:
        """Add a name and say whether it is new. Two of a billion names share a hash once in forty runs."""
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        if key in self._recent:
            return False
        place = int(np.searchsorted(self._sorted, np.uint64(key)))
        if place < len(self._sorted) and self._sorted[place] == key:
            return False
        self._recent.add(key)
        if len(self._recent) >= _RECENT:
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = np.union1d(self._sorted, recent)
            self._recent.clear()
        return True


__all__ = ["LONGEST", "Document", "Survey", "read_documents", "survey"]

LONGEST = 1 << 20  # characters in one document; a longer text becomes several

LONGEST_LINE = 1 << 28  # characters in one line of jsonl, which is parsed as a whole

CHUNK = 1 << 18  # bytes read at a time

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")

COMPRESSIONS = (".gz", ".xz", ".zst")

KNOWN = f"{', '.join(SUFFIXES)}, and all but .parquet also with {', '.join(COMPRESSIONS)} on top"


@dataclass(frozen=True)
class Survey:
    """How much text there is; not complete when inputs that can be read only once were left out."""

    documents: int
    characters: int
    complete: bool = True


def read_documents(
    *inputs: str | os.PathLike[str], text_field: str = "text", stdin: BinaryIO | None = None
) -> Iterator[Document]:
    """Read documents, one after the other, from files, folders, `-` and `hf:NAME[:SPLIT]`."""
    names = [os.fspath(given) for given in inputs]
    if not names or not all(names):
        raise CorpusError("nothing to read: name at least one file or folder, or - for standard input")
    for name in names:
        if name.startswith("hf:"):  # a missing package is told now, not hours later, when its turn comes
            _package("datasets", "datasets", name)
    return _unique(document for name in names for document in _input(name, text_field, stdin))


def survey(*inputs: str | os.PathLike[str], text_field: str = "text") -> Survey:
    """Read everything once and count it, so that errors come before hours of work."""
    names = [os.fspath(given) for given in inputs]
    again = [name for name in names if name != "-" and not name.startswith("hf:")]
    documents = characters = 0
    if again or not names:
        for document in read_documents(*again, text_field=text_field):
            documents += 1
            characters += len(document.text)
    return Survey(documents, characters, complete=len(again) == len(names))


def _input(given: str, text_field: str, stdin: BinaryIO | None) -> Iterator[Document]:
    """Read one of the inputs, as it was given."""
    if given == "-":
        yield from _stdin(stdin)
    elif given.startswith("hf:"):
        yield from _hugging_face(given, text_field)
    else:
        with _failures_of(_printable(given)):
            Path(given).stat()  # is_dir would answer False whatever went wrong
            paths = _files_in(given) if Path(given).is_dir() else [given]
        # An empty file in a folder is common and harmless; one that was named is a mistake.
        documents = (document for path in paths for document in _file(path, text_field))
        yield from _not_empty(documents, _printable(given))


def _files_in(folder: str) -> list[str]:
    """List the readable files below a folder, sorted by relative path."""
    seen: set[tuple[int, int]] = set()
    found: list[str] = []

    def fail(error: OSError) -> None:
        raise CorpusError(f"cannot list {_printable(error.filename)}: {error.strerror}; check permissions")

    for here, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        # Each real folder is visited once: links may form loops, and no text should be read twice.
        status = Path(here).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            path = Path(here, name)
            # A broken link is kept, so that it fails aloud; a pipe is not, it would block for ever.
            if not name.startswith(".") and _kind(name) and (path.is_file() or not path.exists()):
                found.append(path.relative_to(folder).as_posix())
    if not found:
        raise CorpusError(f"{_printable(folder)} has no file that can be read; known suffixes are {KNOWN}")
    return [(PurePath(folder) / relative).as_posix() for relative in sorted(found)]


def _kind(path: str) -> str | None:
    """Return the suffix that says what a file holds, below that of a compression; None when it is unknown."""
    name = path.lower()
    if name.endswith(COMPRESSIONS):
        name = name.rpartition(".")[0]
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _file(path: str, text_field: str) -> Iterator[Document]:
    """Read one file in the way that its suffix asks for."""
    name, kind = _printable(path), _kind(path)
    compressed = path.lower().endswith(COMPRESSIONS)
    if kind is None:
        suffix = "".join(PurePath(name).suffixes[-2 if compressed else -1 :])
        raise CorpusError(f"{name} has the unknown suffix {suffix or '(none)'}; known are {KNOWN}")
    if kind == ".parquet" and compressed:
        raise CorpusError(f"{name}: parquet is not compressed from outside; decompress the file first")
    if kind == ".parquet":
        documents = _parquet(path, name, text_field)
    elif kind == ".jsonl":
        documents = _jsonl(_decoded(_chunks(path, name), name), name, text_field)
    else:
        documents = _parts(_decoded(_chunks(path, name), name), name, name)
    with _failures_of(name):
        yield from documents


def _stdin(given: BinaryIO | None) -> Iterator[Document]:
    """Read standard input as one text."""
    if given is None and sys.stdin is None:
        raise CorpusError("standard input is closed; name a file instead of -")
    stream, name = given or sys.stdin.buffer, "standard input"
    with _failures_of(name):
        chunks = iter(lambda: stream.read(CHUNK), b"")
        yield from _not_empty(_parts(_decoded(chunks, name), "-", "-"), name)


def _chunks(path: str, name: str) -> Iterator[bytes]:
    """Read the bytes of a file, decompressed."""
    suffix = PurePath(path).suffix.lower()
    if suffix == ".zst":
        yield from _zstd_chunks(path, name)
        return
    open_file: Any = {".gz": gzip.open, ".xz": lzma.open}.get(suffix, open)
    with open_file(path, "rb") as file:
        yield from iter(lambda: file.read(CHUNK), b"")


def _zstd_chunks(path: str, name: str) -> Iterator[bytes]:
    """Decompress a .zst file. (The package's own reader takes a truncated file for a complete one.)"""
    zstandard = _package("zstandard", "zstd", name)
    # The largest window, that of `zstd --long=31`: large corpora are published so.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None  # a file may have several, one after the other
    with Path(path).open("rb") as file:
        try:
            # In sips: each is decompressed as a whole, and repetitive text was ten thousand times as long.
            while sip := (frame.unused_data if frame and frame.eof else b"") or file.read(1 << 10):
                if frame is None or frame.eof:
                    frame = decompressor.decompressobj()
                data = frame.decompress(sip)
                yield from (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
        except zstandard.ZstdError as error:
            raise _corrupt(name, error) from error
    if frame and not frame.eof:
        raise EOFError("it has no end")


def _decoded(chunks: Iterable[bytes], name: str) -> Iterator[str]:
    r"""Decode UTF-8 piece by piece, without a byte order mark, with \n for \r\n."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line, held = 0, 1, ""  # where the next byte to decode is; a \r that waits for its \n
    for chunk in chain(filter(None, chunks), [b""]):
        waiting = len(decoder.getstate()[0])
        if b"\0" in chunk:
            raise CorpusError(f"{name} looks like a binary file (it has NUL bytes); convert it or leave it out")
        try:
            piece = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            raise CorpusError(
                f"{name}:{line}: invalid UTF-8 at byte offset {offset + error.start} ({error.reason}); "
                "convert it to UTF-8, e.g. iconv -f LATIN1 -t UTF-8"
            ) from error
        line += piece.count("\n")
        piece = held + (piece if offset else piece.removeprefix("\ufeff"))
        offset += waiting + len(chunk) - len(decoder.getstate()[0])
        held = "\r" if chunk and piece.endswith("\r") else ""
        yield piece.removesuffix(held).replace("\r\n", "\n")


def _jsonl(pieces: Iterable[str], name: str, text_field: str) -> Iterator[Document]:
    """Read one document from each line."""
    for number, line in enumerate(_lines(pieces), start=1):
        where = f"{name}:{number}"
        if len(line) > LONGEST_LINE:
            raise CorpusError(f"{where}: longer than {LONGEST_LINE} characters; give each record its line")
        if not line.strip():
            continue
        try:
            record = loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where}: not valid JSON ({_reason(error)}); write one object a line") from error
        if not isinstance(record, dict):
            raise CorpusError(f"{where}: {type(record).__name__}, not an object; write one object a line")
        yield from _record(record, text_field, where)


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a text, given in pieces, at its newlines; a line that is too long comes cut off."""
    held: list[str] = []
    size = 0
    for piece in pieces:
        first, *others = piece.split("\n")
        held.append(first)
        size += len(first)
        for other in others:
            yield "".join(held)
            held, size = [other], len(other)
        if size > LONGEST_LINE:
            break
    yield "".join(held)


def _parquet(path: str, name: str, text_field: str) -> Iterator[Document]:
    """Read one document from each row, by small batches of rows."""
    pa = _package("pyarrow", "parquet", name)
    from pyarrow.parquet import ParquetFile

    row = 0
    with Path(path).open("rb") as file:
        try:
            # Buffered and not pre-buffered: else a row group, often the whole file, is in memory.
            table = ParquetFile(file, buffer_size=CHUNK, pre_buffer=False)
            fields = table.schema_arrow.names
            _check_field(fields, text_field, name)
            # Lists and objects are no fields of a document, and may be large; two columns of one name are none either.
            kept = [each for each in table.schema_arrow if _single(pa, each) and fields.count(each.name) == 1]
            columns = [field for field in fields if field in (text_field, "id") or field in {one.name for one in kept}]
            for batch in table.iter_batches(batch_size=64, columns=columns):
                for i in range(batch.num_rows):
                    row += 1
                    record = {column: batch.column(column)[i].as_py() for column in columns}
                    yield from _record(record, text_field, f"{name}:{row}", null_is_empty=True)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise _corrupt(f"{name}:{row}" if row else name, error) from error


def _single(pa: Any, column: Any) -> bool:
    """Say whether a column holds a text, a number or a truth value in each row."""
    kind, kinds = column.type, pa.types
    whole = kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_boolean(kind)
    return bool(whole or kinds.is_integer(kind) or kinds.is_floating(kind))


def _hugging_face(given: str, text_field: str) -> Iterator[Document]:
    """Read one document from each row of a dataset, streamed."""
    name, _, split = given.removeprefix("hf:").partition(":")
    split = split or "train"
    if not name:
        raise CorpusError(f"{given} names no dataset; write hf:NAME or hf:NAME:SPLIT")
    label = f"hf:{name}:{split}"

    def documents() -> Iterator[Document]:
        rows = _package("datasets", "datasets", given).load_dataset(name, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield from _record(row, text_field, f"{label}:{number}", null_is_empty=True)

    try:
        yield from _not_empty(documents(), label)
    except KnnlmError:
        raise
    except Exception as error:  # whatever a network, a hub and a file format may raise
        raise CorpusError(f"cannot read {label} ({_reason(error)}); check name, split, network") from error


def _record(
    record: Mapping[str, Any], text_field: str, where: str, *, null_is_empty: bool = False
) -> Iterator[Document]:
    """Turn a record into documents: one, none when its text is empty, several when it is long."""
    _check_field(record, text_field, where)
    text = record[text_field]
    if text is None and null_is_empty:  # how tables leave a text out
        return
    if not isinstance(text, str):
        what = f"{where}: the field {text_field!r} is not a string but {type(text).__name__}"
        raise CorpusError(f"{what}; name another with --text-field")
    if "\0" in text:
        raise CorpusError(f"{where}: the text looks like a binary file (it has a NUL); remove the record")
    if _printable(text) != text:
        raise CorpusError(f"{where}: the text has half a surrogate pair, not UTF-8; remove the record")
    own = record.get("id") if text_field != "id" else None
    has_own = isinstance(own, str | int) and not isinstance(own, bool) and own != ""
    name = _printable(str(own)) if has_own else where
    yield from _parts([text.replace("\r\n", "\n")], name, where, fields_of(record, but=(text_field, "id")))


def _check_field(fields: Iterable[str], text_field: str, where: str) -> None:
    if text_field not in fields:
        there = ", ".join(repr(field) for field in fields) or "none"
        raise CorpusError(f"{where}: no field {text_field!r} among {there}; name one with --text-field")


def _parts(pieces: Iterable[str], name: str, source: str, fields: Fields | None = None) -> Iterator[Document]:
    """Turn a text, given in pieces, into one document, or into several when it is long."""
    count = 0
    for part in _split(pieces, LONGEST):
        if not part.isspace():
            count += 1
            yield Document(name if count == 1 else f"{name}#{count}", source, part, fields or {})


def _split(pieces: Iterable[str], limit: int) -> Iterator[str]:
    """Cut a text, given in pieces, into parts of at most limit characters; joined, they are the text."""
    held = ""
    for piece in pieces:
        held += piece
        start = 0
        while len(held) - start > limit:
            end = start + limit
            for separator in ("\n\n", "\n", " "):
                at = held.rfind(separator, start, end)
                if at >= 0:
                    end = at + len(separator)
                    break
            yield held[start:end]
            start = end
        held = held[start:]
    if held:
        yield held


def _not_empty(documents: Iterator[Document], name: str) -> Iterator[Document]:
    """Pass documents on; raise an error when there is none."""
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise CorpusError(f"{name} is empty: there is no text in it; leave it out")


def _unique(documents: Iterable[Document]) -> Iterator[Document]:
    """Add ~2, ~3, ... to an id that was there before."""
    seen = HashSet()
    last: dict[str, int] = {}  # the number given last, so that the millionth equal id takes one try
    for document in documents:
        name = document.id
        while not seen.add(name):
            last[document.id] = last.get(document.id, 1) + 1
            name = f"{document.id}~{last[document.id]}"
        yield document if name == document.id else replace(document, id=name)


def _printable(name: str) -> str:
    """Replace what UTF-8 cannot say: a file's name may be any bytes, and JSON may have half a character."""
    return name.encode("utf-8", "replace").decode()


@contextmanager
def _failures_of(name: str) -> Iterator[None]:
    """Turn what the system and the decompressors raise into an error that names the file."""
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        # Only the system numbers its errors: an OSError without a number comes from gzip or parquet.
        if isinstance(error, OSError) and error.errno is not None:
            raise CorpusError(f"cannot read {name}: {error.strerror}; check path and permissions") from error
        raise _corrupt(name, error) from error


def _corrupt(name: str, error: Exception) -> CorpusError:
    return CorpusError(f"{name} is corrupt or truncated ({_reason(error)}); fetch it or make it again")


def _reason(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _package(package: str, extra: str, name: str) -> Any:
    """Import a package that only some inputs need."""
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtra(f"reading {name}", package, extra) from error
