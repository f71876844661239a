"""Fields of users' records: what is kept of them, who is chosen by them, and that they go with their document."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from contextlib import closing

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from helpers.damage import change, flip
from helpers.format import check_against_ours
from helpers.stores import documents
from knnlm.cli.app import run
from knnlm.corpus import MAX_FIELD_LENGTH, MAX_FIELDS, Document, read_documents, select_fields
from knnlm.datastore import schema
from knnlm.datastore.catalog import field_condition, fields_by_number, other_fields, put_fields
from knnlm.datastore.compact import compact
from knnlm.datastore.remove import Selection, list_documents, removal_report, remove
from knnlm.datastore.rewrite import derive
from knnlm.datastore.schema import StoredDocument
from knnlm.datastore.store import Datastore
from knnlm.errors import CorpusError, DatastoreCorrupt, ParameterError
from knnlm.ingest.build import add, build
from knnlm.maintenance.export import export
from knnlm.maintenance.merge import merge
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify

PEOPLE = ["acme", "bolt", "acme", "2024", "crux"]
YEARS = [2024, 2023, 2022, 2024, None]
FIELDED = [
    Document(one.id, one.source, one.text, {"customer": person, "year": year, "customer id": f"{person}-1"})
    for one, person, year in zip(documents(5), PEOPLE, YEARS, strict=True)
]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2)
)


@pytest.fixture(scope="module")
def built(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("fields") / "store"
    build([*FIELDED[:4], *documents(2, start=8)], path, lm=lm, segment_entries=150).close()
    add(FIELDED[4:], path, lm=lm)
    return path


@pytest.fixture
def store_path(built, tmp_path):
    return shutil.copytree(built, tmp_path / "store")


def fields_in(path) -> dict[str, dict]:
    with closing(Datastore.open(path)) as store:
        return {one.id: dict(one.fields) for one in store.documents()}


RIGHT = {one.id: dict(one.fields) for one in FIELDED}
BARE = {"d8": {}, "d9": {}}


@given(st.dictionaries(st.text(max_size=260), values, max_size=8))
def test_short_scalars_of_a_record_become_fields(record):
    found = select_fields(record, exclude=("text", "id"))

    def kept(name, value):
        if not 0 < len(name) <= MAX_FIELD_LENGTH or name in ("text", "id"):
            return False
        if isinstance(value, str):
            return len(value) <= MAX_FIELD_LENGTH
        if isinstance(value, float):
            return math.isfinite(value)
        return value is None or isinstance(value, bool) or (isinstance(value, int) and -(2**63) <= value < 2**63)

    right = {name: value for name, value in record.items() if kept(name, value)}
    assert found == {json.loads(json.dumps(name)): value for name, value in right.items()}
    Document("a", "b", "c", found)  # which would refuse what cannot be stored


def test_every_input_format_has_fields(tmp_path):
    record = {"id": 7, "text": "words", "customer": "acme", "year": 2024, "score": 0.5, "paid": True, "none": None}
    odd = {"list": [1], "object": {"a": 1}, "long": "x" * 257, "half": "\ud800"}
    (tmp_path / "a.jsonl").write_text(json.dumps({**record, **odd, "nan": float("nan")}) + "\n")
    (one,) = read_documents(tmp_path / "a.jsonl")
    right = {"customer": "acme", "year": 2024, "score": 0.5, "paid": True, "none": None}
    assert one.fields == {**right, "half": "?"}
    many = {"text": "words", **{f"f{number}": number for number in range(100)}}
    (tmp_path / "b.jsonl").write_text(json.dumps(many))
    (two,) = read_documents(tmp_path / "b.jsonl")
    assert two.fields == {f"f{number}": number for number in range(MAX_FIELDS)}
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([{**record, "list": [1]}]), tmp_path / "c.parquet")
    (three,) = read_documents(tmp_path / "c.parquet")
    assert {name: value for name, value in three.fields.items() if name != "none"} == {
        name: value for name, value in right.items() if name != "none"
    }
    (tmp_path / "d.txt").write_text("words")
    assert next(read_documents(tmp_path / "d.txt")).fields == {}


@pytest.mark.parametrize(
    "wrong", [{"a": [1]}, {"": 1}, {1: 2}, {"a": "x" * 257}, {"a": math.inf}, {"a": 1 << 70}, ["a"], {"a": "\ud800"}]
)
def test_invalid_fields_are_refused(wrong):
    with pytest.raises(CorpusError, match="field"):
        Document("a", "b", "c", wrong)


def test_documents_are_selected_by_fields_of_their_records(store_path):
    assert fields_in(store_path) == RIGHT | BARE
    for where, right in (
        (("customer=acme",), ["d0", "d2"]),
        (("customer=acme", "year=2024"), ["d0"]),
        (("year=2024",), ["d0", "d3"]),
        (("customer=2024",), ["d3"]),
        (("fields.customer = bolt",), ["d1"]),
        (("customer id=acme-1", "number=2"), ["d2"]),
        (("year=null",), ["d4"]),
        (('customer="acme"',), []),
        (("customer=acme' OR '1'='1",), []),
    ):
        found, total = list_documents(store_path, Selection(where=where))
        assert ([one.id for one in found], total) == (right, len(right)), where
    assert [one.fields for one in list_documents(store_path, Selection(document="d1"))[0]] == [RIGHT["d1"]]
    for wrong in ("colour=red", "fields.id=d1", "customers=acme"):
        with pytest.raises(
            ParameterError, match=r"no document has this field\. The fields are id, .*customer, customer id, y"
        ):
            remove(store_path, where=wrong)


@given(data=st.data(), name=st.text('a":, {}\\', min_size=1, max_size=4), value=st.text('a":, {}\\1', max_size=4))
def test_fields_with_any_characters_are_found(data, name, value):
    pieces = st.text('a":, {}\\1', min_size=1, max_size=9)
    others = st.dictionaries(pieces, pieces | st.integers(0, 11) | st.booleans() | st.none(), min_size=1, max_size=3)
    records = data.draw(st.lists(others, min_size=1, max_size=4))
    if data.draw(st.booleans()):
        records[0] = {**records[0], name: data.draw(st.just(value) | st.integers(0, 11))}
    stored = [StoredDocument(number, "", "", 0, 0, 0, "", fields) for number, fields in enumerate(records)]
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(schema.SCHEMA)
        put_fields(connection, stored)
        condition, values = field_condition(name, value)
        query = f"SELECT number FROM fields WHERE {condition} ORDER BY number"
        found = [number for (number,) in connection.execute(query, values)]
        as_text = [
            {key: one if isinstance(one, str) else json.dumps(one) for key, one in each.items()} for each in records
        ]
        assert found == [number for number, each in enumerate(as_text) if each.get(name) == value]
        names = sorted({key for each in records for key in each})
        assert other_fields(connection, name) == (None if name in names else names)
        assert [fields_by_number(connection)(number) for number in range(len(records))] == records


def test_compaction_erases_the_fields_of_a_removed_document(lm, store_path):
    secret = Document("s", "s.txt", "Quartz sphinx, judge my vow.", {"customer": "hidden-customer", "hidden-name": 1})
    add([secret], store_path, lm=lm)
    gone = remove(store_path, where="customer=hidden-customer")
    assert [dict(one.fields) for one in gone.documents] == [dict(secret.fields)]
    assert fields_in(store_path) == RIGHT | BARE
    with closing(sqlite3.connect(store_path / "catalog.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM fields").fetchone() == (len(RIGHT),)
    assert compact(store_path).purged
    assert removal_report(store_path).bytes == ()
    for file in store_path.rglob("*"):
        assert file.is_dir() or not any(word in file.read_bytes() for word in (b"hidden-customer", b"hidden-name"))
    assert fields_in(store_path) == RIGHT | BARE
    for name in [*RIGHT, *BARE]:
        remove(store_path, document=name)
    compact(store_path)
    assert not any(b"acme" in file.read_bytes() for file in store_path.rglob("*") if file.is_file())


def test_fields_survive_merge_copy_compaction_and_repair(lm, store_path, tmp_path):
    check_against_ours(store_path)
    build(
        [*documents(1, start=20), Document("e", "e:1", documents(1, start=21)[0].text, {"x": 1.5})],
        tmp_path / "o",
        lm=lm,
    )
    merge([tmp_path / "o", store_path], tmp_path / "merged")
    assert fields_in(tmp_path / "merged") == {"d20": {}, "e": {"x": 1.5}} | RIGHT | BARE
    check_against_ours(tmp_path / "merged")
    with closing(Datastore.open(store_path)) as store:
        derive(store, tmp_path / "copy", key_dtype="float32").close()
        assert [dict(store.document_at(row).fields) for row in (0, store.entry_count - 1)] == [RIGHT["d0"], RIGHT["d4"]]
        number = store.segments[-1].id
    assert fields_in(tmp_path / "copy") == RIGHT | BARE
    compact(store_path, segment_entries=80)
    assert fields_in(store_path) == RIGHT | BARE
    assert verify(store_path, deep=True).sound
    with closing(Datastore.open(store_path)) as store:
        number = store.segments[-1].id
        lost = {one.id for one in store.catalog.documents_of(number)}
    flip(store_path / "segments" / f"{number:06d}" / "keys.npy", -3)
    assert {one.id for one in repair(store_path).lost} == lost
    assert fields_in(store_path) == {name: value for name, value in (RIGHT | BARE).items() if name not in lost}
    with closing(sqlite3.connect(store_path / "catalog.db")) as connection:
        left = {number for (number,) in connection.execute("SELECT DISTINCT number FROM fields")}
        assert left <= {number for (number,) in connection.execute("SELECT number FROM documents")}
    assert verify(store_path, deep=True).sound


def test_export_has_the_fields_of_every_entry(store_path, tmp_path):
    from pyarrow import parquet

    export(store_path, tmp_path / "out")
    table = parquet.ParquetDataset(tmp_path / "out").read().select(["document", "fields"]).to_pylist()
    assert {row["document"]: json.loads(row["fields"]) for row in table} == RIGHT | BARE


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(value=st.none() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
       | st.sampled_from(["[1]", "{}", '{"customer": [1]}', '{"customer": NaN}', '{"a": 1}', "[" * 3000,
                         "9" * 6000, "NaN", "1e999", "null", '"x"', "2" * 20]),
       column=st.sampled_from(["record", "number"]))  # fmt: skip
def test_untrusted_fields_are_refused_or_work(value, column, built, tmp_path):
    path = tmp_path / "fuzzed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(built, path)
    try:
        change(path, f"UPDATE fields SET {column} = ? WHERE number = 0", value)
    except (sqlite3.Error, OverflowError):
        return  # SQLite itself does not take it
    try:
        found = fields_in(path)
        assert set(found) == {*RIGHT, *BARE}
        list_documents(path, Selection(where=("customer=acme",)))
    except DatastoreCorrupt:
        assert not verify(path).sound
    except ParameterError:
        assert "customer" not in {name for fields in found.values() for name in fields}


def test_commands_show_fields_and_select_by_them(store_path, capfd):
    assert run(["documents", str(store_path), "--where", "customer=acme", "--where", "year=2024"]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "customer=acme customer id=acme-1 year=2024" in out
    assert run(["documents", str(store_path), "--where", "year=2024", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [one["fields"] for one in listed["documents"]] == [RIGHT["d0"], RIGHT["d3"]]
    assert run(["remove", str(store_path), "--where", "customer=acme", "--json"]) == 0
    assert [one["id"] for one in json.loads(capfd.readouterr().out)["documents"]] == ["d0", "d2"]
    assert run(["remove", str(store_path), "--where", "customer=acme"]) == 2
    assert "has no document for --where customer=acme" in capfd.readouterr().err
    assert run(["remove", str(store_path), "--where", "colour=red"]) == 2
    assert "Invalid condition 'colour=red': no document has this field" in capfd.readouterr().err
