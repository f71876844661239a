"""Steps of generation that are replayed: a stand-in for CUDA graphs runs the captured step again on its own tensors.

benchmarks/check_gpu.py does the same with CUDA graphs on a GPU.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace

import pytest
import torch

from helpers.graphs import Replays
from helpers.models import pair_tokenizer, tiny
from helpers.pairs import pair_lm, pairs
from helpers.stores import documents
from knnlm.errors import KnnlmWarning
from knnlm.generation import step_graph
from knnlm.generation.causal import KnnForCausalLM
from knnlm.generation.seq2seq import KnnForSeq2SeqLM
from knnlm.generation.step_graph import MAX_GRAPHS, capturable, step_graphs
from knnlm.index.base import no_neighbours
from knnlm.index.gpu.deferred import check_flag, defer_checks
from knnlm.ingest.build import build
from knnlm.lm.cuda_graph import WARM_RUNS
from knnlm.memories.base import LM_LOGITS, Context, Positions, Span, on_device
from knnlm.memories.voting import VoteParams
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.weights import Buckets, BucketWeights, GatedWeights, equal_weights, multiply_odds

STORED, VALID = pairs(40), pairs(30, start=50)
SOURCES = [each.source_text or "" for each in pairs(5, start=90)]


@pytest.fixture
def replays(monkeypatch):
    made = Replays()
    monkeypatch.setattr(step_graph, "capture_graph", made.capture)
    monkeypatch.setattr(step_graph, "capturable", lambda mixture, _: not mixture.layer.stateful)
    return made


@pytest.fixture(scope="module")
def pair_store(tmp_path_factory):
    lm = pair_lm("marian")
    return lm, build(STORED, tmp_path_factory.mktemp("graph") / "pairs.store", lm=lm).path


@pytest.fixture(scope="module")
def gated(pair_store):
    lm, path = pair_store
    mixture = Mixture.open(path, lm, use_tuned=False)
    mixture.tune(VALID)
    assert isinstance(mixture.weights, GatedWeights)
    return mixture


def generate(mixture, **settings):
    """Tokens, and the log-probabilities of every step."""
    model = KnnForSeq2SeqLM(mixture)
    sources = mixture.lm.pad_sources(mixture.lm.encode_sources(SOURCES))
    given = {"max_new_tokens": 12, "min_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    written = model.generate(**sources, **{**given, **settings})
    return written.sequences, torch.stack(written.logits)


def plain(mixture, monkeypatch, **settings):
    """The same without graphs."""
    with monkeypatch.context() as patch:
        patch.setattr(step_graph, "capturable", lambda *_: False)
        return generate(mixture, **settings)


@pytest.mark.parametrize("beams", [1, 3])
def test_replayed_steps_of_a_gate_are_those_without_a_graph(gated, replays, monkeypatch, beams):
    expected = plain(gated, monkeypatch, num_beams=beams)
    tokens, logits = generate(gated, num_beams=beams)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logits, expected[1])
    assert replays.captured == 1
    assert replays.replayed == 12 - WARM_RUNS


@pytest.mark.parametrize("beams", [1, 3])
def test_replayed_steps_beside_a_second_model_are_those_without_a_graph(
    pair_store, tmp_path, replays, monkeypatch, beams
):
    """The passes of both models are outside of the graph, which reads the logits of both."""
    lm, path = pair_store
    for part in (tiny("marian", seed=1), pair_tokenizer()):
        part.save_pretrained(tmp_path / "decoder")
    mixture = Mixture.open(path, lm, memories=f"knn,decoder={tmp_path / 'decoder'}", use_tuned=False)
    mixture.tune(VALID)
    # `capturable` refuses spans, which this fixture does not see: only positions are given beside the logits.
    monkeypatch.setattr(step_graph, "capturable", lambda _, context: not context.spans)
    assert getattr(mixture.memories[1], "capturable", False)
    expected = plain(mixture, monkeypatch, num_beams=beams)
    tokens, logits = generate(mixture, num_beams=beams)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logits, expected[1])
    assert replays.replayed == 12 - WARM_RUNS


def test_replayed_steps_of_a_decoder_with_one_weight_are_those_without_a_graph(lm, tmp_path, replays, monkeypatch):
    store = build(documents(8), tmp_path / "docs.store", lm=lm)
    mixture = Mixture.open(store, lm, k=9, lmbda=0.6)
    ids = torch.tensor([lm.prompt("the quick brown")])
    model = KnnForCausalLM(mixture)
    replayed = model.generate(ids, max_new_tokens=9, do_sample=False)
    assert replays.replayed == 9 - WARM_RUNS
    monkeypatch.setattr(step_graph, "capturable", lambda *_: False)
    assert torch.equal(replayed, model.generate(ids, max_new_tokens=9, do_sample=False))


def test_other_weights_and_settings_are_captured_again(pair_store, gated, replays, monkeypatch):
    lm, path = pair_store
    mixture = Mixture.open(path, lm, use_tuned=False, k=4, lmbda=0.2)
    generate(mixture)
    for number, change in enumerate(("weights", "settings", "odds", "end"), 2):
        if change == "weights":
            mixture.weights = equal_weights(mixture.memories, 0.9)
        elif change == "settings":
            mixture.knn.settings = (VoteParams(1, 100.0),)
        elif change == "end":
            mixture.end_odds = 1e3
        else:
            mixture.weights = multiply_odds(mixture.weights, 4.0)
        expected = plain(mixture, monkeypatch)
        tokens, logits = generate(mixture)
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(logits, expected[1])
        assert replays.captured == number


def test_sources_outside_the_domain_are_left_to_the_model_in_replayed_steps(gated, replays, monkeypatch):
    model = KnnForSeq2SeqLM(gated)
    outside = torch.tensor([True, False, False, True, False])
    monkeypatch.setattr(KnnForSeq2SeqLM, "_outside_domain", lambda *_, **__: outside)
    sources = gated.lm.pad_sources(gated.lm.encode_sources(SOURCES))
    written = model.generate(**sources, max_new_tokens=9, min_new_tokens=9)
    assert replays.replayed == 9 - WARM_RUNS
    alone = gated.lm.model.generate(**sources, max_new_tokens=9, min_new_tokens=9)
    monkeypatch.undo()
    mixed = model.generate(**sources, max_new_tokens=9, min_new_tokens=9)
    for row, left_out in enumerate(outside.tolist()):
        assert torch.equal(written[row], (alone if left_out else mixed)[row])
    assert not torch.equal(alone[outside], mixed[outside])


def test_step_whose_check_fails_is_computed_without_the_graph(gated, replays, monkeypatch):
    expected = plain(gated, monkeypatch)
    search, fails = gated.knn.index.search, []

    def flagged(queries, k):
        # As an unproven search: wrong neighbours and a flag, unless the flag can be looked at.
        found = search(queries, k)
        deferred = not check_flag(torch.tensor(True))
        fails.append(deferred)
        return replace(found, ids=torch.zeros_like(found.ids)) if deferred else found

    monkeypatch.setattr(gated.knn.index, "search", flagged)
    tokens, logits = generate(gated)
    assert any(fails)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logits, expected[1])


def test_flags_of_a_replayed_step_are_collected_while_checks_are_deferred(gated, replays, monkeypatch):
    search = gated.knn.index.search
    steps = []

    def flagged(queries, k):
        steps.append(None)
        check_flag(torch.tensor(len(steps) == 8))
        return search(queries, k)

    monkeypatch.setattr(gated.knn.index, "search", flagged)
    with defer_checks() as checks:
        generate(gated)
    assert len(steps) > 8
    assert checks.any_failed()


def test_each_shape_has_a_graph_and_their_number_is_limited(gated, replays):
    graphs = step_graphs(gated)
    vocabulary, width = gated.lm.vocab_size, gated.lm.width

    def context(rows):
        states = {gated.knn.source: torch.randn(rows, width), LM_LOGITS: torch.randn(rows, vocabulary)}
        return Context(states, where=Positions(torch.arange(rows), torch.arange(rows)))

    gated.weights = replace(gated.weights)  # forgets the graphs of other tests
    for rows in range(1, MAX_GRAPHS + 3):
        for _ in range(WARM_RUNS + 2):
            given = context(rows)
            expected = gated.predict(given, all_components=False).log_probs()
            torch.testing.assert_close(graphs.predict(given), expected)
    assert replays.captured == MAX_GRAPHS
    assert replays.replayed == 2 * MAX_GRAPHS


def test_failed_capture_is_reported_once_and_generation_goes_on(pair_store, replays, monkeypatch):
    lm, path = pair_store
    mixture = Mixture.open(path, lm, use_tuned=False, k=4, lmbda=0.5)
    expected = plain(mixture, monkeypatch)

    def refuse(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step_graph, "capture_graph", refuse)
    with pytest.warns(KnnlmWarning, match=r"cannot be captured .*not permitted") as found:
        tokens, _ = generate(mixture)
    assert len([each for each in found if each.category is KnnlmWarning]) == 1
    assert torch.equal(tokens, expected[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", KnnlmWarning)
        assert torch.equal(generate(mixture)[0], expected[0])


def test_result_of_a_step_is_not_changed_by_the_next_one(gated, replays):
    graphs = step_graphs(gated)
    states = {gated.knn.source: torch.randn(3, gated.lm.width), LM_LOGITS: torch.randn(3, gated.lm.vocab_size)}
    where = Positions(torch.arange(3), torch.arange(3))
    for _ in range(WARM_RUNS + 1):
        first = graphs.predict(Context(states, where=where))
    kept = first.clone()
    graphs.predict(Context({source: own + 1 for source, own in states.items()}, where=where))
    assert torch.equal(first, kept)


def test_constants_of_a_graph_outlive_the_cache(gated, replays):
    gated.weights = replace(gated.weights)  # forgets the graphs of other tests
    generate(gated)
    (captured,) = step_graphs(gated)._graphs.values()
    kept = [(constant, constant.clone()) for constant in captured.constants]
    device, dtype = torch.device("cpu"), torch.float32
    temperatures = [(setting.knn_temperature,) for setting in gated.knn.settings]

    def cached():
        return any(constant is on_device(own, device, dtype) for constant, _ in kept for own in temperatures)

    assert cached()
    for number in range(300):
        on_device((float(number),), device)
    assert not cached()
    assert all(torch.equal(constant, before) for constant, before in kept)


def test_step_captured_in_inference_mode_is_replayed_outside(gated, replays):
    gated.weights = replace(gated.weights)
    with torch.inference_mode():
        inside = generate(gated)
    assert replays.captured == 1
    outside = generate(gated)
    assert torch.equal(inside[0], outside[0])
    assert torch.equal(inside[1], outside[1])


def test_other_index_is_captured_again(gated, replays, monkeypatch):
    gated.weights = replace(gated.weights)
    generate(gated)
    other = copy(gated.knn.index)
    monkeypatch.setattr(gated.knn, "index", other)
    monkeypatch.setattr(other, "search", lambda queries, k: no_neighbours(len(queries), k, queries.device))
    expected = plain(gated, monkeypatch)
    tokens, logits = generate(gated)
    assert replays.captured == 2
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logits, expected[1])


def test_all_mixtures_together_have_few_graphs_and_one_pool(pair_store, replays, monkeypatch):
    lm, path = pair_store
    monkeypatch.setattr(step_graph, "MAX_ALL_GRAPHS", 2)
    monkeypatch.setattr(step_graph, "_every", type(step_graph._every)())
    mixtures = [Mixture.open(path, lm, use_tuned=False, k=4, lmbda=0.1 * number) for number in range(1, 4)]
    for mixture in mixtures:
        generate(mixture)
    assert [len(step_graphs(mixture)) for mixture in mixtures] == [0, 1, 1]
    assert replays.pools[0] is None
    assert replays.pools[1] is not None
    assert replays.pools[1] is replays.pools[2]


def test_threads_do_not_overwrite_the_inputs_of_each_other(gated, replays):
    graphs = step_graphs(gated)
    where = Positions(torch.arange(3), torch.arange(3))

    def context(seed):
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(3, gated.lm.width, generator=generator)
        return Context(
            {gated.knn.source: keys, LM_LOGITS: torch.randn(3, gated.lm.vocab_size, generator=generator)}, where=where
        )

    expected = [gated.predict(context(seed), all_components=False).log_probs() for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: graphs.predict(context(seed)), range(40)))
    assert replays.replayed > 20
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right)


class OnGpu:
    """What `capturable` reads of logits on a GPU."""

    device = torch.device("cuda", 0)


def test_only_steps_without_decisions_of_the_host_are_captured(gated, monkeypatch):
    states = {LM_LOGITS: OnGpu()}
    assert not capturable(gated, Context({LM_LOGITS: torch.zeros(1, 1)}))  # on a CPU
    assert not gated.knn.capturable  # brute force
    assert not capturable(gated, Context(states))
    monkeypatch.setattr(type(gated.knn), "capturable", True)
    assert capturable(gated, Context(states))
    assert not capturable(gated, Context(states, source_tokens=[(1,)]))
    assert not capturable(gated, Context(states, spans=[Span(torch.tensor([1]), 0)]))
    monkeypatch.setattr(type(gated.weights), "skips_searches", True)
    assert not capturable(gated, Context(states))
    monkeypatch.setattr(gated, "weights", BucketWeights(Buckets(torch.zeros(0), torch.full((2, 2), 0.5)), 0))
    assert not capturable(gated, Context(states))
    monkeypatch.setattr(gated, "weights", equal_weights(gated.memories, 0.5))
    assert capturable(gated, Context(states))
    monkeypatch.setattr(type(gated.layer), "stateful", True)
    assert not capturable(gated, Context(states))
