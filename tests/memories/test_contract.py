"""One contract for every memory: a distribution or an abstention, whatever else is being read at the same time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import knnlm
from helpers import oracle
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.lm.causal import CausalLM
from knnlm.memories.base import Context, Source, Span
from knnlm.memories.cache import CacheMemory
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.readers import Readers
from knnlm.training.output_matrix import train_output

KINDS = ["knn", "cache", "ngram", "ngram-cache", "decoder", "output", "knn of another reader", "knn and cache together"]


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """Another model with the same tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("second") / "model"
    torch.manual_seed(5)
    model = tiny("gpt2")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def other_store(second, tmp_path_factory):
    """A memory that the other model reads."""
    lm = CausalLM.open(str(second), device="cpu")
    return knnlm.build(documents(12, start=90), tmp_path_factory.mktemp("other") / "docs.store", lm=lm)


@pytest.fixture(scope="module")
def output_folder(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled") / "output"
    train_output(store, folder)
    return folder


@pytest.fixture(params=KINDS)
def mixture(request, lm, store, second, other_store, output_folder):
    """A mixture of the language model with one memory, or two."""
    memories = {
        "decoder": f"decoder={second}",
        "output": f"output={output_folder}",
        "knn of another reader": f"knn={other_store.path}",
        "knn and cache together": "knn,cache",
    }.get(request.param, request.param)
    return Mixture.open(store.path, lm, memories=memories, use_tuned=False)


def texts(lm, count=3, words=25, start=70):
    return [lm.encode(document.text) for document in documents(count, words=words, start=start)]


def predictions(mixture, context):
    """Log-probabilities (N, V) of every component of every memory, and the features of every output."""
    answers = [memory.predict(context) for memory in mixture.memories]
    return [part.log_probs() for answer in answers for part in answer.components], answers


def split(context):
    """The context of each position alone, as generation would see it."""
    for rows, run in context.each_span():
        for step in range(len(run)):
            row = rows.start + step
            seen = {source: keys[row : row + 1] for source, keys in context.states.items()}
            past = {
                source: torch.cat([run.past.get(source, keys[:0]), keys[rows.start : row]])
                for source, keys in context.states.items()
            }
            yield row, Context(seen, [Span(run.tokens[: run.start + step + 1], run.start + step, past)])


def test_every_row_is_a_distribution_or_an_abstention(mixture, lm):
    for batch in mixture.read(texts(lm)):
        dense, answers = predictions(mixture, batch.context)
        parts = [part for answer in answers for part in answer.components]
        for part, log_p in zip(parts, dense, strict=True):
            totals = log_p.exp().sum(1)
            silent = part.abstains()
            torch.testing.assert_close(totals[~silent], torch.ones(int((~silent).sum())), rtol=1e-4, atol=1e-4)
            assert (log_p[silent] == -torch.inf).all()
            targets = batch.targets
            expected = log_p.gather(1, targets[:, None])[:, 0]
            torch.testing.assert_close(part.log_prob(targets), expected, rtol=1e-3, atol=1e-3)
        for memory, answer in zip(mixture.memories, answers, strict=True):
            features = answer.features()
            assert features.shape == (len(batch.rows), len(memory.feature_names))
            assert features.isfinite().all()
            assert len(answer.components) == len(memory.component_names)
            silent = answer.components[0].abstains()
            assert (answer.top()[silent] == -1).all()
            assert (answer.top()[~silent] >= 0).all()


def test_all_positions_at_once_equal_token_by_token(mixture, lm):
    for batch in mixture.read(texts(lm, count=2)):
        dense, answers = predictions(mixture, batch.context)
        features = [answer.features() for answer in answers]
        for row, alone in split(batch.context):
            parts, own = predictions(mixture, alone)
            for whole, part in zip(dense, parts, strict=True):
                torch.testing.assert_close(part[0].exp(), whole[row].exp(), rtol=1e-3, atol=1e-4)
            for memory, whole, answer in zip(mixture.memories, features, own, strict=True):
                # Equally near neighbours are taken in any order, so the 16th or 64th may be another one.
                slack = torch.tensor([0.1 if "distinct" in name else 1e-2 for name in memory.feature_names])
                assert ((answer.features()[0] - whole[row]).abs() <= slack + 1e-3 * whole[row].abs()).all()


def test_texts_in_one_batch_do_not_affect_each_other(mixture, lm):
    first, second = texts(lm, count=2)
    together = {}
    for batch in mixture.read([first, second]):
        dense, _ = predictions(mixture, batch.context)
        together |= {int(row): [part[number] for part in dense] for number, row in enumerate(batch.rows)}
    for tokens, offset in ((first, 0), (second, len(first))):
        for batch in mixture.read([tokens]):
            dense, _ = predictions(mixture, batch.context)
            for number, row in enumerate(batch.rows.tolist()):
                for part, whole in zip(dense, together[row + offset], strict=True):
                    torch.testing.assert_close(part[number].exp(), whole.exp(), rtol=1e-3, atol=1e-4)


def test_forks_of_a_text_share_their_prefix_and_do_not_affect_each_other(mixture, lm):
    """Two continuations of one text, asked in one context with the very same tensors of their past."""
    tokens = texts(lm, count=1)[0][:20]
    forks = [[*tokens, 20, 21, 22], [*tokens, 30, 20, 31]]
    contexts = []
    for fork in forks:
        (batch,) = mixture.read([[*fork, 0]])  # one more target, so that the last token is read
        contexts.append(batch.context)
    start = len(tokens) + 1
    past = {source: keys[:start].clone() for source, keys in contexts[0].states.items()}
    kept = {source: keys.clone() for source, keys in past.items()}
    runs = [Span(context.spans[0].tokens, start, past) for context in contexts]
    seen = {source: torch.cat([context.states[source][start:] for context in contexts]) for source in past}
    together, _ = predictions(mixture, Context(seen, runs))
    for number, context in enumerate(contexts):
        rows = slice(number * 3, number * 3 + 3)
        own = {source: keys[start:] for source, keys in context.states.items()}
        alone, _ = predictions(mixture, Context(own, [runs[number]]))
        for one, both in zip(alone, together, strict=True):
            torch.testing.assert_close(both[rows].exp(), one.exp(), rtol=1e-4, atol=1e-5)
    for source, keys in past.items():
        assert torch.equal(keys, kept[source])  # the shared prefix was not written to


@pytest.mark.parametrize("kind", ["knn", "cache"])
def test_features_of_neighbours_match_their_names(lm, store, kind):
    mixture = Mixture.open(store.path, lm, memories=kind, k=100, knn_temperature=1.5, use_tuned=False)
    (memory,) = mixture.memories
    (batch,) = mixture.read(texts(lm, count=1))
    poll = memory.predict(batch.context)
    features = dict(zip(memory.feature_names, poll.features().T.numpy(), strict=True))
    top = poll.top().tolist()
    for row, (ids, distances, values) in enumerate(
        zip(poll.neighbours.ids.numpy(), poll.neighbours.distances.numpy(), poll.neighbours.values.numpy(), strict=True)
    ):
        there = ids >= 0
        if not there.any():
            assert top[row] == -1
            assert all(feature[row] == 0 for feature in features.values())
            continue
        near, named = distances[there], values[there]
        votes = np.bincount(named, oracle.softmax(-near / 1.5), minlength=lm.vocab_size)
        positive = votes[votes > 0]
        expected = {
            "distance 1": np.arcsinh(near[0]),
            "distance 8": np.arcsinh(near[min(8, len(near)) - 1]),
            "distance 64": np.arcsinh(near[min(64, len(near)) - 1]),
            "last distance": np.arcsinh(near[-1]),
            "distinct 16": np.log1p(len(set(named[:16]))),
            "distinct 64": np.log1p(len(set(named[:64]))),
            "distinct": np.log1p(len(set(named))),
            "entropy": -(positive * np.log(positive)).sum(),
            "largest vote": np.log(votes.max()),
        }
        for name, value in expected.items():
            assert features[name][row] == pytest.approx(value, rel=1e-3, abs=1e-3), name
        loud = np.bincount(named[:64], oracle.softmax(-near / 1.5)[:64], minlength=lm.vocab_size)
        assert loud[top[row]] == pytest.approx(loud.max(), rel=1e-4)


def test_cache_continues_across_windows_of_a_long_text(lm):
    tokens = [token for text in texts(lm, count=4) for token in text]
    source = Source(0, lm.key_layer.place, lm.key_layer.layer)
    cache = CacheMemory(vocab_size=lm.vocab_size, window=40, k=7, knn_temperature=0.5, source=source)
    shape = knnlm.WindowShape(32, 16)
    keys, _ = oracle.read_token_by_token(
        lm.model,
        lm.model.get_submodule(lm.key_layer.module),
        tokens,
        start_token=lm.start_token,
        context=32,
        stride=16,
    )
    assert len(tokens) > 100
    for batch in Readers(lm).read([tokens], shape, {source: 40}, batch_tokens=64):
        dense = cache.predict(batch.context).components[0].log_probs().exp().numpy()
        for number, row in enumerate(batch.rows.tolist()):
            begin = max(0, row - 40)
            expected = oracle.knn_distribution(
                keys[row], keys[begin:row], tokens[begin:row], lm.vocab_size, k=7, knn_temperature=0.5
            )
            if expected is None:
                assert dense[number].sum() == 0
            else:
                np.testing.assert_allclose(dense[number], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_cache_votes_with_earlier_positions_of_the_text(lm, metric):
    tokens = texts(lm, count=1, words=40)[0]
    (batch,) = Readers(lm).read([tokens], lm.window(), {Source(): 100}, batch_tokens=4096)
    cache = CacheMemory(vocab_size=lm.vocab_size, window=100, k=16, knn_temperature=0.7, metric=metric)
    keys = batch.context.states[Source()].numpy()
    dense = cache.predict(batch.context).components[0].log_probs().exp().numpy()
    for row in range(1, len(tokens)):
        expected = oracle.knn_distribution(
            keys[row],
            keys[max(0, row - 100) : row],
            tokens[max(0, row - 100) : row],
            lm.vocab_size,
            k=16,
            knn_temperature=0.7,
            metric=metric,
        )
        np.testing.assert_allclose(dense[row], expected, rtol=1e-3, atol=1e-4)


def test_decoder_predicts_as_the_model_alone_does(lm, store, second):
    mixture = Mixture.open(store.path, lm, memories=f"decoder={second}", use_tuned=False)
    alone = CausalLM.open(str(second), device="cpu")
    for tokens in texts(lm):
        (batch,) = mixture.read([tokens])
        said = mixture.memories[0].predict(batch.context).components[0].log_probs()
        with torch.no_grad():
            logits = alone.model(torch.tensor([[lm.start_token, *tokens[:-1]]])).logits[0]
        torch.testing.assert_close(said, logits.log_softmax(1), rtol=1e-4, atol=1e-4)


def test_language_model_may_be_its_own_decoder(lm, model_folder, tmp_path):
    own = CausalLM.open(str(model_folder), device="cpu")
    store = knnlm.build(documents(4), tmp_path / "docs.store", lm=own)
    mixture = Mixture.open(store.path, own, memories=f"decoder={model_folder}:0.5", use_tuned=False)
    assert len(mixture.readers.models) == 1
    measured = mixture.evaluate(documents(2, start=70))
    assert measured.perplexity == pytest.approx(measured.base_perplexity, rel=1e-5)
    ids = torch.tensor([own.prompt("The memory of a model")])
    with torch.no_grad():
        torch.testing.assert_close(knnlm.KnnForCausalLM(mixture)(ids).logits, own.model(ids).logits.log_softmax(-1))


def test_store_of_another_reader_is_searched_with_that_readers_keys(lm, store, other_store, second):
    mixture = Mixture.open(
        store.path, lm, memories=f"knn={other_store.path}", k=5, knn_temperature=1.0, use_tuned=False
    )
    reader = CausalLM.open(str(second), device="cpu")
    stored = torch.cat([keys for _, keys in other_store.chunks(1000)]).numpy()
    values = other_store.values(torch.arange(other_store.entry_count)).numpy()
    tokens = texts(lm, count=1)[0]
    (batch,) = mixture.read([tokens])
    (memory,) = mixture.memories
    keys, _ = reader.forward(torch.tensor([[lm.start_token, *tokens[:-1]]]))
    dense = memory.predict(batch.context).components[0].log_probs().exp().numpy()
    for row in range(len(tokens)):
        # Documents share their first key, so that ties are broken arbitrarily there.
        if row:
            expected = oracle.knn_distribution(
                keys[0][0, row].detach().numpy(),
                stored,
                values,
                lm.vocab_size,
                k=memory.k,
                knn_temperature=memory.knn_temperature,
            )
            np.testing.assert_allclose(dense[row], expected, rtol=2e-2, atol=2e-3)
    assert len(mixture.readers.models) == 2


def test_stores_with_one_reader_share_its_pass(lm, store, other_store, second, tmp_path):
    reader = CausalLM.open(str(second), device="cpu")
    third = knnlm.build(documents(5, start=200), tmp_path / "docs.store", lm=reader)
    mixture = Mixture.open(store.path, lm, memories=f"knn,knn={other_store.path},knn={third.path}", use_tuned=False)
    assert len(mixture.readers.models) == 2
    passes = []
    hook = mixture.readers.models[1].model.register_forward_pre_hook(lambda *_: passes.append(1))
    list(mixture.read(texts(lm, count=1)))
    hook.remove()
    assert len(passes) == 1
