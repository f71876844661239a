"""Files become documents; a file that cannot be read is an error that names the place and the reason."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from knnlm import corpus
from knnlm.corpus import MAX_DOCUMENT_LENGTH, Document, DocumentMeter, read_documents
from knnlm.errors import CorpusError, MissingExtra

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def jsonl(path: Path, *records: object) -> str:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def failure(*inputs: str | os.PathLike[str], **options: Any) -> str:
    """The message of the error that reading raises, which must be one line."""
    with pytest.raises(CorpusError) as caught:
        list(read_documents(*inputs, **options))
    message = str(caught.value)
    assert "\n" not in message
    return message


def texts(*inputs: str, **options: Any) -> list[str]:
    return [document.text for document in read_documents(*inputs, **options)]


def in_another_process(code: str, typed: bytes = b"") -> bytes:
    """What a program prints that uses this module and, to start fast, nothing else of the package."""
    package = f"knnlm = type(sys)('knnlm'); knnlm.__path__ = [{str(Path(corpus.__file__).parent)!r}]"
    program = f"import sys; {package}; sys.modules['knnlm'] = knnlm\n{code}"
    return subprocess.run([sys.executable, "-c", program], input=typed, stdout=subprocess.PIPE, check=True).stdout


# Files of every kind


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("suffix", [".txt", ".md", ".TXT"])
def test_text_file_is_one_document(tmp_path: Path, suffix: str, packing: str) -> None:
    path = write(tmp_path / f"a{suffix}{packing}", PACK[packing]("Grüße\n\nan alle 🎈\n".encode()))
    assert list(read_documents(path)) == [Document(path, path, "Grüße\n\nan alle 🎈\n")]


@pytest.mark.parametrize("packing", PACK)
def test_jsonl_file_is_a_document_per_line(tmp_path: Path, packing: str) -> None:
    lines = b'{"text": "one", "id": "first"}\n\n  \r\n{"id": 7, "text": "two"}\r\n{"text": "three", "id": null}'
    path = write(tmp_path / f"a.jsonl{packing}", PACK[packing](lines))
    assert list(read_documents(path)) == [
        Document("first", f"{path}:1", "one"),
        Document("7", f"{path}:4", "two"),
        Document(f"{path}:5", f"{path}:5", "three"),
    ]


@pytest.mark.parametrize("own", [True, 1.5, ["x"], ""])
def test_invalid_id_is_not_used(tmp_path: Path, own: object) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"id": own, "text": "one"})
    assert [document.id for document in read_documents(path)] == [f"{path}:1"]


def test_parquet_file_is_a_document_per_row_over_batches_and_row_groups(tmp_path: Path) -> None:
    table = pa.table({"other": list(range(500)), "text": [f"row {i}" for i in range(500)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=150)
    path = str(tmp_path / "a.parquet")
    right = [Document(f"{path}:{i + 1}", f"{path}:{i + 1}", f"row {i}", {"other": i}) for i in range(500)]
    assert list(read_documents(path)) == right


def test_parquet_row_has_its_own_id_and_null_is_an_empty_text(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", id=[5, 6, 7], body=["five", None, "seven"])
    found = list(read_documents(path, text_field="body"))
    assert found == [Document("5", f"{path}:1", "five"), Document("7", f"{path}:3", "seven")]


def test_text_field_chooses_the_field_of_jsonl(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "no", "body": "yes"})
    assert texts(path, text_field="body") == ["yes"]


def test_zst_file_may_have_several_frames(tmp_path: Path) -> None:
    pack = PACK[".zst"]
    path = write(tmp_path / "a.txt.zst", pack(b"one ") + pack(b"two ") + pack(os.urandom(5000).hex().encode()))
    [text] = texts(path)
    assert text.startswith("one two ")
    assert len(text) == 8 + 10000


@given(st.lists(st.text().filter(lambda text: "\0" not in text), min_size=1), st.booleans())
def test_text_goes_through_jsonl_unchanged(written: list[str], ascii_only: bool) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in ["begin", *written]]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder, "a.jsonl"), "\n".join(lines))
        expected = ["begin", *(text.replace("\r\n", "\n") for text in written if text.strip())]
        assert texts(path) == expected


def test_standard_input_is_one_document() -> None:
    assert list(read_documents("-", stdin=io.BytesIO(b"hello\r\nthere"))) == [Document("-", "-", "hello\nthere")]


def test_standard_input_of_a_real_process_is_read() -> None:
    code = "from knnlm.corpus import read_documents as read; print(ascii([d.text for d in read('-')]))"
    assert in_another_process(code, typed=b"caf\xc3\xa9").strip() == rb"['caf\xe9']"


def test_closed_standard_input_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "Standard input is closed" in failure("-")


# Newlines, marks, bytes


def test_byte_order_mark_is_dropped_at_the_beginning_only(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", b"\xef\xbb\xbfone \xef\xbb\xbf two")
    lines = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "three"}')
    assert texts(text, lines) == ["one \ufeff two", "three"]


@given(st.lists(st.sampled_from(["\r", "\n", "\r\n", "\ufeff", "é", "🎈", "a"])), st.integers(1, 7))
def test_decoding_does_not_depend_on_where_the_chunks_end(pieces: list[str], size: int) -> None:
    data = "".join(pieces).encode()
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    expected = data.decode("utf-8-sig").replace("\r\n", "\n")
    assert "".join(corpus._decode(chunks, "name")) == expected


@given(st.binary(max_size=12), st.binary(max_size=12), st.integers(1, 7))
def test_invalid_utf8_is_found_where_python_finds_it(before: bytes, after: bytes, size: int) -> None:
    data = (before + b"\n\xff" + after).replace(b"\0", b"\n")
    with pytest.raises(UnicodeDecodeError) as oracle:
        data.decode()
    at = oracle.value.start
    with pytest.raises(CorpusError) as caught:
        list(corpus._decode([data[i : i + size] for i in range(0, len(data), size)], "name"))
    line = data[:at].count(b"\n") + 1
    assert str(caught.value).startswith(f"name:{line}: invalid UTF-8 at byte offset {at} ")


@pytest.mark.parametrize("packing", PACK)
def test_invalid_utf8_in_a_text_names_file_line_and_offset(tmp_path: Path, packing: str) -> None:
    before = "é line\n".encode() * 100_000  # more than one chunk
    path = write(tmp_path / f"a.txt{packing}", PACK[packing](before + b"caf\xe9 noir"))
    message = failure(path)
    assert f"{path}:100001: invalid UTF-8 at byte offset {len(before) + 3} " in message
    assert "iconv" in message


def test_invalid_utf8_in_jsonl_names_file_line_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "one"}\n{"text": "caf\xe9"}\n')
    assert f"{path}:2: invalid UTF-8 at byte offset 29 " in failure(path)


def test_text_that_ends_within_a_character_is_invalid(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\ntwo é".encode()[:-1])
    assert f"{path}:2: invalid UTF-8 at byte offset 8 " in failure(path)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x00\x00", b"a\0b", "utf16".encode("utf-16")])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_binary_file_is_recognised(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", content)
    assert f"{path}: looks like a binary file" in failure(path)


@pytest.mark.parametrize(("text", "words"), [("a\0b", "looks like a binary file"), ("a\ud800b", "surrogate")])
def test_characters_that_are_no_text_are_refused_in_records(tmp_path: Path, text: str, words: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "fine"}, {"text": text})
    message = failure(path)
    assert f"{path}:2: " in message
    assert words in message


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_truncated_file_is_an_error(tmp_path: Path, suffix: str, packing: str) -> None:
    content = PACK[packing](json.dumps({"text": random.Random(0).randbytes(5000).hex()}).encode())
    # Cut within the data, and just before the end.
    for end in (len(content) // 2, len(content) - 1):
        path = write(tmp_path / f"a{suffix}{packing}", content[:end])
        assert f"{path}: corrupt or truncated" in failure(path)


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
def test_file_whose_compression_differs_from_its_suffix_is_an_error(tmp_path: Path, packing: str) -> None:
    path = write(tmp_path / f"a.txt{packing}", "just text, and more of it")
    assert f"{path}: corrupt or truncated" in failure(path)


def test_flipped_byte_in_a_gz_file_is_an_error(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b"some text"))
    content[-6] ^= 1  # within the checksum
    path = write(tmp_path / "a.txt.gz", bytes(content))
    assert f"{path}: corrupt or truncated" in failure(path)


# Long texts


@given(st.text(st.sampled_from("ab \n"), max_size=200), st.integers(1, 20), st.integers(1, 50))
def test_parts_of_a_long_text_concatenate_to_the_text(text: str, limit: int, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    parts = list(corpus._split(pieces, limit))
    assert "".join(parts) == text
    assert all(0 < len(part) <= limit for part in parts)
    assert parts == list(corpus._split([text], limit))  # the pieces do not matter
    for i, part in enumerate(parts[:-1]):
        window = "".join(parts[i:])[:limit]
        best = next((s for s in ("\n\n", "\n", " ") if s in window), None)
        assert part == (window[: window.rindex(best)] + best if best else window)


def test_long_text_is_cut_at_paragraphs_then_newlines_then_spaces_then_anywhere() -> None:
    assert list(corpus._split(["a b\n\nc d\ne f"], 10)) == ["a b\n\n", "c d\ne f"]
    assert list(corpus._split(["a b c\nd e f"], 10)) == ["a b c\n", "d e f"]
    assert list(corpus._split(["aaa bbb ccc"], 10)) == ["aaa bbb ", "ccc"]
    assert list(corpus._split(["aaaaaaaaaaaaa"], 10)) == ["aaaaaaaaaa", "aaa"]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_long_document_is_read_in_numbered_parts(tmp_path: Path, suffix: str) -> None:
    text = "word " * (MAX_DOCUMENT_LENGTH // 2)  # two and a half times the longest
    path = str(tmp_path / f"a{suffix}")
    name = {".txt": path, ".jsonl": "own", ".parquet": f"{path}:1"}[suffix]
    if suffix == ".txt":
        write(Path(path), text)
    elif suffix == ".jsonl":
        jsonl(Path(path), {"text": text, "id": "own"})
    else:
        parquet(Path(path), text=[text])
    found = list(read_documents(path))
    assert [document.id for document in found] == [name, f"{name}#2", f"{name}#3"]
    assert {document.source for document in found} == {path if suffix == ".txt" else f"{path}:1"}
    assert "".join(document.text for document in found) == text
    assert all(len(document.text) <= MAX_DOCUMENT_LENGTH for document in found)


def test_text_of_exactly_the_longest_length_is_one_document(tmp_path: Path) -> None:
    assert len(texts(write(tmp_path / "a.txt", "x" * MAX_DOCUMENT_LENGTH))) == 1
    assert len(texts(write(tmp_path / "a.txt", "x" * MAX_DOCUMENT_LENGTH + "y"))) == 2


def test_parts_of_whitespace_are_dropped_without_a_gap_in_the_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.txt", "x" * MAX_DOCUMENT_LENGTH + " " * MAX_DOCUMENT_LENGTH + "y" * MAX_DOCUMENT_LENGTH + "z"
    )
    found = list(read_documents(path))
    assert [document.id for document in found] == [path, f"{path}#2", f"{path}#3"]
    assert [document.text[-1] for document in found] == ["x", "y", "z"]


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_ram_use_does_not_grow_with_the_file(tmp_path: Path, suffix: str, packing: str) -> None:
    text = "it was a dark and stormy night, and the rain fell in torrents, é\n" * 100
    line = text if suffix == ".txt" else json.dumps({"text": text}, ensure_ascii=False) + "\n"
    count = 60_000_000 // len(line)
    path = tmp_path / f"a{suffix}{packing}"
    with {"": open, ".gz": gzip.open, ".zst": zstandard.open}[packing](path, "wb") as file:
        for _ in range(count):
            file.write(line.encode())
    tracemalloc.start()
    try:
        characters = sum(len(document.text) for document in read_documents(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert characters == len(text) * count
    assert peak < 30_000_000


def test_ram_use_does_not_grow_with_a_row_group_of_parquet(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{i:06} " + "x" * 9993 for i in range(12_000)]})
    path = str(tmp_path / "a.parquet")
    # One row group of 120 MB, in pages of about 1 MB; Arrow has one whole page in memory, in any case.
    pq.write_table(table, path, compression="none", use_dictionary=False, write_batch_size=64)
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    code = f"""if True:
        import psutil, pyarrow.parquet
        from knnlm.corpus import read_documents
        documents = read_documents({path!r})
        peak = before = psutil.Process().memory_info().rss
        characters = 0
        for number, document in enumerate(documents):
            characters += len(document.text)
            if number % 100 == 0:
                peak = max(peak, psutil.Process().memory_info().rss)
        print(characters, peak - before)
    """
    characters, growth = map(int, in_another_process(code).split())
    assert characters == 120_000_000
    assert growth < 60_000_000


def test_endless_line_is_an_error_instead_of_filling_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "short"}\n{"text": "' + "x" * 30_000_000 + '"}\n')
    assert len(texts(path)) == 1 + 29  # the short one, and the parts of the long one
    monkeypatch.setattr(corpus, "MAX_LINE_LENGTH", 1_000_000)
    tracemalloc.start()
    try:
        message = failure(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert f"{path}:2: line longer than 1000000 characters" in message
    assert peak < 10_000_000


# Folders


def test_folder_is_read_in_the_order_of_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["b.txt", "a/z.md", "a/b/c.txt", "a-b.txt", "a.txt", "B.txt"]:
        write(tmp_path / "docs" / name, f"text of {name}")
    write(tmp_path / "docs/a/rows.jsonl", '{"text": "a row"}')
    for ignored in [".hidden.txt", ".git/config.txt", "a/.cache/x.md", "picture.png", "README", "notes.gz"]:
        write(tmp_path / "docs" / ignored, "not read")
    monkeypatch.chdir(tmp_path)
    names = sorted(["b.txt", "a/z.md", "a/b/c.txt", "a-b.txt", "a.txt", "B.txt", "a/rows.jsonl:1"])
    for folder in ["docs", "docs/", "./docs", Path("docs")]:
        assert [document.id for document in read_documents(folder)] == [f"docs/{name}" for name in names]
    assert [document.source for document in read_documents("docs")] == [f"docs/{name}" for name in names]
    monkeypatch.chdir(tmp_path / "docs")
    assert [document.id for document in read_documents(".")] == names
    absolute = str(tmp_path / "docs")
    assert [document.id for document in read_documents(absolute)] == [f"{absolute}/{name}" for name in names]


def test_inputs_mix_and_keep_their_order(tmp_path: Path) -> None:
    write(tmp_path / "docs/b.txt", "in the folder")
    text = write(tmp_path / "z.txt", "first")
    lines = jsonl(tmp_path / "a.jsonl", {"text": "last"})
    inputs = [text, "-", str(tmp_path / "docs"), lines]
    assert texts(*inputs, stdin=io.BytesIO(b"typed")) == ["first", "typed", "in the folder", "last"]


def test_hidden_file_that_is_named_is_read(tmp_path: Path) -> None:
    assert texts(write(tmp_path / ".notes.txt", "hidden")) == ["hidden"]


def test_linked_folders_are_followed_once_and_never_in_loops(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere/far.txt", "far")
    write(tmp_path / "docs/near.txt", "near")
    (tmp_path / "docs/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "docs/link-again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "docs/self").symlink_to(tmp_path / "docs")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "docs")
    assert texts(str(tmp_path / "docs")) == ["far", "near"]
    (tmp_path / "alias").symlink_to(tmp_path / "docs")
    assert texts(str(tmp_path / "alias")) == ["far", "near"]


def test_linked_files_are_read_and_broken_links_are_errors(tmp_path: Path) -> None:
    write(tmp_path / "blob", "behind the link")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.txt").symlink_to(tmp_path / "blob")
    assert texts(str(tmp_path / "docs")) == ["behind the link"]
    (tmp_path / "blob").unlink()
    assert f"{tmp_path}/docs/a.txt: cannot read it: No such file" in failure(tmp_path / "docs")


def test_pipe_in_a_folder_does_not_block(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    os.mkfifo(tmp_path / "b.txt")
    assert texts(str(tmp_path)) == ["text"]


def test_folder_without_readable_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "picture.png", "x")
    write(tmp_path / ".hidden.txt", "x")
    message = failure(tmp_path)
    assert f"{tmp_path}: no readable file in this folder" in message
    for suffix in [".txt", ".md", ".jsonl", ".parquet", ".gz", ".xz", ".zst"]:
        assert suffix in message


# Names


def test_ids_are_unique_within_a_read(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "x" * (MAX_DOCUMENT_LENGTH + 1))
    lines = jsonl(tmp_path / "a.jsonl", *({"id": i, "text": "x"} for i in ["same", "same~2", "same", "same", 1, "1"]))
    ids = [document.id for document in read_documents(text, lines, text)]
    assert ids[:2] == [text, f"{text}#2"]
    assert ids[2:8] == ["same", "same~2", "same~3", "same~4", "1", "1~2"]
    assert ids[8:] == [f"{text}~2", f"{text}#2~2"]
    assert [document.id for document in read_documents(text)] == [text, f"{text}#2"]  # each read has its own ids


def test_many_equal_ids_do_not_take_quadratic_time() -> None:
    count = 50_000
    ids = [document.id for document in corpus._with_unique_ids(Document("same", "s", "t") for _ in range(count))]
    assert ids == ["same", *(f"same~{i}" for i in range(2, count + 1))]


def test_names_can_always_be_written_as_utf8(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(raw, "wb") as file:  # noqa: PTH123
        file.write(b"text")
    lines = jsonl(tmp_path / "a.jsonl", {"id": "\ud800", "text": "text"})
    assert [document.id for document in read_documents(os.fsdecode(raw), lines)] == [f"{tmp_path}/caf?.txt", "?"]


# Errors


def test_no_inputs_at_all_are_an_error() -> None:
    for inputs in [(), ("",), ("a.txt", "")]:
        assert "Name at least one file or folder" in failure(*inputs)
    with pytest.raises(CorpusError, match="Name at least one file or folder"):
        read_documents()


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    for name in ["a.txt", "a.jsonl", "a.parquet", "a.txt.zst", "folder", "a.pdf"]:
        assert f"{tmp_path / name}: cannot read it: No such file" in failure(tmp_path / name)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder open to all users, and a process without root privileges, to which permissions apply."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield folder
    if root:
        os.seteuid(0)
    shutil.rmtree(folder)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_file_or_folder_without_permission_is_an_error(unprivileged: Path) -> None:
    path = Path(write(unprivileged / "docs/sub/a.txt", "secret"))
    path.chmod(0)
    assert f"{path}: cannot read it: Permission denied" in failure(path)
    assert f"{path}: cannot read it: Permission denied" in failure(unprivileged)
    for mode, verb in [(0, "list"), (0o400, "read")]:  # no listing; listing without entering
        path.parent.chmod(mode)
        message = failure(path.parent.parent)
        path.parent.chmod(0o700)
        assert message.startswith(f"{path.parent if verb == 'list' else path.parent.parent}: cannot {verb}")
        assert "Permission denied" in message


@pytest.mark.parametrize(
    ("name", "suffix"), [("a.pdf", ".pdf"), ("a.csv.gz", ".csv.gz"), ("a.gz", ".gz"), ("README", "(none)")]
)
def test_unknown_suffix_is_an_error(tmp_path: Path, name: str, suffix: str) -> None:
    message = failure(write(tmp_path / name, "text"))
    assert f"{tmp_path / name}: unknown suffix {suffix}." in message
    assert ".txt, .md, .jsonl, .parquet" in message


def test_parquet_file_compressed_from_outside_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "docs/a.parquet.gz", gzip.compress(b"PAR1"))
    for given_input in [path, str(tmp_path / "docs")]:
        message = failure(given_input)
        assert path in message
        assert "compressed parquet files are not supported" in message


@pytest.mark.parametrize("content", [b"", b" \n\t\r\n", b"\xef\xbb\xbf", "\u2003".encode()])
@pytest.mark.parametrize("packing", ["", ".gz"])
def test_file_without_text_is_an_error_where_it_was_named_and_passed_over_in_a_folder(
    tmp_path: Path, content: bytes, packing: str
) -> None:
    path = write(tmp_path / f"b.txt{packing}", PACK[packing](content))
    assert f"{path}: empty" in failure(path)
    assert f"{tmp_path}: empty" in failure(tmp_path)
    write(tmp_path / "a.txt", "text")
    assert [document.text for document in read_documents(tmp_path)] == ["text"]


def test_records_or_standard_input_without_text_are_an_error(tmp_path: Path) -> None:
    for path in [
        write(tmp_path / "a.jsonl", "\n \n"),
        jsonl(tmp_path / "b.jsonl", {"text": ""}, {"text": " \n"}),
        parquet(tmp_path / "a.parquet", text=["", None, " "]),
        parquet(tmp_path / "b.parquet", text=pa.array([], pa.string())),
    ]:
        assert f"{path}: empty" in failure(path)
    assert "standard input: empty" in failure("-", stdin=io.BytesIO(b" "))


def test_empty_records_are_skipped_when_others_have_text(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": ""}, {"text": "one"}, {"text": "  "})
    assert [(document.id, document.text) for document in read_documents(path)] == [(f"{path}:2", "one")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{'text': 1}", "not valid JSON (Expecting property name"),
        ('{"text": "a"', "not valid JSON ("),
        ("[" * 100_000, "not valid JSON ("),
        ('{"text": 1' + "0" * 5000 + "}", "not valid JSON ("),
        ('["text"]', "list, not an object"),
        ('"text"', "str, not an object"),
        ('{"body": "a", "title": "b"}', "no field 'text' among 'body', 'title'. Name one with --text-field"),
        ("{}", "no field 'text' among none"),
        ('{"text": 5}', "the field 'text' is not a string but int. Name another with --text-field"),
        ('{"text": null}', "the field 'text' is not a string but NoneType"),
    ],
)
def test_wrong_line_of_jsonl_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n\n' + line + '\n{"text": "fine"}\n')
    message = failure(path)
    assert message.startswith(f"{path}:3: ")
    assert words in message


def test_parquet_file_without_the_column_or_with_another_type_is_an_error(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", body=["a"], number=[3])
    assert f"{path}: no field 'text' among 'body', 'number'. Name one with --text-field" in failure(path)
    assert f"{path}:1: the field 'number' is not a string but int" in failure(path, text_field="number")


def test_damaged_parquet_file_is_an_error(tmp_path: Path) -> None:
    path = Path(parquet(tmp_path / "a.parquet", text=[f"text {i}" for i in range(1000)]))
    content = path.read_bytes()
    for damaged in [content[:-100], b"not parquet", content[:4] + b"\xff" * 60 + content[64:]]:
        path.write_bytes(damaged)
        assert f"{path}: corrupt or truncated" in failure(path)


def test_invalid_utf8_in_parquet_names_the_row(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"fine", b"caf\xe9"], pa.binary()).buffers())
    path = parquet(tmp_path / "a.parquet", text=bad)
    message = failure(path)
    assert f"{path}:2: " in message
    assert "utf-8" in message


# Packages that may be missing


@pytest.mark.parametrize(
    ("package", "extra", "name"), [("zstandard", "zstd", "a.jsonl.zst"), ("pyarrow", "parquet", "a.parquet")]
)
def test_error_for_a_missing_package_names_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str, name: str
) -> None:
    path = write(tmp_path / name, b"never looked at")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra) as caught:
        list(read_documents(path))
    for words in [path, package, f"pip install 'knnlm[{extra}]'"]:
        assert words in str(caught.value)


def test_missing_datasets_package_is_reported_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    text = write(tmp_path / "a.txt", "text")
    with pytest.raises(MissingExtra, match=r"hf:some/set.*datasets.*pip install 'knnlm\[datasets\]'"):
        read_documents(text, "hf:some/set")


# Datasets


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], list[dict[str, object]]]:
    """A datasets package with the sets that a test puts into it."""
    sets: dict[tuple[str, str], list[dict[str, object]]] = {}

    def load_dataset(name: str, *, split: str, streaming: bool) -> Iterator[dict[str, object]]:
        assert streaming
        if (name, split) not in sets:
            raise ValueError(f"no set {name}\nand many more lines")
        return iter(sets[name, split])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return sets


def test_dataset_is_a_document_per_row(hub: dict[tuple[str, str], list[dict[str, object]]]) -> None:
    hub["owner/set", "train"] = [{"text": "one"}, {"text": None}, {"text": "three", "id": 33}]
    hub["set", "test"] = [{"body": "four"}]
    expected = [Document("hf:owner/set:train:1", "hf:owner/set:train:1", "one")]
    expected += [Document("33", "hf:owner/set:train:3", "three")]
    assert list(read_documents("hf:owner/set")) == expected
    assert list(read_documents("hf:set:test", text_field="body")) == [
        Document("hf:set:test:1", "hf:set:test:1", "four")
    ]


def test_dataset_that_cannot_be_read_is_an_error(
    hub: dict[tuple[str, str], list[dict[str, object]]],
) -> None:
    hub["void", "train"] = []
    hub["set", "train"] = [{"text": "one"}, {"body": "two"}]
    assert "hf:no/set:test: cannot read it (no set no/set)" in failure("hf:no/set:test")
    assert "hf:void:train: empty" in failure("hf:void")
    assert "hf:set:train:2: no field 'text' among 'body'. Name one with --text-field" in failure("hf:set")
    assert "names no dataset" in failure("hf:")


# Bytes read


@pytest.mark.parametrize("packing", [*PACK, "parquet"])
def test_bytes_read_advance_to_the_size_of_the_files(tmp_path: Path, packing: str) -> None:
    records = [random.Random(i).randbytes(5000).hex() for i in range(100)]
    if packing == "parquet":
        path = parquet(tmp_path / "a.parquet", text=records)
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in records) + "\n\n"
        path = write(tmp_path / f"a.jsonl{packing}", PACK[packing](lines.encode()))
    small = write(tmp_path / "docs/b.txt", "in a folder é")
    write(tmp_path / "docs/empty.txt", " ")
    reader = read_documents(path, tmp_path / "docs")
    sizes = [Path(name).stat().st_size for name in (path, small, tmp_path / "docs/empty.txt")]
    assert (reader.total_bytes, reader.bytes_read) == (sum(sizes), 0)
    steps = [reader.bytes_read for _ in reader]
    assert steps == sorted(steps)
    assert len(set(steps[:100])) > 2  # not all at once
    assert steps[-1] == sizes[0] + sizes[1]
    assert reader.bytes_read == reader.total_bytes


def test_total_is_unknown_where_an_input_has_no_size(
    tmp_path: Path, hub: dict[tuple[str, str], list[dict[str, object]]]
) -> None:
    hub["owner/set", "train"] = [{"text": "é"}, {"text": "two"}]
    text = write(tmp_path / "a.txt", "text")
    assert read_documents(text).total_bytes == 4
    reader = read_documents(text, "-", stdin=io.BytesIO("typéd".encode()))
    assert reader.total_bytes is None
    assert [(document.text, reader.bytes_read) for document in reader] == [("text", 4), ("typéd", 10)]
    reader = read_documents("hf:owner/set", text)
    assert reader.total_bytes is None
    assert [reader.bytes_read for _ in reader] == [2, 5, 9]
    assert read_documents("-", stdin=io.BytesIO()).total_bytes is None


def test_inputs_are_checked_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write(tmp_path / "a.txt", "text")
    with pytest.raises(CorpusError, match=r"b\.txt: cannot read it: No such file"):
        read_documents(text, tmp_path / "b.txt")
    with pytest.raises(CorpusError, match=r"unknown suffix \.pdf"):
        read_documents(text, write(tmp_path / "a.pdf", "text"))
    with pytest.raises(CorpusError, match="names no dataset"):
        read_documents(text, "hf:")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match="zstandard"):
        read_documents(text, write(tmp_path / "a.txt.zst", "text"))


def test_error_in_the_last_line_comes_after_the_documents_before_it(tmp_path: Path) -> None:
    reader = read_documents(jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": 2}))
    assert next(reader).text == "one"
    with pytest.raises(CorpusError, match=r"a\.jsonl:2: "):
        next(reader)


def test_byte_meter_assigns_every_byte_to_one_document(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": ""}, {"text": "three"}, {"text": ""})
    meter = DocumentMeter(read_documents(path, write(tmp_path / "b.txt", "last"), write(tmp_path / "c.txt", "é")))
    assert meter.total_bytes == Path(path).stat().st_size + 6
    assert (next(meter).text, next(meter).text) == ("one", "three")
    taken = meter.take(1)
    assert [document.text for document in meter] == ["last", "é"]
    assert (meter.drop_last(), taken + meter.take_rest()) == (2, meter.total_bytes - 2)


def test_byte_meter_of_plain_documents_counts_utf8() -> None:
    documents = [Document("a", "a", "é"), Document("b", "b", "four")]
    meter = DocumentMeter(documents)
    assert meter.total_bytes == 6
    assert list(meter) == documents
    assert (meter.take(2), meter.take_rest()) == (6, 0)
    meter = DocumentMeter(iter(documents))
    assert meter.total_bytes is None
    next(meter)
    assert meter.take_rest() == 2


def test_check_first_keeps_the_documents_and_the_bytes(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": "two"}\n'), write(tmp_path / "b.txt", "three")]
    expected = [(document.id, document.text) for document in read_documents(*paths)]
    reader = read_documents(*paths)
    reader.check_first()
    reader.check_first()
    meter = DocumentMeter(reader)
    assert [(document.id, document.text) for document in meter] == expected
    assert meter.take(3) + meter.take_rest() == reader.total_bytes


@pytest.mark.parametrize("name", ["binary.txt", "latin.txt", "empty.txt", "broken.jsonl", "broken.parquet", "folder"])
def test_check_first_raises_the_error_of_the_first_document(tmp_path: Path, name: str) -> None:
    contents = {"binary.txt": b"a\0b", "latin.txt": b"caf\xe9", "empty.txt": b"", "broken.jsonl": b"{", "folder": b"\0"}
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        path = path / "a.txt"
    path.write_bytes(contents.get(name, b"no parquet"))
    with pytest.raises(CorpusError, match=path.name):
        read_documents(tmp_path / name).check_first()


def test_check_first_reads_standard_input_once() -> None:
    reader = read_documents("-", stdin=io.BytesIO(b"text"))
    reader.check_first()
    assert [document.text for document in reader] == ["text"]
    with pytest.raises(CorpusError, match="standard input"):
        read_documents("-", stdin=io.BytesIO(b"")).check_first()


def pairs_of(*inputs, **options):
    return [(each.id, each.source_text, each.text) for each in read_documents(*map(str, inputs), **options)]


def test_record_with_a_source_field_is_a_pair(tmp_path):
    file = tmp_path / "p.jsonl"
    records = [
        {"id": "a", "source": "Guten Tag", "text": "Good day\r\nto you", "domain": "talk"},
        {"source": "Ja", "text": "Yes"},
        {"source": "", "text": ""},
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    documents = list(read_documents(str(file), source_field="source"))
    assert [(each.id, each.source_text, each.text) for each in documents] == [
        ("a", "Guten Tag", "Good day\nto you"),
        (f"{file}:2", "Ja", "Yes"),
    ]
    assert documents[0].fields == {"domain": "talk"}
    # Without the option, the source is a field like any other, as before.
    plain = list(read_documents(str(file)))
    assert plain[0].source_text is None
    assert plain[0].fields == {"source": "Guten Tag", "domain": "talk"}
    renamed = tmp_path / "r.jsonl"
    renamed.write_text(json.dumps({"de": "Ja", "en": "Yes"}))
    assert pairs_of(renamed, source_field="de", text_field="en") == [(f"{renamed}:1", "Ja", "Yes")]


def test_parquet_file_with_a_source_field_has_pairs(tmp_path):
    table = pa.table({"de": ["Ja", "Nein"], "en": ["Yes", "No"], "id": ["1", "2"], "note": ["x", None]})
    pq.write_table(table, tmp_path / "p.parquet")
    found = list(read_documents(str(tmp_path / "p.parquet"), source_field="de", text_field="en"))
    assert [(each.id, each.source_text, each.text) for each in found] == [("1", "Ja", "Yes"), ("2", "Nein", "No")]
    assert found[0].fields == {"note": "x"}
    with pytest.raises(CorpusError, match=r"no field 'src' among 'de', 'en'.*--source-field"):
        list(read_documents(str(tmp_path / "p.parquet"), source_field="src", text_field="en"))


def test_tsv_file_has_a_pair_on_each_line(tmp_path):
    file = tmp_path / "p.tsv"
    file.write_text("Ja\tYes\n\nNein\tNo\r\n")
    expected = [(f"{file}:1", "Ja", "Yes"), (f"{file}:3", "Nein", "No")]
    assert pairs_of(file, source_field="source") == expected
    assert pairs_of(tmp_path, source_field="source") == expected  # a folder
    with gzip.open(tmp_path / "z.tsv.gz", "wt") as packed:
        packed.write("Ja\tYes")
    assert pairs_of(tmp_path / "z.tsv.gz", source_field="source")[0][1:] == ("Ja", "Yes")
    stream = io.BytesIO(b"Ja\tYes\nNein\tNo\n")
    assert [pair[1:] for pair in pairs_of("-", source_field="source", stdin=stream)] == [("Ja", "Yes"), ("Nein", "No")]


@pytest.mark.parametrize("packed", [False, True])
def test_lines_of_two_files_are_pairs(tmp_path, packed):
    target, source = tmp_path / "t.en", tmp_path / "t.de"
    target.write_text("Yes\n\nNo\n")
    source.write_text("Ja\n\nNein")
    if packed:
        for path in (target, source):
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        target, source = tmp_path / "t.en.gz", tmp_path / "t.de.gz"
    reader = read_documents(str(target), source=str(source))
    assert [(each.id, each.source_text, each.text) for each in reader] == [
        (f"{target}:1", "Ja", "Yes"),
        (f"{target}:3", "Nein", "No"),
    ]
    assert reader.bytes_read == reader.total_bytes == target.stat().st_size + source.stat().st_size


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "Ja\n", r"a.tsv:1: 1 columns instead of two: write source, tab, target"),
        ("a.tsv", "Ja\tYes\tx\n", r"a.tsv:1: 3 columns"),
        ("a.tsv", "Ja\tYes\n\tNo\n", r"a.tsv:2: the source is empty, but its target is not"),
        ("a.tsv", "Ja\t\n", r"a.tsv:1: the target is empty, but its source is not"),
        ("a.jsonl", '{"text": "Yes"}', r"a.jsonl:1: no field 'source' among 'text'. Name one with --source-field"),
        ("a.jsonl", '{"source": "Ja"}', r"a.jsonl:1: no field 'text' among 'source'. Name one with --text-field"),
        ("a.jsonl", '{"source": null, "text": "Yes"}', r"the field 'source' is empty, so the text has no source"),
        ("a.jsonl", '{"source": " ", "text": "Yes"}', r"the field 'source' is empty, so the text has no source"),
        ("a.jsonl", '{"source": 7, "text": "Yes"}', r"the field 'source' is not a string but int.*--source-field"),
        ("a.txt", "Yes", r"a.txt: a text without a source, but an encoder-decoder model reads pairs.*--source"),
        ("a.csv", "Yes", r"unknown suffix .csv. Known suffixes: .jsonl, .parquet, .tsv"),
    ],
)
def test_wrong_pairs_are_errors_that_name_the_place(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(CorpusError, match=message) as caught:
        list(read_documents(str(tmp_path / name), source_field="source"))
    assert "\n" not in str(caught.value)


def test_files_of_different_lengths_are_no_pairs(tmp_path):
    target, source = tmp_path / "t.txt", tmp_path / "s.txt"
    target.write_text("Yes\nNo\n")
    source.write_text("Ja\nNein\nVielleicht\n")
    with pytest.raises(CorpusError, match=r"s.txt has more lines than .*t.txt, which has 2\."):
        list(read_documents(str(target), source=str(source)))
    with pytest.raises(CorpusError, match=r"s.txt has more lines than .*t.txt, which has 2\."):
        list(read_documents(str(source), source=str(target)))
    source.write_text("Ja\n\n")
    with pytest.raises(CorpusError, match=r"t.txt:2: the source is empty"):
        list(read_documents(str(target), source=str(source)))
    target.write_text("Yes\n\n")
    source.write_text("Ja\nNein\n")
    with pytest.raises(CorpusError, match=r"t.txt:2: the target is empty"):
        list(read_documents(str(target), source=str(source)))


def test_source_file_needs_one_plain_text_file(tmp_path):
    (tmp_path / "t.txt").write_text("Yes")
    (tmp_path / "s.jsonl").write_text("{}")
    with pytest.raises(CorpusError, match=r"sources of one text file, but 2 are given"):
        read_documents(str(tmp_path / "t.txt"), str(tmp_path / "t.txt"), source=str(tmp_path / "t.txt"))
    with pytest.raises(CorpusError, match=r"s.jsonl: --source needs two plain text files"):
        read_documents(str(tmp_path / "t.txt"), source=str(tmp_path / "s.jsonl"))
    with pytest.raises(CorpusError, match=r"nowhere: cannot read it"):
        read_documents(str(tmp_path / "t.txt"), source=str(tmp_path / "nowhere"))


def test_tsv_file_is_not_read_as_plain_text(tmp_path):
    (tmp_path / "p.tsv").write_text("Ja\tYes\n")
    (tmp_path / "a.txt").write_text("A text.")
    with pytest.raises(CorpusError, match=r"p.tsv: a .tsv file has pairs .* encoder-decoder model"):
        read_documents(str(tmp_path / "p.tsv"))
    assert [each.text for each in read_documents(str(tmp_path))] == ["A text."]


def test_members_of_a_field_are_named_with_a_dot(tmp_path):
    records = [
        {"id": "1", "translation": {"de": "Ja", "en": "Yes"}},
        {"id": "2", "translation": {"de": "x", "en": "y"}},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    names = {"source_field": "translation.de", "text_field": "translation.en"}
    for file in ("p.jsonl", "p.parquet"):
        assert pairs_of(tmp_path / file, **names) == [("1", "Ja", "Yes"), ("2", "x", "y")]
        with pytest.raises(CorpusError, match=r"no field 'translation.fr' among 'id', 'translation'.*--source-field"):
            pairs_of(tmp_path / file, **{**names, "source_field": "translation.fr"})
        with pytest.raises(CorpusError, match=r"no field 'other.de' among 'id', 'translation'"):
            pairs_of(tmp_path / file, **{**names, "source_field": "other.de"})
    plain = [document.text for document in read_documents(str(tmp_path / "p.jsonl"), text_field="translation.de")]
    assert plain == ["Ja", "x"]
