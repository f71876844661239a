"""N-grams of the stored text: the sorted places, what follows a match, and the files that keep them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.stores import documents
from knnlm.datastore.locks import writer_lock
from knnlm.datastore.store import Datastore
from knnlm.datastore.suffix_array import DEPTH, from_documents, open_suffix_array
from knnlm.errors import DatastoreCorrupt, ParameterError
from knnlm.ingest.build import build
from knnlm.io import checksum
from knnlm.memories import ngram
from knnlm.memories.base import Context, Logits, Span, Votes
from knnlm.memories.ngram import Backoff, NgramMemory
from knnlm.mixture.weights import MixturePrediction

START = 1
VOCABULARY = 80_000
BORDER = -1  # begins a document, in the oracle

# Few different tokens, so that matches are long; some beyond 16 bits; the start token is one of them.
TOKENS = st.sampled_from([0, START, 2, 3, 70_000, 79_999])


@st.composite
def texts(draw):
    """Documents made of few passages, so that some passages and some documents are repeated."""
    passages = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=8), min_size=1, max_size=4))
    chosen = draw(st.lists(st.lists(st.sampled_from(passages), max_size=4), max_size=6))
    return [[token for passage in document for token in passage] for document in chosen]


CONTEXTS = st.lists(st.one_of(TOKENS, st.sampled_from([5, VOCABULARY, 10**9, -1])), max_size=12)


def follow(texts, suffix):
    """What follows each place where a suffix stands, sorted; BORDER stands before every document."""
    found = []
    for document in texts:
        bordered = [BORDER, *document]
        for end in range(1, len(bordered)):
            if end >= len(suffix) and bordered[end - len(suffix) : end] == suffix:
                found.append(bordered[end])
    return sorted(found)


def levels(texts, context, longest):
    """What follows the last 0, 1, … tokens of a context, up to the longest match."""
    read = [BORDER if place == 0 and token == START else token for place, token in enumerate(context)]
    read = [token if place == 0 or token != BORDER else "nowhere" for place, token in enumerate(read)]
    found = []
    for length in range(min(longest, len(read)) + 1):
        found.append(follow(texts, read[len(read) - length :]))
        if not found[-1]:
            return found[:-1]
    return found


def witten_bell(texts, context, *, longest=32, cap=10**9):
    """The smoothed distribution from its formula, and that of the longest match; None where nothing matches."""
    matches = levels(texts, context, longest)
    if len(matches) < 2:
        return None, None
    smoothed = distinct = None
    for length, found in enumerate(matches):
        counts = Counter(found)
        distinct = len(counts) if length < 2 else min(distinct, estimate_distinct(found, cap))
        longest_only = {token: count / len(found) for token, count in counts.items()}
        if smoothed is None:
            smoothed = longest_only
        else:
            smoothed = {
                token: (counts.get(token, 0) + distinct * smoothed.get(token, 0)) / (len(found) + distinct)
                for token in {*counts, *smoothed}
            }
    return smoothed, longest_only


def sample(found, cap):
    """Evenly spaced places of what follows."""
    size = min(len(found), cap)
    return [found[(2 * step + 1) * len(found) // (2 * size)] for step in range(size)]


def estimate_distinct(found, cap):
    """The number of different tokens, as a sample of at most `cap` places tells."""
    taken = sample(found, cap)
    return 1 + (len(set(taken)) - 1) * (len(found) / len(taken)) ** 0.5


def memory_of(texts, **options):
    suffixes = from_documents(texts, vocab_size=VOCABULARY, start_token=START)
    return NgramMemory(suffixes, vocab_size=VOCABULARY, **options)


def context_of(*runs):
    return Context({}, [Span(torch.tensor(tokens, dtype=torch.int64), start) for tokens, start in runs])


def distributions(part):
    """Each row of a prediction, with the tokens that have a probability; {} where it abstains."""
    logs = part.log_probs()
    found = []
    for row, abstains in zip(logs, part.abstains().tolist(), strict=True):
        tokens = row.isfinite().nonzero()[:, 0].tolist()
        found.append({token: float(row[token].exp()) for token in tokens})
        assert abstains == (not tokens)
        assert abstains or sum(found[-1].values()) == pytest.approx(1, abs=1e-5)
    for token in (0, START, 2, 3, 5, 79_999):
        assert torch.allclose(part.log_prob(torch.full((len(logs),), token)), logs[:, token], atol=1e-5)
    return found


def assert_agree(answer, expected):
    """Compare all outputs of a memory with the oracle's (smoothed, longest only)."""
    smoothed, longest = (distributions(part) for part in answer.components)
    assert len(smoothed) == len(expected)
    for row, (by_formula, alone) in enumerate(expected):
        assert smoothed[row] == pytest.approx(by_formula or {}, rel=1e-5, abs=1e-9)
        assert longest[row] == pytest.approx(alone or {}, rel=1e-5, abs=1e-9)
        top, most = int(answer.top()[row]), max((by_formula or {-1: 0}).values())
        assert (by_formula or {-1: 0})[top] == pytest.approx(most, rel=1e-9)
        assert float(answer.features()[row, 4]) == pytest.approx(most, rel=1e-5)


@given(texts())
@example([[0] * 32] * 6)
@example([[0] * 120, [2] + [0] * 120])
def test_positions_are_in_the_order_of_sorted_suffixes(texts):
    found = from_documents(texts, vocab_size=VOCABULARY, start_token=START)
    text = [0]
    for document in texts:
        text += [*(token + 1 for token in document), 0] if document else []
    assert found.text.tolist() == text
    # Three numbers of this vocabulary fit in 64 bits; doubled until there are at least 64, that is 96. Places that are
    # equal so far stay in the order of the text.
    assert found.order.tolist() == sorted(range(len(text)), key=lambda place: (text[place : place + 96], place))


@given(st.integers(1, 6), st.integers(60, 700), st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_long_repetitions_are_sorted_up_to_the_maximum_length(size, length, seed):
    rng = np.random.default_rng(seed)
    passage = rng.integers(0, size, length).tolist()
    texts = [passage, passage[length // 3 :], passage, [0] * length]
    found = from_documents(texts, vocab_size=size, start_token=0)
    text = found.text.tolist()
    assert sorted(found.order.tolist()) == list(range(len(text)))
    suffixes = [text[place : place + DEPTH] for place in found.order]
    assert suffixes == sorted(suffixes)


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 65_535, 65_536, 2**22])
def test_any_size_of_vocabulary_is_sorted(vocab_size):
    rng = np.random.default_rng(0)
    texts = [rng.integers(max(0, vocab_size - 3), vocab_size, 15).tolist() for _ in range(4)]
    found = from_documents(texts, vocab_size=vocab_size, start_token=0)
    text = found.text.tolist()
    assert found.order.tolist() == sorted(range(len(text)), key=lambda place: text[place:])


@given(texts(), st.integers(1, 5))
def test_followers_count_the_different_tokens_after_each_number(texts, extra):
    found = from_documents(texts, vocab_size=VOCABULARY + extra, start_token=START)
    for token in {token for document in texts for token in document}:
        assert found.followers[token + 1] == len(set(follow(texts, [token])))
    assert found.followers[0] == len(set(follow(texts, [BORDER])))
    assert found.distinct == len(set(follow(texts, [])))


@given(texts(), CONTEXTS, st.integers(1, 6))
def test_every_position_is_smoothed_by_the_formula(texts, context, longest):
    tokens = [START, *context]
    answer = memory_of(texts, longest=longest).predict(context_of((tokens, 0)))
    assert_agree(answer, [witten_bell(texts, tokens[: row + 1], longest=longest) for row in range(len(tokens))])


@given(texts(), CONTEXTS, st.integers(1, 5))
def test_cap_changes_only_how_different_tokens_are_counted(texts, context, cap):
    tokens = [START, *context]
    answer = memory_of(texts, cap=cap).predict(context_of((tokens, 0)))
    assert_agree(answer, [witten_bell(texts, tokens[: row + 1], cap=cap) for row in range(len(tokens))])


def distance(one, other):
    """The total variation between two distributions."""
    return sum(abs(one.get(token, 0) - other.get(token, 0)) for token in {*one, *other}) / 2


@given(st.lists(st.integers(0, 60), min_size=1, max_size=300), st.integers(1, 20))
@settings(max_examples=50)
def test_error_above_the_cap_is_bounded_by_the_weights(followers, cap):
    texts = [[30, 31, token] for token in followers] + [[32, 31, 2]]
    tokens = [2, 30, 31]
    answer = memory_of(texts, cap=cap).predict(context_of((tokens, 2)))
    [smoothed], [longest] = (distributions(part) for part in answer.components)
    right, alone = witten_bell(texts, tokens)
    # Only "30 31" has a T that is estimated. With T, the weight of shorter matches is T / (n + T).
    found = follow(texts, [30, 31])
    sizes = min(len(set(follow(texts, [31]))), estimate_distinct(found, cap)), len(set(found))
    estimated, exact = (size / (len(found) + size) for size in sizes)
    assert distance(smoothed, right) <= abs(estimated - exact) + 1e-6
    assert longest == pytest.approx(alone)
    if len(found) <= cap:
        assert smoothed == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_natural_text_above_the_cap_is_within_a_hundredth_of_the_formula(seed):
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, 3001)
    texts = rng.choice(3000, p=share / share.sum(), size=(30, 300)) + 100
    texts = [[number for token in text.tolist() for number in (50, 51, token)] for text in texts]
    tokens = [2, 50, 51]
    right, _ = witten_bell(texts, tokens)
    for cap, most in ((256, 0.01), (10**9, 1e-5)):
        [smoothed] = distributions(memory_of(texts, cap=cap).predict(context_of((tokens, 2))).components[0])
        assert distance(smoothed, right) < most


@given(st.lists(st.integers(0, 20), min_size=1, max_size=400), st.integers(1, 50))
def test_features_of_a_capped_match_come_from_an_even_sample(followers, cap):
    texts = [[30, token] for token in followers]
    answer = memory_of(texts, cap=cap).predict(context_of(([2, 30], 1)))
    length, count, distinct, agreement = answer.features()[0, :4].tolist()
    assert (length, count) == (1, pytest.approx(np.log1p(len(followers))))
    assert distinct == pytest.approx(np.log1p(len(set(followers))))
    shares = Counter(sample(sorted(followers), cap))
    assert agreement == pytest.approx(max(shares.values()) / shares.total())
    # It is right to within one place of the sample, and what is asked for is exact.
    most = max(Counter(followers).values()) / len(followers)
    assert abs(agreement - most) <= 1 / cap + 1e-6
    assert distributions(answer.components[1])[0] == pytest.approx(
        {token: count / len(followers) for token, count in Counter(followers).items()}
    )


def test_match_of_a_hand_worked_case():
    # After "2 3" come 0 and 4; after "3" come 0, 4 and 4; of seven tokens, 3 and 4 are three and two.
    texts = [[2, 3, 0], [2, 3, 4], [3, 4]]
    assert follow(texts, []) == [0, 2, 2, 3, 3, 3, 4, 4]
    answer = memory_of(texts).predict(context_of(([9, 2, 3], 2)))
    zero, four = 1 / 8, 2 / 8
    zero, four, rest = (1 + 2 * zero) / 5, (2 + 2 * four) / 5, 2 / 5
    zero, four, rest = (1 + 2 * zero) / 4, (1 + 2 * four) / 4, rest * 2 / 4
    expected = {0: zero, 4: four, 2: rest * 2 / 8, 3: rest * 3 / 8}
    assert distributions(answer.components[0])[0] == pytest.approx(expected, rel=1e-6)
    assert distributions(answer.components[1])[0] == pytest.approx({0: 0.5, 4: 0.5})
    assert answer.top().tolist() == [4]
    entropy = -sum(p * np.log(p) for p in expected.values())
    assert answer.features()[0].tolist() == pytest.approx([2, np.log(3), np.log(3), 0.5, four, entropy], rel=1e-5)


def test_document_begins_where_a_text_begins():
    answer = memory_of([[5, 6, 7], [8, 5, 6, 9]]).predict(context_of(([START, 5, 6], 0)))
    assert answer.features()[:, 0].tolist() == [1, 2, 3]
    assert distributions(answer.components[1])[0] == pytest.approx({5: 0.5, 8: 0.5})
    assert distributions(answer.components[1])[2] == pytest.approx({7: 1.0})


def test_matches_do_not_cross_document_boundaries():
    answer = memory_of([[5, 6], [7, 8], [6]]).predict(context_of(([2, 5, 6, 7, 8], 0)))
    # "6" ends a document twice and is followed by nothing; "6 7" is nowhere.
    assert answer.features()[:, 0].tolist() == [0, 1, 0, 1, 0]
    assert answer.top().tolist() == [-1, 6, -1, 8, -1]


def test_empty_store_and_empty_context_abstain():
    answer = memory_of([]).predict(context_of(([START, 2], 0)))
    assert answer.components[0].abstains().tolist() == [True, True]
    assert answer.components[0].log_prob(torch.tensor([0, 1])).tolist() == [-np.inf] * 2
    assert answer.top().tolist() == [-1, -1]
    assert answer.features().tolist() == [[0.0] * 6] * 2
    for nothing in (Context({}), context_of(([START, 2], 2))):
        answer = memory_of([[2]]).predict(nothing)
        assert answer.components[0].log_prob(torch.zeros(0, dtype=torch.int64)).shape == (0,)
        assert answer.features().shape == (0, 6)
        assert answer.top().shape == (0,)


@given(texts(), st.lists(st.tuples(CONTEXTS, st.integers(0, 12)), min_size=1, max_size=4), st.integers(1, 8))
@settings(max_examples=30)
def test_batched_spans_match_single_spans_and_single_tokens(texts, drawn, longest):
    memory = memory_of(texts, longest=longest)
    runs = [([START, *context], min(start, len(context))) for context, start in drawn]
    together = memory.predict(context_of(*runs))
    said = [distributions(part) for part in together.components]
    row = 0
    for tokens, start in runs:
        for position in range(start, len(tokens)):
            single = memory.predict(context_of((tokens[: position + 1], position)))
            for one, all_ in zip(single.components, said, strict=True):
                assert distributions(one)[0] == pytest.approx(all_[row], rel=1e-6)
            assert torch.allclose(single.features()[0], together.features()[row], atol=1e-6)
            assert single.top()[0] == together.top()[row]
            row += 1
    assert row == len(together.features())


def witten_bell_rows(texts, tokens, vocabulary, **options):
    """The (N, V) probabilities of both components by the formula, 0 where nothing matches."""
    both = np.zeros((2, len(tokens), vocabulary))
    for row in range(len(tokens)):
        for dense, found in zip(both, witten_bell(texts, tokens[: row + 1], **options), strict=True):
            for token, probability in (found or {}).items():
                dense[row, token] = probability
    return both


SMALL = st.lists(st.lists(st.integers(0, 6), max_size=12), max_size=6)


@given(SMALL, st.lists(st.integers(0, 7), max_size=12), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_sparse_addition_equals_the_dense_formula(texts, context, longest, cap, seed):
    tokens, rng = [START, *context], np.random.default_rng(seed)
    memory = NgramMemory(from_documents(texts, vocab_size=7, start_token=START), vocab_size=7, longest=longest, cap=cap)
    answer = memory.predict(context_of((tokens, 0)))
    before, weights = rng.random((len(tokens), 7), np.float32), rng.random((2, len(tokens)), np.float32)
    added = torch.from_numpy(before.copy())
    for component, own in zip(answer.components, weights, strict=True):
        assert component.add_to(added, torch.from_numpy(own)) is added  # in place
    expected = before + (witten_bell_rows(texts, tokens, 7, longest=longest, cap=cap) * weights[..., None]).sum(0)
    np.testing.assert_allclose(added.numpy(), expected, rtol=1e-6, atol=1e-7)


@given(SMALL, st.lists(st.integers(0, 6), max_size=8), st.integers(0, 2**32 - 1))
def test_mixture_adds_ngrams_without_their_dense_predictions(texts, context, seed):
    tokens, rng = [START, *context], np.random.default_rng(seed)
    memory = NgramMemory(from_documents(texts, vocab_size=7, start_token=START), vocab_size=7)
    logits = torch.from_numpy(rng.normal(size=(len(tokens), 7)))
    values = torch.from_numpy(rng.integers(0, 7, (len(tokens), 3)))
    votes = Votes(values, torch.from_numpy(rng.normal(size=values.shape).astype(np.float32)).log_softmax(1), 7)
    components = [Logits(logits), *memory.predict(context_of((tokens, 0))).components, votes]
    weights = torch.from_numpy(rng.dirichlet([1.0] * 4, len(tokens)))
    each = np.stack([component.log_probs().exp().double().numpy() for component in components], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backoff, "log_probs", lambda _: pytest.fail("a dense prediction was made"))
        mixed = MixturePrediction(components, weights).log_probs()
    np.testing.assert_allclose(mixed.exp().numpy(), (weights.numpy()[..., None] * each).sum(1), rtol=1e-5)


@given(texts(), CONTEXTS, st.integers(1, 6))
def test_continued_matches_are_those_of_the_whole_context(texts, context, longest):
    suffixes = from_documents(texts, vocab_size=VOCABULARY, start_token=START)
    numbers = suffixes.encode(np.array([START, *context]), begins=True)
    expected_low, expected_high = suffixes.match(numbers, longest)
    low, high = suffixes.match(numbers[:1], longest)
    for place, number in enumerate(numbers.tolist()):
        if place:
            low, high = suffixes.continue_match(low, high, np.array([number]))
        found = (expected_low[place] < expected_high[place]).tolist()
        assert (low[0] < high[0]).tolist() == found
        assert low[0][found].tolist() == expected_low[place][found].tolist()
        assert high[0][found].tolist() == expected_high[place][found].tolist()


@given(texts(), st.lists(CONTEXTS, min_size=1, max_size=3), st.integers(1, 6), st.integers(1, 3), st.integers(0, 20))
@settings(max_examples=50)
def test_generation_equals_predictions_by_a_new_memory(texts, contexts, longest, cap, kept):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "_MAX_KEPT", kept)
        memory, searches = memory_of(texts, longest=longest, cap=cap), []
        patch.setattr(memory.suffixes.__class__, "match", _recorded(memory.suffixes.__class__.match, searches))
        for step in range(1, max(map(len, contexts)) + 2):
            runs = [([START, *context][:step], step - 1) for context in contexts if len(context) + 1 >= step]
            searches.clear()
            found = memory.predict(context_of(*runs))
            assert len(searches) == (step == 1)  # later steps continue the matches of the step before
            expected = memory_of(texts, longest=longest, cap=cap).predict(context_of(*runs))
            for one, other in zip(found.components, expected.components, strict=True):
                assert torch.equal(one.log_probs(), other.log_probs())
            assert torch.equal(found.features(), expected.features())


def _recorded(function, calls):
    def call(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return call


def test_more_positions_than_one_block_match_the_oracle():
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 6, 60).tolist() for _ in range(8)]
    tokens = [START, *rng.integers(0, 7, 2500).tolist()]
    answer = NgramMemory(from_documents(texts, vocab_size=7, start_token=START), vocab_size=7, cap=10**6).predict(
        context_of((tokens, 0))
    )
    dense, features, top = answer.components[0].log_probs().exp(), answer.features(), answer.top()
    alone = answer.components[1].log_probs().exp()
    for row in (0, 1, 500, 1023, 1024, 1025, 2047, 2048, 2500, *range(7, 2500, 97)):
        smoothed, longest = witten_bell(texts, tokens[: row + 1])
        found = levels(texts, tokens[: row + 1], 32)
        if smoothed is None:
            assert features[row].tolist() == [0] * 6
            assert top[row] == -1
            continue
        assert dense[row].tolist() == pytest.approx([smoothed.get(token, 0) for token in range(7)], rel=1e-5)
        assert alone[row].tolist() == pytest.approx([longest.get(token, 0) for token in range(7)], rel=1e-5)
        entropy = -sum(p * np.log(p) for p in smoothed.values() if p)
        expected = [len(found) - 1, np.log1p(len(found[-1])), np.log1p(len(set(found[-1])))]
        expected += [max(longest.values()), max(smoothed.values()), entropy]
        assert features[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert smoothed[int(top[row])] == pytest.approx(max(smoothed.values()), rel=1e-9)


def test_top_is_the_lowest_of_equally_probable_tokens():
    answer = memory_of([[30, token] for token in (9, 4, 7)], cap=1).predict(context_of(([2, 30], 1)))
    assert answer.top().tolist() == [4]


def test_settings_out_of_range_are_refused():
    for options in ({"longest": 0}, {"longest": DEPTH}, {"cap": 0}):
        with pytest.raises(ParameterError):
            memory_of([[2]], **options)
    with pytest.raises(ParameterError):
        from_documents([[VOCABULARY]], vocab_size=VOCABULARY, start_token=START)
    with pytest.raises(ParameterError):
        from_documents([[-1]], vocab_size=VOCABULARY, start_token=START)


@pytest.fixture
def own(store, tmp_path):
    """A store that a test may write to."""
    shutil.copytree(store.path, tmp_path / "docs.store", ignore=shutil.ignore_patterns("ngram"))
    opened = Datastore.open(tmp_path / "docs.store")
    yield opened
    opened.close()


def told():
    """A progress that remembers what it was told."""
    bars = []

    @contextmanager
    def progress(what, *, total=None, unit="tokens"):
        bar = {"what": what, "total": total, "done": 0}
        bars.append(bar)
        yield lambda count: bar.update(done=bar["done"] + count)

    return bars, progress


def assert_same(one, other):
    for name in ("text", "order", "followers", "first"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert (one.vocab_size, one.start_token) == (other.vocab_size, other.start_token)


def stored_texts(store):
    """The tokens of each document, read row by row."""
    return [
        store.values(torch.arange(document.first_entry, document.first_entry + document.entries)).tolist()
        for document in store.catalog.documents()
    ]


def test_store_is_sorted_once_and_the_suffix_array_is_saved(own):
    bars, progress = told()
    first = open_suffix_array(own, progress=progress)
    again = open_suffix_array(own, progress=progress)
    assert [bar["what"] for bar in bars] == ["sorting n-grams"]
    assert bars[0]["done"] == bars[0]["total"] == own.entry_count + own.catalog.document_count() + 1
    assert first.kept
    assert again.kept
    model = own.model
    made = from_documents(stored_texts(own), vocab_size=model["vocab_size"], start_token=model["start_token"])
    assert_same(first, made)
    assert_same(again, made)
    assert sorted(entry.name for entry in (own.path / "ngram").iterdir()) == [
        "followers.npy",
        "metadata.json",
        "order.npy",
        "text.npy",
    ]
    assert not (own.path / "ngram.partial").exists()


def test_store_predicts_what_its_documents_contain(own):
    texts = stored_texts(own)
    start = own.model["start_token"]
    memory = NgramMemory.open(own, cap=10**6)
    tokens = [start, *texts[3][:12], *texts[5][4:20]]
    answer = memory.predict(context_of((tokens, 0)))
    smoothed = answer.components[0].log_probs().exp()
    for row in range(len(tokens)):
        expected, _ = witten_bell(texts, [START, *tokens[1 : row + 1]])
        assert smoothed[row].tolist() == pytest.approx([expected.get(t, 0) for t in range(smoothed.shape[1])], rel=1e-5)


def test_files_of_another_store_are_rebuilt(own, lm, tmp_path):
    other = build(documents(7, start=60), tmp_path / "other", lm=lm)
    open_suffix_array(other)
    shutil.copytree(other.path / "ngram", own.path / "ngram")
    bars, progress = told()
    found = open_suffix_array(own, progress=progress)
    assert [bar["what"] for bar in bars] == ["sorting n-grams again, as the store has changed"]
    model = own.model
    assert_same(
        found, from_documents(stored_texts(own), vocab_size=model["vocab_size"], start_token=model["start_token"])
    )
    assert open_suffix_array(own).kept


def test_store_without_documents_is_opened(lm, tmp_path):
    empty = build([], tmp_path / "empty", lm=lm)
    for _ in range(2):
        answer = NgramMemory.open(empty).predict(context_of(([START, 2], 0)))
        assert answer.components[0].abstains().all()


def test_suffix_array_that_cannot_be_written_stays_in_ram(own):
    with writer_lock(own.path):
        busy = open_suffix_array(own)
    assert not busy.kept
    assert not (own.path / "ngram").exists()
    (own.path / "writer.lock").unlink(missing_ok=True)
    (own.path / "writer.lock").mkdir()  # not writable, not even by root
    refused = open_suffix_array(own)
    assert not refused.kept
    (own.path / "writer.lock").rmdir()
    kept = open_suffix_array(own)
    assert kept.kept
    assert_same(busy, kept)
    assert_same(refused, kept)


def test_leftovers_of_a_killed_writer_are_replaced(own):
    (own.path / "ngram.partial").mkdir()
    (own.path / "ngram.partial" / "text.npy").write_bytes(b"half")
    assert open_suffix_array(own).kept
    assert not (own.path / "ngram.partial").exists()


@pytest.mark.parametrize("name", ["text", "order", "followers"])
def test_truncated_or_changed_file_is_corrupt(own, name):
    open_suffix_array(own)
    file = own.path / "ngram" / f"{name}.npy"
    whole = file.read_bytes()
    for damaged in (whole[:-4], whole + b"\0\0\0\0", whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:], b"", b"x" * 9):
        file.write_bytes(damaged)
        with pytest.raises(DatastoreCorrupt, match="ngram"):
            open_suffix_array(own)
    file.unlink()
    with pytest.raises(DatastoreCorrupt, match="ngram"):
        open_suffix_array(own)
    file.write_bytes(whole)
    assert open_suffix_array(own).kept


@pytest.mark.parametrize(("name", "number"), [("order", -1), ("order", None), ("text", -7), ("text", 10**6)])
def test_numbers_out_of_range_are_corrupt_even_with_a_valid_checksum(own, name, number):
    found = open_suffix_array(own)
    file = own.path / "ngram" / f"{name}.npy"
    array = np.array(getattr(found, name))
    array[5] = len(array) if number is None else number
    np.save(file, array)
    rewrite(own, **{f"{name}_sha256": checksum(file)})
    with pytest.raises(DatastoreCorrupt, match=f"{name}.npy contains numbers"):
        open_suffix_array(own)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_any_text_and_order_within_range_is_predicted(seed):
    rng = np.random.default_rng(seed)
    sound = from_documents([rng.integers(0, 5, 30).tolist() for _ in range(3)], vocab_size=6, start_token=1)
    broken = type(sound)(
        rng.integers(0, 7, len(sound.text), dtype=np.int32),
        rng.integers(0, len(sound.text), len(sound.text), dtype=np.int32),
        rng.integers(0, 9, 8, dtype=np.int32),
        sound.first,
        6,
        1,
    )
    answer = NgramMemory(broken, vocab_size=6).predict(context_of(([1, *rng.integers(0, 6, 40).tolist()], 0)))
    assert answer.components[0].log_probs().shape == (41, 6)
    assert answer.features().isfinite().all()


def rewrite(store, **metadata):
    """Change the contents of metadata.json."""
    file = store.path / "ngram" / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **metadata}))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '"x"', "\udcff", "[" * 100_000])
def test_unreadable_metadata_is_corrupt(own, text):
    open_suffix_array(own)
    (own.path / "ngram" / "metadata.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DatastoreCorrupt, match="Remove it"):
        open_suffix_array(own)


@pytest.mark.parametrize("size", [None, "9", -1, 0, 10**12, 1.5, True])
def test_impossible_size_is_corrupt(own, size):
    open_suffix_array(own)
    rewrite(own, size=size)
    with pytest.raises(DatastoreCorrupt, match="positions"):
        open_suffix_array(own)
