"""Compiled blocks: the same keys, for one shape and one thread, and a model that is as it was afterwards."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from helpers.models import FAMILIES, LAYERS, tiny, tiny_tokenizer
from helpers.stores import contents, documents
from knnlm.datastore.store import Datastore
from knnlm.ingest import pipeline, segment_builder
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.compile import blocks_before, compiled
from knnlm.lm.hooks import hooked
from knnlm.lm.windows import WindowShape

SHAPE = (3, 16)
IDS = torch.arange(48).reshape(SHAPE) * 5 % 300


class Counting:
    """A backend that runs graphs as they are, and counts."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, graph, _):
        self.graphs += 1

        def run(*inputs):
            self.calls += 1
            return graph(*inputs)

        return run


@pytest.fixture(autouse=True)
def _forgotten():
    torch._dynamo.reset()


@torch.inference_mode()
def keys_of(lm: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    return lm.forward(ids, logits=False)[0][0]


def attributes(model: torch.nn.Module) -> list[set[str]]:
    return [set(module.__dict__) for module in model.modules()]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_blocks_before_the_key_are_those_that_run_before_its_block(family):
    model = tiny(family)
    for layer in (0, LAYERS - 1):
        lm = CausalLM(model, tiny_tokenizer(), name=family, layer=layer)
        blocks = blocks_before(model, lm.key_layer)
        assert len(blocks) == layer
        inside, begun = model.get_submodule(lm.key_layer.module), []
        with hooked([*blocks, inside], begin=lambda module, *_, begun=begun: begun.append(module)):
            keys_of(lm, IDS)
        assert begun == [*blocks, inside]
        assert not any(inside is module for block in blocks for module in block.modules())


@pytest.mark.parametrize("place", ["ffn_input", "output_normed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_compiled_blocks_give_the_same_keys_for_one_shape_only(family, place):
    lm = CausalLM(tiny(family), tiny_tokenizer(), name=family, key_layer=place)
    before, (other, shorter) = attributes(lm.model), (IDS[:2], IDS[:, :9])
    right = [keys_of(lm, ids) for ids in (IDS, other, shorter)]
    count = Counting()
    with compiled(lm.model, lm.key_layer, SHAPE, backend=count) as status:
        torch.testing.assert_close(keys_of(lm, IDS), right[0])
        graphs, calls = count.graphs, count.calls
        assert graphs >= 1
        assert calls >= LAYERS - 1
        assert torch.equal(keys_of(lm, other), right[1])
        assert torch.equal(keys_of(lm, shorter), right[2])
        assert (count.graphs, count.calls) == (graphs, calls)
        keys_of(lm, IDS)
        assert (count.graphs, count.calls) == (graphs, 2 * calls)
    assert not status.failed
    assert attributes(lm.model) == before
    assert torch.equal(keys_of(lm, IDS), right[0])
    assert (count.graphs, count.calls) == (graphs, 2 * calls)


def test_model_in_training_mode_is_read_without_dropout_and_stays_in_it():
    lm = CausalLM(tiny("gpt2").train(), tiny_tokenizer(), name="gpt2")
    right = keys_of(lm, IDS)
    with compiled(lm.model, lm.key_layer, SHAPE, backend="aot_eager"):
        torch.testing.assert_close(keys_of(lm, IDS), right)
        torch.testing.assert_close(keys_of(lm, IDS), right)
    assert all(module.training for module in lm.model.modules())


def test_other_threads_and_compiled_blocks_are_unchanged(lm):
    right, count, own = keys_of(lm, IDS), Counting(), Counting()
    block = lm.model.model.layers[0]
    block.compile(backend=own)
    mine = block._compiled_call_impl
    try:
        with compiled(lm.model, lm.key_layer, SHAPE, backend=count):
            assert block._compiled_call_impl is mine
            found = []
            thread = threading.Thread(target=lambda: found.append(keys_of(lm, IDS)))
            thread.start()
            thread.join()
            assert torch.equal(found[0], right)
            assert count.calls == 0
            torch.testing.assert_close(keys_of(lm, IDS), right)
            assert count.calls >= 1
        assert block._compiled_call_impl is mine
    finally:
        del block._compiled_call_impl
    assert own.calls >= 1


def test_failed_compilation_warns_once_and_keys_are_unchanged(lm):
    def failing(*_):
        raise RuntimeError("no C compiler")

    right = keys_of(lm, IDS)
    before = attributes(lm.model)
    with compiled(lm.model, lm.key_layer, SHAPE, backend=failing) as status:
        with pytest.warns(UserWarning, match="cannot be compiled .*no C compiler") as given:
            assert torch.equal(keys_of(lm, IDS), right)
        assert len(given) == 1
        assert status.failed
        assert torch.equal(keys_of(lm, IDS), right)
    assert attributes(lm.model) == before


TEXT = {"segment_entries": 300, "batch_tokens": 64, "window": WindowShape(16, 8)}


@pytest.fixture
def counting(monkeypatch):
    """Builds that compile do it with a backend that counts."""
    count = Counting()
    monkeypatch.setattr(segment_builder, "compiled", functools.partial(compiled, backend=count))
    return count


@pytest.mark.parametrize("devices", [set(), {"cpu"}])
def test_resumed_build_compiles_as_it_began(lm, tmp_path, counting, monkeypatch, devices):
    monkeypatch.setattr(pipeline, "PIPELINED_DEVICES", devices)
    plain = build(documents(12), tmp_path / "plain", lm=lm, **TEXT)
    assert plain.catalog.get("compile") is False  # a CPU is not worth it
    assert counting.calls == 0
    store = build(documents(12), tmp_path / "compiled", lm=lm, compile=True, **TEXT)
    assert store.catalog.get("compile") is True
    everything = torch.arange(store.entry_count)
    torch.testing.assert_close(store.take(everything), plain.take(everything), atol=2e-3, rtol=2e-3)

    def stopping():
        yield from documents(8)
        raise RuntimeError("no more")

    for begun in (True, False):
        path = tmp_path / f"resumed {begun}"
        with pytest.raises(RuntimeError):
            build(stopping(), path, lm=lm, compile=begun, **TEXT)
        calls = counting.calls
        build(documents(12), path, lm=lm, compile=not begun, **TEXT)
        assert (counting.calls > calls) == begun
        assert contents(path) == contents(tmp_path / ("compiled" if begun else "plain"))
    assert "_compiled_call_impl" not in set().union(*attributes(lm.model))


def test_build_that_cannot_compile_continues_and_records_it(lm, tmp_path, monkeypatch):
    def failing(*_):
        raise RuntimeError("no C compiler")

    plain = build(documents(12), tmp_path / "plain", lm=lm, **TEXT)
    monkeypatch.setattr(segment_builder, "compiled", functools.partial(compiled, backend=failing))
    with pytest.warns(UserWarning, match="no C compiler"):
        build(documents(12), tmp_path / "store", lm=lm, compile=True, **TEXT)
    assert contents(tmp_path / "store") == contents(plain.path)
    assert Datastore.open(tmp_path / "store").catalog.get("compile") is False
