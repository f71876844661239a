"""Read files, folders, standard input and datasets as documents.

A document is a text or, for an encoder-decoder model, a pair: a record with a field of its source, a line of a .tsv
file (source, tab, target), or a line of a text file and the line of the same number of its source file.

Everything is streamed: memory use is bounded by one document (jsonl: one line), not by the corpus. Text that is not
clean UTF-8 is an error that names the file and the line.
"""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import math
import os
import stat
import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import chain, islice, zip_longest
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TypeAlias

from knnlm.errors import CorpusError, KnnlmError, MissingExtra

__all__ = ["Document", "DocumentMeter", "DocumentReader", "read_documents"]

Scalar: TypeAlias = str | int | float | bool | None
Fields: TypeAlias = Mapping[str, Scalar]

MAX_FIELDS = 64  # of a document
MAX_FIELD_LENGTH = 256  # characters of a field's name or value
INTEGER_LIMIT = 1 << 63  # integers from -INTEGER_LIMIT to INTEGER_LIMIT - 1
MAX_DOCUMENT_LENGTH = 1 << 20  # characters; a longer text becomes several documents
MAX_LINE_LENGTH = 1 << 28  # characters in one line of jsonl, which is parsed as a whole

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
PAIR_SUFFIXES = (".jsonl", ".parquet", ".tsv")  # of files whose documents are pairs
COMPRESSIONS = (".gz", ".xz", ".zst")

_CHUNK_BYTES = 1 << 14  # read at a time; small, since `bytes_read` advances by chunks
_PARQUET_BUFFER_BYTES = 1 << 18
_PARQUET_BATCH_ROWS = 64

_Count: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class Document:
    """A text with its id, its source for a person to find it, and the other fields of its record.

    A pair has a `source_text`, of which the text is the target: its translation, for example.
    """

    id: str
    source: str
    text: str
    fields: Fields = field(default_factory=dict, hash=False)
    source_text: str | None = None
    cut_off: bool = False  # the text goes on, so that no end token follows a target

    def __post_init__(self) -> None:
        if self.fields and (problem := invalid_fields(self.fields)) is not None:
            raise CorpusError(f"{self.source}: {problem}")


def select_fields(record: Mapping[str, Any], *, exclude: Collection[str]) -> dict[str, Scalar]:
    """Return the values of a record that can be fields: short texts, numbers and booleans, the first MAX_FIELDS."""
    fields: dict[str, Scalar] = {}
    for name, value in record.items():
        if name not in exclude and len(fields) < MAX_FIELDS and _is_field_name(name) and _is_scalar(value):
            fields[_as_utf8(name)] = _as_utf8(value) if isinstance(value, str) else value
    return fields


def invalid_fields(fields: Any) -> str | None:
    """Return what is wrong with the fields of a document, None where they are valid."""
    if not isinstance(fields, Mapping):
        return f"fields must be a mapping of names to values, not {type(fields).__name__}"
    if len(fields) > MAX_FIELDS:
        return f"{len(fields)} fields, more than {MAX_FIELDS}; leave some out"
    for name, value in fields.items():
        if not _is_field_name(name) or _as_utf8(name) != name:
            return f"invalid field name {str(name)[:40]!r}; use a text of 1 to {MAX_FIELD_LENGTH} characters"
        if not _is_scalar(value) or (isinstance(value, str) and _as_utf8(value) != value):
            allowed = f"a finite number, a boolean, or a text of at most {MAX_FIELD_LENGTH} characters"
            return f"the field {name[:40]!r} cannot be stored ({type(value).__name__}); use {allowed}"
    return None


def canonical_json(value: Scalar | Fields) -> str:
    """Return the one JSON form of a value, or of all fields, so that 7 and "7" differ."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def json_candidates(text: str) -> list[str]:
    """Return the JSON of every value that a text from a command line or URL may stand for."""
    # A text in quotation marks stands only for itself, not for the text between them.
    return [canonical_json(text)] if text.startswith('"') else [canonical_json(text), text]


def _is_field_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_FIELD_LENGTH


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_FIELD_LENGTH
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and -INTEGER_LIMIT <= value < INTEGER_LIMIT)


def _as_utf8(text: str) -> str:
    """Replace lone surrogates, which a file name or JSON may contain and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def read_documents(
    *inputs: str | os.PathLike[str],
    text_field: str = "text",
    source_field: str | None = None,
    source: str | os.PathLike[str] | None = None,
    stdin: BinaryIO | None = None,
) -> DocumentReader:
    """Open files, folders, `-` (standard input) and `hf:NAME[:SPLIT]` and return a reader of their documents.

    With `source_field` or `source`, documents are pairs: `source_field` names the field of the source in records, and
    makes .tsv files and standard input lines of source, tab and target; `source` is a file whose lines are the sources
    of the lines of one text file.

    A missing file, an unknown suffix or a missing package raises here; errors in the text raise while it is read.
    """
    return DocumentReader(
        [os.fspath(name) for name in inputs],
        text_field=text_field,
        source_field=source_field,
        source=None if source is None else os.fspath(source),
        stdin=stdin,
    )


@dataclass(frozen=True)
class _FieldNames:
    """The fields of a record that contain its text and, for pairs, its source."""

    text: str = "text"
    source: str | None = None

    def __post_init__(self) -> None:
        if self.text == self.source:
            raise CorpusError(f"The field {self.text!r} cannot be both text and source. Name two fields.")

    @property
    def options(self) -> dict[str, str]:
        """The names, each with the option that changes it."""
        named = {self.text: "--text-field"}
        return named if self.source is None else {**named, self.source: "--source-field"}

    def columns(self, names: Collection[str]) -> set[str]:
        """Return the columns of a table that contain the fields; `translation.de` is the member `de` of a column."""
        return {name if name in names else name.partition(".")[0] for name in self.options}

    def flattened(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a record with such a member as a field."""
        for name in self.options:
            outer, dot, inner = name.partition(".")
            if dot and name not in record and isinstance(member := record.get(outer), Mapping) and inner in member:
                record = {**record, name: member[inner]}
        return record


@dataclass(frozen=True)
class _File:
    path: str
    size: int | None  # bytes; None for a pipe

    @property
    def name(self) -> str:
        return _as_utf8(self.path)


class DocumentReader(Iterator[Document]):
    """The documents of some inputs, each read once, in order."""

    def __init__(
        self,
        inputs: Sequence[str],
        *,
        text_field: str = "text",
        source_field: str | None = None,
        source: str | None = None,
        stdin: BinaryIO | None = None,
    ) -> None:
        if not inputs or not all(inputs):
            raise CorpusError("Nothing to read. Name at least one file or folder, or - for standard input.")
        self.bytes_read = 0  # of the files as they are on disk, compressed or not
        self.bytes_returned = 0  # read up to the end of the last document that was returned
        self._names, self._stdin = _FieldNames(text_field, source_field), stdin
        if source is not None:
            parallel = _check_parallel(inputs, source)
            opened: list[tuple[str, list[_File] | None]] = [("", parallel)]
            documents: Iterable[Document] = self._read_parallel(*parallel)
        else:
            opened = [(name, _check_input(name, stdin, pairs=source_field is not None)) for name in inputs]
            documents = (document for name, files in opened for document in self._read(name, files))
        sizes = [file.size for _, files in opened for file in files or ()]
        known = all(files is not None for _, files in opened) and None not in sizes
        self.total_bytes: int | None = sum(size or 0 for size in sizes) if known else None
        self._documents: Iterator[Document] = _with_unique_ids(documents)
        options: dict[str, Any] = {"text_field": text_field, "source_field": source_field, "source": source}
        once = "-" in inputs or None in sizes  # standard input and pipes
        self._again, self._begun = None if once else partial(DocumentReader, list(inputs), **options), False

    def __next__(self) -> Document:
        self._begun = True
        document = next(self._documents)
        self.bytes_returned = self.bytes_read
        return document

    @property
    def again(self) -> Callable[[], DocumentReader] | None:
        """A function that opens the same inputs; None for pipes, and for a reader that has been read from."""
        return None if self._begun else self._again

    def check_first(self) -> None:
        """Raise the error of the first document, if it cannot be read; it is still returned by the iteration."""
        first = list(islice(self._documents, 1))
        self._documents = chain(first, self._documents)

    def _count(self, size: int) -> None:
        self.bytes_read += size

    def _read(self, name: str, files: list[_File] | None) -> Iterator[Document]:
        if files is not None:
            # An empty file inside a folder is common and harmless; one that was named is a mistake.
            documents = (document for file in files for document in self._read_file(file))
            yield from _not_empty(documents, _as_utf8(name))
        elif name == "-":
            pairs = self._names.source is not None
            yield from _read_stdin(self._stdin or sys.stdin.buffer, self._count, pairs=pairs)
        else:
            yield from _read_dataset(name, self._names, self._count)

    def _read_file(self, file: _File) -> Iterator[Document]:
        begin = self.bytes_read
        with _translate_errors(file.name):
            if _suffix(file.path) == ".parquet":
                yield from _read_parquet(file, self._names, self._count)
            else:
                pieces = _decode(_read_chunks(file, self._count), file.name)
                if _suffix(file.path) == ".jsonl":
                    yield from _read_jsonl(pieces, file.name, self._names)
                elif _suffix(file.path) == ".tsv":
                    yield from _read_tsv(pieces, file.name)
                else:
                    yield from _cut(pieces, file.name, file.name)
        if file.size is not None:
            self.bytes_read = begin + file.size

    def _read_parallel(self, target: _File, source: _File) -> Iterator[Document]:
        """Read one pair from each line of two files."""
        targets, sources = (_file_lines(file, self._count) for file in (target, source))
        yield from _not_empty(_pair_lines(targets, sources, target.name, source.name), target.name)
        self.bytes_read = self.total_bytes or self.bytes_read


class DocumentMeter(Iterator[Document]):
    """Documents from any iterable, with the bytes of input that each one took.

    For a `DocumentReader` these are bytes of its files, otherwise the UTF-8 bytes of the text. Progress bars advance
    by `take`, which is called when a document has been processed, possibly long after it was read.
    """

    def __init__(self, documents: Iterable[Document], *, total_bytes: int | None = None) -> None:
        self._documents = iter(documents)
        self._reader = documents if isinstance(documents, DocumentReader) else None
        self._counted = 0 if self._reader is None else self._reader.bytes_returned
        self._sizes: deque[int] = deque()
        self.total_bytes = total_bytes
        if self._reader is not None:
            self.total_bytes = self._reader.total_bytes
        elif isinstance(documents, Sequence):
            self.total_bytes = sum(map(text_bytes, documents))

    def __next__(self) -> Document:
        document = next(self._documents)
        self._sizes.append(text_bytes(document) if self._reader is None else self._new_bytes(self._reader))
        return document

    def take(self, count: int) -> int:
        """Return the bytes of the next documents, in the order in which they were read."""
        return sum(self._sizes.popleft() for _ in range(count))

    def drop_last(self) -> int:
        """Return the bytes of the document that was read last, which will not be processed."""
        return self._sizes.pop()

    def take_rest(self) -> int:
        """Return the bytes that were read and not taken, also those behind the last document."""
        rest = self.take(len(self._sizes))
        return rest if self._reader is None else rest + self._new_bytes(self._reader)

    def _new_bytes(self, reader: DocumentReader) -> int:
        before, self._counted = self._counted, reader.bytes_read
        return self._counted - before


def text_bytes(document: Document) -> int:
    """Return the UTF-8 bytes of a document's text, and of its source text."""
    return len((document.text + (document.source_text or "")).encode("utf-8", "surrogatepass"))


def _check_parallel(inputs: Sequence[str], source: str) -> list[_File]:
    """Return the file of targets and that of their sources; both have one text on each line."""
    if len(inputs) != 1:
        raise CorpusError(f"--source {_as_utf8(source)} has the sources of one text file, but {len(inputs)} are given.")
    files = []
    for path in (inputs[0], source):
        name = _as_utf8(path)
        if path == "-" or path.startswith("hf:") or _suffix(path) in PAIR_SUFFIXES or Path(path).is_dir():
            raise CorpusError(f"{name}: --source needs two plain text files, with a text on each line.")
        files.append(_open_file(path, name))
    return files


def _known_suffixes(suffixes: Sequence[str]) -> str:
    return f"{', '.join(suffixes)}; all except .parquet may also end in {', '.join(COMPRESSIONS)}"


def _check_input(name: str, stdin: BinaryIO | None, *, pairs: bool) -> list[_File] | None:
    """Return the files of an input, None where it has none; raise an error if it cannot be read."""
    if name == "-":
        if stdin is None and sys.stdin is None:
            raise CorpusError("Standard input is closed. Name a file instead of -.")
        return None
    if name.startswith("hf:"):
        if not _dataset_name(name)[0]:
            raise CorpusError(f"{name} names no dataset. Write hf:NAME or hf:NAME:SPLIT.")
        _import("datasets", "datasets", name)
        return None
    with _translate_errors(_as_utf8(name)):
        folder = stat.S_ISDIR(Path(name).stat().st_mode)  # is_dir would return False on any error
        paths = _list_files(name, PAIR_SUFFIXES if pairs else SUFFIXES) if folder else [name]
    return [_check_file(path, pairs=pairs) for path in paths]


def _check_file(path: str, *, pairs: bool) -> _File:
    """Return a file whose type and permissions allow reading it."""
    name, compressed = _as_utf8(path), path.lower().endswith(COMPRESSIONS)
    with _translate_errors(name):
        Path(path).stat()
    known = PAIR_SUFFIXES if pairs else SUFFIXES
    if (kind := _suffix(path)) not in known:
        raise _unknown_suffix(name, kind, known, compressed=compressed)
    if kind == ".parquet" and compressed:
        raise CorpusError(f"{name}: compressed parquet files are not supported. Decompress the file first.")
    if kind == ".parquet":
        _import("pyarrow", "parquet", name)
    return _open_file(path, name)


def _unknown_suffix(name: str, kind: str | None, known: Sequence[str], *, compressed: bool) -> CorpusError:
    """Return the error for a file that is not read, or not by this kind of model."""
    if kind is None:
        suffix = "".join(PurePath(name).suffixes[-2 if compressed else -1 :]) or "(none)"
        return CorpusError(f"{name}: unknown suffix {suffix}. Known suffixes: {_known_suffixes(known)}.")
    if kind == ".tsv":
        return CorpusError(
            f"{name}: a .tsv file has pairs of source and target. Only build, add, tune and eval read pairs, with an "
            "encoder-decoder model: see --model."
        )
    return CorpusError(
        f"{name}: a text without a source, but an encoder-decoder model reads pairs. Name the file with the sources of "
        f"its lines with --source, or give pairs: {_known_suffixes(known)}."
    )


def _open_file(path: str, name: str) -> _File:
    """Return a file that can be opened."""
    if path.lower().endswith(".zst"):
        _import("zstandard", "zstd", name)
    with _translate_errors(name):
        status = Path(path).stat()
        regular = stat.S_ISREG(status.st_mode)
    if regular:  # to open and close a pipe would end its writer
        with _translate_errors(name), Path(path).open("rb"):
            pass
    return _File(path, status.st_size if regular else None)


def _list_files(folder: str, suffixes: Sequence[str]) -> list[str]:
    """Return the files below a folder that have one of these suffixes, sorted by relative path."""
    visited: set[tuple[int, int]] = set()
    relative: list[str] = []

    def fail(error: OSError) -> None:
        raise CorpusError(f"{_as_utf8(error.filename)}: cannot list the folder: {error.strerror}. Check permissions.")

    for here, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        # Each real folder is visited once: links may form loops, and no text should be read twice.
        status = Path(here).stat()
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            path = Path(here, name)
            # A broken link is kept, so that it is reported; a pipe is left out, since reading it may block.
            if not name.startswith(".") and _suffix(name) in suffixes and (path.is_file() or not path.exists()):
                relative.append(path.relative_to(folder).as_posix())
    if not relative:
        known = _known_suffixes(suffixes)
        raise CorpusError(f"{_as_utf8(folder)}: no readable file in this folder. Known suffixes: {known}.")
    return [(PurePath(folder) / path).as_posix() for path in sorted(relative)]


def _suffix(path: str) -> str | None:
    """Return the suffix that tells the type of a file, without that of a compression; None if it is unknown."""
    name = path.lower()
    if name.endswith(COMPRESSIONS):
        name = name.rpartition(".")[0]
    return next((suffix for suffix in (*SUFFIXES, ".tsv") if name.endswith(suffix)), None)


class _CountedFile:
    """A binary file that is read in small chunks, which are counted."""

    def __init__(self, file: BinaryIO, count: _Count) -> None:
        self._file, self._count = file, count

    def read(self, size: int = _CHUNK_BYTES) -> bytes:
        data = self._file.read(min(size, _CHUNK_BYTES) if size >= 0 else _CHUNK_BYTES)
        self._count(len(data))
        return data


def _read_stdin(stream: BinaryIO, count: _Count, *, pairs: bool) -> Iterator[Document]:
    """Read standard input as one text, or as lines of source, tab and target."""
    name = "standard input"
    with _translate_errors(name):
        pieces = _decode(iter(_CountedFile(stream, count).read, b""), name)
        yield from _not_empty(_read_tsv(pieces, "-") if pairs else _cut(pieces, "-", "-"), name)


def _read_chunks(file: _File, count: _Count) -> Iterator[bytes]:
    """Read the bytes of a file, decompressed."""
    suffix = PurePath(file.path).suffix.lower()
    with Path(file.path).open("rb") as opened:
        counted: Any = _CountedFile(opened, count)
        if suffix == ".zst":
            yield from _decompress_zstd(counted, file.name)
            return
        unpack: dict[str, Any] = {".gz": lambda: gzip.GzipFile(fileobj=counted), ".xz": partial(lzma.LZMAFile, counted)}
        with unpack.get(suffix, lambda: nullcontext(counted))() as data:
            yield from iter(lambda: data.read(_CHUNK_BYTES), b"")


def _decompress_zstd(file: _CountedFile, name: str) -> Iterator[bytes]:
    """Decompress a .zst file. The package's own reader takes a truncated file for a complete one."""
    zstandard = _import("zstandard", "zstd", name)
    # The largest window, that of `zstd --long=31`: large corpora are published so.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None  # a file may contain several
    try:
        # Little at a time: it is decompressed as a whole, and repetitive text may become ten thousand times as long.
        while data := (frame.unused_data if frame and frame.eof else b"") or file.read(1 << 10):
            if frame is None or frame.eof:
                frame = decompressor.decompressobj()
            text = frame.decompress(data)
            yield from (text[at : at + _CHUNK_BYTES] for at in range(0, len(text), _CHUNK_BYTES))
    except zstandard.ZstdError as error:
        raise _corrupt(name, error) from error
    if frame and not frame.eof:
        raise EOFError("unexpected end of file")


def _decode(chunks: Iterable[bytes], name: str) -> Iterator[str]:
    r"""Decode UTF-8 piece by piece, without a byte order mark, with \n for \r\n."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line, held = 0, 1, ""  # of the next byte to decode; a \r that may be followed by \n
    for chunk in chain(filter(None, chunks), [b""]):
        undecoded = len(decoder.getstate()[0])
        if b"\0" in chunk:
            raise CorpusError(f"{name}: looks like a binary file (it contains NUL bytes). Convert it or leave it out.")
        try:
            piece = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            raise CorpusError(
                f"{name}:{line}: invalid UTF-8 at byte offset {offset + error.start} ({error.reason}). "
                "Convert the file to UTF-8, e.g. iconv -f LATIN1 -t UTF-8."
            ) from error
        line += piece.count("\n")
        piece = held + (piece if offset else piece.removeprefix("\ufeff"))
        offset += undecoded + len(chunk) - len(decoder.getstate()[0])
        held = "\r" if chunk and piece.endswith("\r") else ""
        yield piece.removesuffix(held).replace("\r\n", "\n")


def read_lines(name: str | os.PathLike[str]) -> list[str]:
    """Return the lines of a text file of any suffix, or of standard input (-), without the newlines."""
    path = os.fspath(name)
    if path != "-":
        return list(_file_lines(_open_file(path, _as_utf8(path)), lambda _: None))
    if sys.stdin is None:
        raise CorpusError("standard input: it is closed. Give a file instead.")
    pieces = _decode(iter(partial(sys.stdin.buffer.read, _CHUNK_BYTES), b""), "standard input")
    return list(_whole_lines(pieces))


def _file_lines(file: _File, count: _Count) -> Iterator[str]:
    """Yield the lines of a text file."""
    with _translate_errors(file.name):
        yield from _whole_lines(_decode(_read_chunks(file, count), file.name))


def _whole_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text; what follows the last newline is a line only if it is not empty."""
    held: str | None = None
    for line in _lines(pieces):
        if held is not None:
            yield held
        held = line
    if held:
        yield held


def _read_tsv(pieces: Iterable[str], name: str) -> Iterator[Document]:
    """Read one pair from each line: source, tab, target."""
    for number, line in enumerate(_lines(pieces), start=1):
        if not line.strip():
            continue
        columns = line.split("\t")
        if len(columns) != 2:
            raise CorpusError(f"{name}:{number}: {len(columns)} columns instead of two: write source, tab, target.")
        yield from _pair(columns[1], columns[0], f"{name}:{number}")


def _pair_lines(targets: Iterator[str], sources: Iterator[str], name: str, source_name: str) -> Iterator[Document]:
    """Read one pair from the lines of the same number; raise an error if one file is longer."""
    for number, (target, source) in enumerate(zip_longest(targets, sources), start=1):
        if target is None or source is None:
            longer, shorter = (source_name, name) if target is None else (name, source_name)
            raise CorpusError(
                f"{longer} has more lines than {shorter}, which has {number - 1:,}. Pair them line by line."
            )
        yield from _pair(target, source, f"{name}:{number}")


def _pair(target: str, source: str, where: str) -> Iterator[Document]:
    """Return the pair of a line, none where both are empty."""
    if not target.strip() and not source.strip():
        return
    if not target.strip() or not source.strip():
        empty, other = ("source", "target") if target.strip() else ("target", "source")
        raise CorpusError(f"{where}: the {empty} is empty, but its {other} is not. Remove the pair.")
    yield _whole_pair(where, where, target, source, {})


def _whole_pair(name: str, where: str, target: str, source: str, fields: Fields) -> Document:
    if max(len(target), len(source)) > MAX_DOCUMENT_LENGTH:
        raise CorpusError(f"{where}: a pair of more than {MAX_DOCUMENT_LENGTH:,} characters. Split it into sentences.")
    return Document(name, where, target, fields, source)


def _read_jsonl(pieces: Iterable[str], name: str, names: _FieldNames) -> Iterator[Document]:
    """Read one document from each line."""
    for number, line in enumerate(_lines(pieces), start=1):
        where = f"{name}:{number}"
        if len(line) > MAX_LINE_LENGTH:
            raise CorpusError(f"{where}: line longer than {MAX_LINE_LENGTH} characters. Write one record per line.")
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where}: not valid JSON ({_reason(error)}). Write one object per line.") from error
        if not isinstance(record, dict):
            raise CorpusError(f"{where}: {type(record).__name__}, not an object. Write one object per line.")
        yield from _read_record(record, names, where)


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a text, given in pieces, at its newlines; the last line is cut off where it is too long."""
    held: list[str] = []
    size = 0
    for piece in pieces:
        first, *others = piece.split("\n")
        held.append(first)
        size += len(first)
        for other in others:
            yield "".join(held)
            held, size = [other], len(other)
        if size > MAX_LINE_LENGTH:
            break
    yield "".join(held)


def _read_parquet(file: _File, fields: _FieldNames, count: _Count) -> Iterator[Document]:
    """Read one document from each row, by small batches of rows."""
    pa = _import("pyarrow", "parquet", file.name)
    from pyarrow.parquet import ParquetFile

    row, size = 0, file.size or 0
    with Path(file.path).open("rb") as opened:
        try:
            # Buffered and not pre-buffered: otherwise a row group, often the whole file, is in memory.
            table = ParquetFile(opened, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False)
            names, rows = table.schema_arrow.names, table.metadata.num_rows
            _check_fields(names, fields, file.name, members=True)
            # Lists and objects cannot be fields and may be large; two columns of one name are ambiguous.
            scalars = {each.name for each in table.schema_arrow if _is_scalar_column(pa, each)}
            wanted = {*fields.columns(names), "id"} | {name for name in scalars if names.count(name) == 1}
            columns = [name for name in names if name in wanted]
            for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=columns):
                for i in range(batch.num_rows):
                    row += 1
                    count(size * row // rows - size * (row - 1) // rows)
                    record = {column: batch.column(column)[i].as_py() for column in columns}
                    yield from _read_record(record, fields, f"{file.name}:{row}", null_is_empty=True)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise _corrupt(f"{file.name}:{row}" if row else file.name, error) from error


def _is_scalar_column(pa: Any, column: Any) -> bool:
    """Whether each row of a column is a text, a number or a boolean."""
    kind, types = column.type, pa.types
    text = types.is_string(kind) or types.is_large_string(kind)
    return bool(text or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _dataset_name(name: str) -> tuple[str, str]:
    """Return the dataset and the split of hf:NAME[:SPLIT]."""
    dataset, _, split = name.removeprefix("hf:").partition(":")
    return dataset, split or "train"


def _read_dataset(name: str, names: _FieldNames, count: _Count) -> Iterator[Document]:
    """Read one document from each row of a dataset of the hub, streamed."""
    dataset, split = _dataset_name(name)
    label = f"hf:{dataset}:{split}"

    def documents() -> Iterator[Document]:
        rows = _import("datasets", "datasets", name).load_dataset(dataset, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            for document in _read_record(row, names, f"{label}:{number}", null_is_empty=True):
                count(text_bytes(document))
                yield document

    try:
        yield from _not_empty(documents(), label)
    except KnnlmError:
        raise
    except Exception as error:  # errors of network, hub and file formats have no common root
        raise CorpusError(f"{label}: cannot read it ({_reason(error)}). Check name, split and network.") from error


def _read_record(
    record: Mapping[str, Any], names: _FieldNames, where: str, *, null_is_empty: bool = False
) -> Iterator[Document]:
    """Turn a record into documents: none when its text is empty, several when it is long."""
    record = names.flattened(record)
    _check_fields(record, names, where)
    if record[names.text] is None and null_is_empty:  # a missing value of a table
        return
    text = _text_of(record, names.text, names, where)
    own = record.get("id") if "id" not in names.options else None
    has_own = isinstance(own, str | int) and not isinstance(own, bool) and own != ""
    name = _as_utf8(str(own)) if has_own else where
    fields = select_fields(record, exclude=(*names.options, "id"))
    if names.source is None:
        yield from _cut([text], name, where, fields)
    elif text.strip():
        if record[names.source] is None or not str(record[names.source]).strip():
            raise CorpusError(
                f"{where}: the field {names.source!r} is empty, so the text has no source. Remove the record."
            )
        yield _whole_pair(name, where, text, _text_of(record, names.source, names, where), fields)


def _text_of(record: Mapping[str, Any], field: str, names: _FieldNames, where: str) -> str:
    """Return the text in a field of a record."""
    text = record[field]
    if not isinstance(text, str):
        problem = f"{where}: the field {field!r} is not a string but {type(text).__name__}"
        raise CorpusError(f"{problem}. Name another with {names.options[field]}.")
    if "\0" in text:
        raise CorpusError(f"{where}: the text looks like a binary file (it contains NUL). Remove the record.")
    if _as_utf8(text) != text:
        raise CorpusError(f"{where}: the text contains half a surrogate pair, not UTF-8. Remove the record.")
    return text.replace("\r\n", "\n")


def _check_fields(fields: Iterable[str], names: _FieldNames, where: str, *, members: bool = False) -> None:
    """Raise an error if a field is missing; with `members`, those inside of a column are not checked yet."""
    fields = list(fields)
    for wanted, option in names.options.items():
        if wanted not in fields and not (members and wanted.partition(".")[0] in fields):
            known = ", ".join(repr(name) for name in fields) or "none"
            raise CorpusError(f"{where}: no field {wanted!r} among {known}. Name one with {option}.")


def _cut(pieces: Iterable[str], name: str, source: str, fields: Fields | None = None) -> Iterator[Document]:
    """Turn a text, given in pieces, into one document, or into several when it is long."""
    number = 0
    for text in _split(pieces, MAX_DOCUMENT_LENGTH):
        if not text.isspace():
            number += 1
            yield Document(name if number == 1 else f"{name}#{number}", source, text, fields or {})


def _split(pieces: Iterable[str], limit: int) -> Iterator[str]:
    """Cut a text, given in pieces, into strings of at most `limit` characters; joined, they are the text."""
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
    """Yield the documents; raise an error when there is none."""
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise CorpusError(f"{name}: empty, there is no text in it. Leave it out.")


def _with_unique_ids(documents: Iterable[Document]) -> Iterator[Document]:
    """Add ~2, ~3, ... to an id that occurred before."""
    used: set[str] = set()
    last: dict[str, int] = {}  # the number added last, so that the millionth equal id takes one try
    for document in documents:
        name = document.id
        while name in used:
            last[document.id] = last.get(document.id, 1) + 1
            name = f"{document.id}~{last[document.id]}"
        used.add(name)
        yield document if name == document.id else replace(document, id=name)


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Turn errors of the system and of the decompressors into a `CorpusError` that names the file."""
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        # Only errors of the system have a number: an OSError without one comes from gzip or parquet.
        if isinstance(error, OSError) and error.errno is not None:
            raise CorpusError(f"{name}: cannot read it: {error.strerror}. Check path and permissions.") from error
        raise _corrupt(name, error) from error


def _corrupt(name: str, error: Exception) -> CorpusError:
    return CorpusError(f"{name}: corrupt or truncated ({_reason(error)}). Download it again or restore a copy.")


def _reason(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _import(package: str, extra: str, name: str) -> Any:
    """Import a package that only some inputs need."""
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtra(f"Reading {name}", package, extra) from error
