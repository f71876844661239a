"""Keys stored as bytes and codes: what comes back is as near as it can be, and everything works with it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import oracle
from helpers.cli import failure, knnlm
from helpers.stores import all_keys, contents, documents, random_store
from knnlm.datastore import encoder
from knnlm.datastore.codecs import (
    CODEBOOK_SIZE,
    Bytes,
    Codes,
    Plain,
    fit_bytes,
    fit_codec,
    fit_codes,
    nearest_entries,
    parse_storage,
)
from knnlm.datastore.indexes import build_index, open_index
from knnlm.datastore.rewrite import compress, derive
from knnlm.datastore.store import Datastore
from knnlm.errors import DatastoreCorrupt, DatastoreError, ParameterError
from knnlm.generation.causal import KnnForCausalLM
from knnlm.index.factory import compressed_spec
from knnlm.ingest.build import build
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions

FORMATS = ["int8", "pca12-int8", "codes8", "pca16-codes4"]  # of keys of width 32


def drawn(seed, rows, width, *, spread=4.0, shift=0.0):
    """Keys whose dimensions vary differently, far from zero where told so."""
    generator = np.random.default_rng(seed)
    sizes = np.exp(generator.normal(size=width) * np.log(spread))
    return torch.from_numpy((generator.normal(size=(rows, width)) * sizes + shift).astype(np.float32))


@given(st.integers(0, 10_000), st.integers(1, 300), st.integers(1, 20), st.floats(-1e4, 1e4))
@settings(max_examples=30)
def test_byte_code_error_is_half_a_step_or_the_clipped_part(seed, rows, width, shift):
    keys = drawn(seed, rows, width, shift=shift)
    codec = fit_bytes(keys)
    stored = codec.encode(keys)
    centre, step = codec.centre.double().numpy(), codec.step.double().numpy()
    exact = keys.double().numpy()
    decoded = codec.decode(stored, 1.0).double().numpy()
    # Half a step, what does not fit, and what float32 cannot tell apart at this distance from zero.
    beyond = np.maximum(np.abs(exact - centre) - 127 * step, 0)
    assert (np.abs(decoded - exact) <= 0.501 * step + beyond + 4e-7 * np.abs(exact) + 1e-12).all()
    assert np.allclose(decoded, centre + step * stored.numpy(), rtol=1e-6, atol=1e-6 * (1 + abs(shift)))
    assert torch.equal(codec.encode(codec.decode(stored, 1.0)), stored) or abs(shift) > 0
    assert (beyond > 0).mean() <= 0.01 or rows < 100
    assert np.abs(decoded).max() <= codec.largest * (1 + 1e-6)


@given(st.integers(0, 10_000), st.integers(1, 400), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=20)
def test_code_is_the_nearest_codebook_entry(seed, rows, pieces, size):
    keys = drawn(seed, rows, pieces * size)
    codec = fit_codes(keys, pieces)
    stored = codec.encode(keys).numpy()
    books = codec.books.double().numpy()
    decoded = codec.decode(torch.from_numpy(stored), 1.0).numpy()
    for piece in range(pieces):
        own = keys[:, piece * size : (piece + 1) * size].double().numpy()
        far = ((own[:, None] - books[piece][None]) ** 2).sum(2)
        chosen = far[np.arange(rows), stored[:, piece]]
        assert (chosen <= far.min(1) * (1 + 1e-4) + 1e-4 * (own**2).sum(1).max()).all()
        entries = codec.books[piece].numpy()[stored[:, piece]]
        assert np.array_equal(decoded[:, piece * size : (piece + 1) * size], entries)
    # Encoded once more, nothing is lost; of entries that float32 cannot tell apart it may be the other one.
    again = codec.decode(codec.encode(torch.from_numpy(decoded)), 1.0)
    assert torch.allclose(again, torch.from_numpy(decoded), atol=1e-3 * float(keys.abs().max()))


def test_few_keys_are_their_own_codebook_entries():
    keys = drawn(0, CODEBOOK_SIZE, 6).unique(dim=0)
    codec = fit_codes(keys, 2)
    assert torch.allclose(codec.decode(codec.encode(keys), 1.0), keys, atol=1e-4)


def test_codebooks_are_as_precise_as_those_of_faiss():
    faiss = pytest.importorskip("faiss")
    keys = drawn(3, 6000, 24, spread=2.0)
    ours = fit_codes(keys, 6)
    error = float((ours.decode(ours.encode(keys), 1.0) - keys).square().sum(1).mean())
    theirs = faiss.ProductQuantizer(24, 6, 8)
    theirs.train(keys.numpy())
    back = theirs.decode(theirs.compute_codes(keys.numpy()))
    assert error <= 1.05 * float(((back - keys.numpy()) ** 2).sum(1).mean())


def test_unused_codebook_entry_is_moved():
    keys = torch.cat([torch.zeros(500, 1), torch.linspace(10, 20, 500)[:, None]])  # half the first entries are equal
    codec = fit_codes(keys, 1)
    assert len(codec.books[0].unique()) > 200
    assert float((codec.decode(codec.encode(keys), 1.0) - keys).abs().max()) < 0.2


def test_components_are_distributed_so_that_sub_vectors_have_equal_variance():
    keys = drawn(1, 4000, 16, spread=3.0)
    key_map, codec = fit_codec(parse_storage("codes4"), keys)
    turned = key_map.apply(keys)
    products = turned.double().var(0).log().reshape(4, 4).sum(1)
    straight = torch.linalg.eigvalsh(keys.double().T.cov()).flip(0).log().reshape(4, 4).sum(1)
    assert products.std() < straight.std() / 4
    # A turn keeps distances.
    assert torch.allclose(torch.cdist(turned, turned[:9]), torch.cdist(keys, keys[:9]), rtol=1e-3, atol=1e-2)
    assert codec.columns == 4


@pytest.mark.parametrize(
    ("text", "name", "dtype"),
    [
        ("float16", "float16", "float16"),
        ("int8", "int8", "int8"),
        ("pca256-int8", "pca256-int8", "int8"),
        ("codes", "codes64", "uint8"),
        ("codes48", "codes48", "uint8"),
        ("pca128-codes32", "pca128-codes32", "uint8"),
    ],
)
def test_key_formats_are_parsed_and_printed(text, name, dtype):
    storage = parse_storage(text, width=576)
    assert (str(storage), storage.dtype) == (name, dtype)
    assert parse_storage(str(storage)) == storage


@pytest.mark.parametrize(
    "text", ["float8", "pca-int8", "pca0-int8", "codes0", "pca8-float16", "int8 codes", "pca900-int8"]
)
def test_unknown_key_formats_are_refused(text):
    with pytest.raises(ParameterError, match=r"codes48|only 576"):
        parse_storage(text, width=576)


def test_narrow_keys_get_one_byte_per_dimension():
    assert str(parse_storage("codes", width=32)) == "codes32"
    with pytest.raises(ParameterError, match="64 bytes per key, but there are only 32"):
        parse_storage("codes64", width=32)


@pytest.fixture(scope="module")
def text():
    return documents(24)


@pytest.fixture(scope="module")
def built(lm, text, tmp_path_factory):
    """Return a store in each key format, whose codec was fitted when half of the text was read."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "CODEC_SAMPLE_KEYS", 400)
        return {
            way: build(text, folder / way, lm=lm, key_format=way, segment_entries=150) for way in ["float16", *FORMATS]
        }


@pytest.mark.parametrize("way", FORMATS)
def test_build_stores_encoded_keys(built, way):
    plain, store = built["float16"], built[way]
    keys = all_keys(plain)
    assert (store.storage, store.key_count, store.entry_count) == (way, plain.key_count, plain.entry_count)
    # Only the first keys were there when the codec was chosen; they were float16 by then, the others are not.
    read = sum(segment.entries for segment in plain.segments[:3])
    assert 400 <= read < plain.entry_count
    key_map, codec = fit_codec(parse_storage(way), keys[:read])
    assert type(codec) is type(store.codec)
    assert (key_map is None) == (store.map is None)
    mapped = keys if key_map is None else key_map.apply(keys)
    expected = codec.decode(codec.encode(mapped), 1.0)
    assert torch.allclose(all_keys(store)[:read], expected[:read], atol=1e-6)
    # Where float16 has rounded across a border, the other side is as near.
    assert ((all_keys(store) - expected).abs() > 1e-5).float().mean() < 0.02
    assert store.bytes == store.entry_count * (store.codec.columns + 4)
    assert not list(store.path.rglob("unencoded.npy"))


@pytest.mark.parametrize("way", FORMATS)
def test_all_ways_of_reading_keys_agree(built, way):
    store = built[way]
    keys = all_keys(store)
    assert keys.shape == (store.entry_count, store.width)
    assert torch.equal(torch.cat([block for _, block in store.chunks(37)]), keys)
    assert store.keys.half
    halves = torch.empty(store.entry_count - 5, store.width, dtype=torch.float16)
    store.keys.read(5, halves)
    assert torch.equal(halves, keys[5:].half())
    ids = torch.tensor([[3, -1], [store.entry_count - 1, 0]])
    assert torch.equal(store.take(ids)[1, 0], keys[-1])
    assert not store.take(ids)[0, 1].any()


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("way", FORMATS)
def test_evaluation_is_that_of_brute_force_on_decoded_keys(built, lm, way, metric):
    store = built[way]
    held_out = documents(3, start=70)
    found = Mixture.open(store.path, lm, k=40, knn_temperature=5.0, lmbda=0.4, options=MixtureOptions(metric)).evaluate(
        held_out
    )
    assert found.perplexity == pytest.approx(by_hand(store, lm, held_out, metric), rel=2e-3)


def by_hand(store, lm, held_out, metric):
    keys = all_keys(store).double().numpy()
    values = store.values(torch.arange(store.entry_count)).numpy()
    losses = []
    for reading in lm.read([lm.encode(document.text) for document in held_out], lm.window()):
        log_p = reading.logits.double().log_softmax(1)
        queries = reading.keys
        if metric == "l2":
            queries = store.project(queries)
        elif store.map is not None:
            queries = queries.float() @ store.map.matrix
        for row, query in enumerate(queries.double().numpy()):
            p_knn = oracle.knn_distribution(
                query, keys, values, log_p.shape[1], k=40, knn_temperature=5.0, metric=metric
            )
            target = int(reading.targets[row])
            losses.append(-np.log(oracle.mix(float(log_p[row, target].exp()), p_knn[target], 0.4)))
    return float(np.exp(np.mean(losses)))


@pytest.mark.parametrize("way", ["int8", "codes8"])
def test_generating_explaining_indexing_and_pruning_work(built, lm, way, tmp_path):
    store = built[way]
    assert build_index(store, "IVF4,Flat") == "IVF4,Flat"
    queries = all_keys(store)[::50]
    found = open_index(store).search(queries, 5)
    far = torch.cdist(queries.double(), all_keys(store).double()).square()
    assert torch.allclose(found.distances[:, 0].double(), far.min(1).values, atol=1e-3)
    assert Datastore.open(store.path).index_bytes == sum(file.stat().st_size for file in store.path.glob("index/*/*"))
    build_index(store, "exact")
    assert Datastore.open(store.path).index_bytes == 0
    model = KnnForCausalLM.from_store(store.path, lm)
    start = torch.tensor([[1, 5, 9]])
    assert model.generate(start, max_new_tokens=3, do_sample=False).shape == (1, 6)
    assert Mixture.open(store.path, lm).explain("the quick brown")
    pruned = derive(store, tmp_path / "pruned", keep=torch.arange(0, store.entry_count, 3))
    assert pruned.storage == way
    assert torch.equal(all_keys(pruned), all_keys(store)[::3])
    mapped = derive(store, tmp_path / "mapped", key_map=fit_codec(parse_storage("pca5-int8"), all_keys(store))[0])
    assert (mapped.storage, mapped.width) == ("float16", 5)


@pytest.mark.parametrize("way", ["float32", *FORMATS])
def test_finished_store_is_compressed_into_a_copy(built, lm, way, tmp_path):
    plain = built["float16"]
    copy = compress(plain, tmp_path / "copy", key_format=way)
    assert (copy.storage, copy.entry_count) == (way, plain.entry_count)
    if way == "float32":
        assert torch.equal(all_keys(copy), all_keys(plain))
        return
    key_map, codec = fit_codec(parse_storage(way), all_keys(plain))
    mapped = all_keys(plain) if key_map is None else key_map.apply(all_keys(plain))
    assert torch.allclose(all_keys(copy), codec.decode(codec.encode(mapped), 1.0), atol=1e-4)
    # And once more: the maps come one after the other, and queries go the same way.
    again = compress(copy, tmp_path / "again", key_format="int8")
    states = next(iter(lm.read([lm.encode("the quick brown fox")], lm.window(), logits=False))).keys
    assert torch.allclose(again.project(states), copy.project(states), atol=1e-3)
    # After a map, a step is as fine as one of float16 would be; two roundings are at most a step.
    step = again.codec.step.max()
    assert float((all_keys(again) - all_keys(copy)).abs().max()) <= 1.3 * float(step)


def test_small_text_is_encoded_at_its_end(lm, tmp_path):
    store = build(documents(2), tmp_path / "store", lm=lm, key_format="int8")
    plain = build(documents(2), tmp_path / "plain", lm=lm)
    keys = all_keys(plain)
    assert torch.equal(store.codec.step, fit_bytes(keys).step)
    assert float((all_keys(store) - keys).abs().div(store.codec.step).max()) <= 0.51


def test_store_without_text_has_no_codec_and_opens(lm, tmp_path):
    store = build([], tmp_path / "store", lm=lm, key_format="codes8")
    assert (store.entry_count, store.key_count, store.storage) == (0, 0, "uint8")
    with pytest.raises(ParameterError, match="no keys"):
        compress(store, tmp_path / "copy")


KILLED = """
    import os, sys
    sys.path.insert(0, HERE)
    from helpers.kill import Dying
    from helpers.stores import documents
    from helpers.models import tiny, tiny_tokenizer
    from knnlm import CausalLM, build
    from knnlm.datastore import catalog, encoder, segments

    encoder.CODEC_SAMPLE_KEYS = 400
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny-llama")
    for left in map(int, sys.argv[1:]):
        if os.fork() == 0:
            dying = Dying(left)
            segments.os.fsync = dying(os.fsync)
            encoder.Path.unlink = dying(encoder.Path.unlink)
            catalog.Catalog._put = dying(catalog.Catalog._put)
            build(documents(16), f"killed{left}", lm=lm, key_format="codes4", segment_entries=150)
            os._exit(3)
        assert os.wait()[1] == 9
"""


def test_build_killed_around_its_codec_resumes_and_ends_with_the_same_bytes(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder, "CODEC_SAMPLE_KEYS", 400)
    whole = build(documents(16), tmp_path / "whole", lm=lm, key_format="codes4", segment_entries=150)
    expected = contents(whole.path)
    points = [12, 22, 26, 32, 38, 42, 46, 50, 53, 57, 62]
    script = textwrap.dedent(KILLED).replace("HERE", repr(str(Path(__file__).parent.parent)))
    subprocess.run([sys.executable, "-c", script, *map(str, points)], check=True, cwd=tmp_path)
    stages = set()
    for left in points:
        killed = tmp_path / f"killed{left}"
        stages.add((bool(list(killed.rglob("unencoded.npy"))), (killed / "codec.safetensors").exists()))
        build(documents(16), killed, lm=lm, key_format="codes4", segment_entries=150)
        assert contents(killed) == expected, left
    # Before the codec, between codec and transaction, and behind both.
    assert stages >= {(True, False), (True, True), (False, True)}


def test_unfinished_build_refuses_another_key_format(lm, tmp_path, monkeypatch):
    def failing():
        yield from documents(8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(failing(), tmp_path / "store", lm=lm, key_format="int8", segment_entries=100)
    with pytest.raises(DatastoreError, match="key dtype"):
        build(documents(8), tmp_path / "store", lm=lm, key_format="codes8", segment_entries=100)
    with pytest.raises(DatastoreError, match="another keys"):
        build(documents(8), tmp_path / "store", lm=lm, key_format="pca4-int8", segment_entries=100)
    assert build(documents(8), tmp_path / "store", lm=lm, key_format="int8", segment_entries=100).storage == "int8"


@pytest.mark.parametrize("damage", ["missing", "changed", "kind", "width"])
def test_damaged_codec_is_refused(tmp_path, damage):
    store = compress(random_store(tmp_path / "plain"), tmp_path / "store", key_format="int8")
    file = store.path / "codec.safetensors"
    fact = store.catalog.get("codec")
    store.close()
    if damage == "missing":
        file.unlink()
    elif damage == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    else:
        from knnlm.datastore.catalog import Catalog
        from knnlm.datastore.codecs import save_codec

        other = (
            save_codec(Bytes(torch.zeros(7), torch.ones(7)), file) if damage == "width" else {**fact, "kind": "magic"}
        )
        catalog = Catalog.open(store.path / "catalog.db", write=True)
        catalog.put(codec=other)
        catalog.close()
    with pytest.raises(DatastoreCorrupt, match=r"codec|how its keys are stored"):
        Datastore.open(store.path)


@pytest.mark.parametrize(
    "parameters",
    [
        lambda: Bytes(torch.zeros(3), torch.zeros(3)),
        lambda: Bytes(torch.zeros(3), torch.ones(4)),
        lambda: Bytes(torch.full((3,), torch.nan), torch.ones(3)),
        lambda: Codes(torch.zeros(2, 255, 3)),
        lambda: Codes(torch.full((2, 256, 3), torch.inf)),
    ],
)
def test_invalid_codec_parameters_are_refused(parameters):
    with pytest.raises(ParameterError):
        parameters()


def test_plain_numbers_are_multiplied_by_their_scale():
    stored = torch.tensor([[1.5, -2.0]], dtype=torch.float16)
    assert Plain("float16", 2).decode(stored, 4.0).tolist() == [[6.0, -8.0]]
    single = torch.tensor([[1.5, -2.0]])
    assert Plain("float32", 2).decode(single, 2.0).tolist() == [[3.0, -4.0]]
    assert single.tolist() == [[1.5, -2.0]]


def test_nearest_entries_in_blocks_equal_those_at_once(monkeypatch):
    keys, books = drawn(5, 300, 8), torch.randn(4, 16, 2, generator=torch.Generator().manual_seed(0))
    whole = nearest_entries(keys, books)
    monkeypatch.setattr("knnlm.datastore.codecs._SCORE_BYTES", 16 * 4 * 7)
    assert torch.equal(nearest_entries(keys, books), whole)


def test_compressed_index_is_small_and_finds_most_neighbours(tmp_path):
    pytest.importorskip("faiss")
    from helpers.search_contract import Array
    from knnlm.index.faiss import FaissIndex
    from knnlm.index.rerank import RerankedIndex

    assert compressed_spec(200_000, 576) == "exact"
    assert compressed_spec(1_000_000, 576) == "PCAR80,IVF2048,PQ40x4fsr"
    keys = drawn(2, 20_000, 80, spread=2.0)
    index = FaissIndex.build(Array(keys), "PCAR80,IVF64,PQ40x4fsr")
    index.save(tmp_path / "index")
    assert (tmp_path / "index").stat().st_size / len(keys) < 34  # of which 28 are codes and numbers
    queries = keys[::200] + 0.1
    found = RerankedIndex(index, Array(keys)).search(queries, 100).ids
    true = torch.cdist(queries, keys).topk(100, largest=False).indices
    hits = [len(set(mine.tolist()) & set(theirs.tolist())) for mine, theirs in zip(found, true, strict=True)]
    assert np.mean(hits) > 80


def test_compress_and_info_show_bytes_per_token(built, tmp_path, capfd):
    plain = built["float16"]
    code, out, err = knnlm(capfd, "compress", plain.path, "--out", tmp_path / "c", "--key-format", "codes8", "--json")
    assert code == 0, err
    metadata = json.loads(out)
    assert (metadata["bytes_per_token_before"], metadata["bytes_per_token_after"]) == (68, 12)
    assert metadata["key_format"] == "codes8"
    _, out, _ = knnlm(capfd, "info", tmp_path / "c", "--json")
    metadata = json.loads(out)
    assert (metadata["bytes_per_token"], metadata["index_bytes"], metadata["keys"]["format"]) == (12, 0, "codes8")
    build_index(Datastore.open(tmp_path / "c"), "IVF4,SQ8")
    _, out, _ = knnlm(capfd, "info", tmp_path / "c", "--json")
    metadata = json.loads(out)
    assert metadata["bytes_per_token"] == pytest.approx(12 + metadata["index_bytes"] / metadata["tokens"])
    _, out, _ = knnlm(capfd, "info", tmp_path / "c")
    assert "as codes8" in out
    assert "finished store already" in failure(capfd, "compress", plain.path, "--out", tmp_path / "c")
    assert "codes48" in failure(capfd, "compress", plain.path, "--out", tmp_path / "d", "--key-format", "float8")
