"""The odds of memories: multiplied by hand, and chosen by the BLEU of translations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.pairs import pair_lm, pairs
from knnlm.errors import CorpusError, DatastoreCorrupt, ParameterError
from knnlm.evaluation import odds
from knnlm.evaluation.odds import (
    END_FACTORS,
    FACTORS,
    ChosenOdds,
    OddsFigures,
    OddsSearch,
    best_choice,
    best_factor,
    is_past_best,
    lines,
    walk,
)
from knnlm.evaluation.quality import score_translations
from knnlm.evaluation.sweep import Grid
from knnlm.evaluation.tune import FEW_KS, sweep_all
from knnlm.generation.seq2seq import KnnForSeq2SeqLM
from knnlm.ingest.build import build
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.saved import load_end_odds
from knnlm.mixture.weights import Buckets, BucketWeights, FixedWeights, multiply_odds

VALID = pairs(12, start=60)


@pytest.fixture(scope="module")
def lm():
    return pair_lm("marian")


@pytest.fixture(scope="module")
def path(lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("odds") / "pairs.store"
    build(pairs(24), folder, lm=lm).close()
    return folder


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=4), st.floats(0.1, 20))
def test_odds_of_fixed_weights_are_multiplied(values, factor):
    before = [value / sum(values) for value in values]
    after = multiply_odds(FixedWeights(tuple(before)), factor).values
    assert sum(after) == pytest.approx(1)
    for one, other in zip(before[1:], after[1:], strict=True):
        assert other / after[0] == pytest.approx(factor * one / before[0])


def test_odds_of_buckets_are_multiplied():
    table = torch.tensor([[0.5, 0.5], [0.9, 0.1], [1.0, 0.0]], dtype=torch.float64)
    weights = multiply_odds(BucketWeights(Buckets(torch.tensor([2.0], dtype=torch.float64), table), 0), 3)
    found = weights.compute(torch.tensor([[1.0], [3.0], [torch.inf]]), torch.zeros(3, 2, dtype=torch.bool))
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.75], [0.75, 0.25], [1.0, 0.0]]))


def test_odds_of_each_network_of_a_gate_are_multiplied(lm, path):
    mixture = Mixture.open(path, lm, memories="knn", use_tuned=False)
    weights = mixture.tune(VALID).weights
    nets = weights.gate.nets.each(lambda tensor: tensor[:1])
    single = replace(weights, gate=replace(weights.gate, nets=nets, starts=weights.gate.starts[:1], trust=1.0))
    features = torch.randn(5, len(weights.gate.feature_names))
    abstains = torch.zeros(5, weights.gate.starts.shape[1], dtype=torch.bool)
    before, after = (each.gate.weights(features, abstains) for each in (single, multiply_odds(single, 4)))
    torch.testing.assert_close(after[:, 1:] / after[:, :1], 4 * before[:, 1:] / before[:, :1])
    for gate in (weights.gate, weights.cheap):  # the weights that are the same everywhere
        plain = replace(weights, gate=replace(gate, trust=0.0), cheap=gate)
        moved = multiply_odds(plain, 4)
        before, after = (each.gate.fitted for each in (plain, moved))
        torch.testing.assert_close(after[1:] * before[0], 4 * before[1:] * after[0])
        assert torch.equal(moved.cheap.fitted, moved.gate.fitted)


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_odds_are_multiplied_by_a_positive_number_only(factor):
    with pytest.raises(ParameterError, match="above 0"):
        multiply_odds(FixedWeights((0.5, 0.5)), factor)


def figures(*rows):
    return [OddsFigures(factor, bleu, 0.0, other) for factor, bleu, other in rows]


def test_best_factor_keeps_text_of_another_domain():
    assert best_factor(figures((0, 1, None), (1, 5, None), (2, 7, None), (4, 6, None))) == 2
    assert best_factor(figures((0, 1, 40), (1, 5, 40.1), (2, 7, 39.6), (4, 8, 39))) == 1
    assert best_factor(figures((0, 1, 40), (1, 5, 39.8), (2, 7, 39.8))) == 2
    assert best_factor(figures((0, 1, 40), (1, 5, 30), (2, 7, 20))) == 1
    assert best_factor(figures((0, 1, 40), (1, 7, 30), (2, 5, 39))) == 2  # none keeps it: the smallest loss


def test_larger_factors_end_after_two_losses_or_with_other_text():
    assert not is_past_best(figures((0, 9, None), (1, 7, None)))
    assert not is_past_best(figures((0, 9, None), (1, 7, None), (2, 6, None)))
    assert is_past_best(figures((0, 9, None), (1, 7, None), (2, 6, None), (4, 5, None)))
    assert not is_past_best(figures((0, 9, None), (1, 7, None), (2, 6, None), (4, 6.5, None)))
    assert is_past_best(figures((0, 9, 40), (1, 10, 39.6)))
    assert not is_past_best(figures((0, 9, 40), (1, 10, 39.8)))


def choose(search, mixture):
    """The odds of the weights and settings that a mixture has."""
    return search.choose([memory.settings for memory in mixture.memories], mixture.weights)


def test_figures_equal_translations_with_the_multiplied_weights(lm, path, monkeypatch):
    monkeypatch.setattr(odds, "_NEW_TOKENS", 60)  # random weights do not end a translation
    mixture = Mixture.open(path, lm, memories="knn", lmbda=0.2, k=4, knn_temperature=10.0)
    other = pairs(5, start=90)
    chosen = choose(OddsSearch(mixture, VALID, other=other), mixture)
    assert mixture.lmbda == pytest.approx(0.2)
    assert [own.factor for own in chosen.figures[:2]] == [0, 1]
    for own in chosen.figures:
        lmbda = own.factor * 0.2 / (0.8 + own.factor * 0.2)
        single = Mixture.open(path, lm, memories="knn", lmbda=lmbda, k=4, knn_temperature=10.0)
        for documents, found in ((VALID, own.bleu), (other, own.other_bleu)):
            texts = single.translate([pair.source_text for pair in documents], max_new_tokens=60)
            assert found == pytest.approx(score_translations(texts, [pair.text for pair in documents]).bleu)
    assert chosen.factor == best_factor(chosen.figures)


def test_other_sources_outside_the_domain_are_translated_once(lm, path, monkeypatch):
    """The figures equal translations of all sources, in which the memories are used for those inside only."""
    monkeypatch.setattr(odds, "_NEW_TOKENS", 60)
    mixture = Mixture.open(path, lm, memories="knn", lmbda=0.2, k=4, knn_temperature=10.0)
    other = pairs(6, start=90)
    inside = torch.tensor([False, True, False, False, True, False])
    tokens = [tuple(row) for row in lm.encode_sources([pair.source_text for pair in other])]

    class Domain:
        def in_domain(self, _, rows):
            return torch.tensor([tuple(row) not in tokens or bool(inside[tokens.index(tuple(row))]) for row in rows])

    mixture.source_domain = Domain()
    translated = []
    translate = mixture.translate
    monkeypatch.setattr(
        mixture, "translate", lambda sources, **how: (translated.extend(sources), translate(sources, **how))[1]
    )
    chosen = choose(OddsSearch(mixture, VALID, other=other), mixture)
    for pair, is_inside in zip(other, inside.tolist(), strict=True):
        assert translated.count(pair.source_text) == (len(chosen.figures) if is_inside else 1)
    for own in chosen.figures[1:]:
        lmbda = own.factor * 0.2 / (0.8 + own.factor * 0.2)
        whole = Mixture.open(path, lm, memories="knn", lmbda=lmbda, k=4, knn_temperature=10.0)
        whole.source_domain = Domain()
        texts = whole.translate([pair.source_text for pair in other], max_new_tokens=60, batch_size=6)
        assert own.other_bleu == pytest.approx(score_translations(texts, [pair.text for pair in other]).bleu)


def test_figures_of_the_model_alone_are_not_computed_again(lm, path, monkeypatch):
    monkeypatch.setattr(odds, "_NEW_TOKENS", 60)
    mixture = Mixture.open(path, lm, memories="knn", lmbda=0.2, k=4, knn_temperature=10.0)
    search = OddsSearch(mixture, VALID)
    alone, translate = [], odds._translate
    monkeypatch.setattr(
        odds, "_translate", lambda *args, **how: (alone.append(how.get("use_memory", True)), translate(*args, **how))[1]
    )
    chosen = choose(search, mixture)
    assert alone.count(False) == 2  # of the pairs, and of no others
    assert choose(search, mixture) == chosen
    assert alone.count(False) == 2
    assert {figures.max_k for figures in chosen.figures[1:]} == {4}
    assert chosen.alone.max_k is None


def test_best_choice_has_the_best_bleu_of_those_that_keep_other_text():
    def chosen(*rows):
        return ChosenOdds(FixedWeights((0.5, 0.5)), best_factor(figures(*rows)), tuple(figures(*rows)))

    small, large = chosen((0, 1, 40), (1, 5, 40)), chosen((0, 1, 40), (1, 7, 39))
    assert best_choice([small, large]) == 0
    assert best_choice([chosen((0, 1, 40), (1, 5, 38)), large]) == 1
    assert best_choice([chosen((0, 1, 40), (1, 9, 35)), large]) == 1  # not the best BLEU
    assert best_choice([chosen((0, 1, None), (1, 5, None)), chosen((0, 1, None), (1, 4, None), (2, 6, None))]) == 1


def test_tuning_by_quality_is_saved_with_its_figures(lm, path):
    """The last third is translated; settings and weights are those of a tuning on the rest, with these odds."""
    result = Mixture.open(path, lm, memories="knn", use_tuned=False).tune(VALID, weights="fixed", quality=6)
    chosen = result.odds
    few = chosen.best.max_k <= 16
    grid = {"ks": FEW_KS} if few else {}
    fitted = Mixture.open(path, lm, memories="knn", use_tuned=False).tune(VALID[:8], weights="fixed", **grid)
    odds = result.lmbda / (1 - result.lmbda)
    assert odds == pytest.approx(result.odds.factor * fitted.lmbda / (1 - fitted.lmbda))
    assert result.specs[0].settings == fitted.specs[0].settings
    texts = Mixture.open(path, lm, memories="knn", lmbda=result.lmbda, **vars_of(result)).translate(
        [pair.source_text for pair in VALID[8:]]
    )
    assert chosen.best.bleu == pytest.approx(score_translations(texts, [pair.text for pair in VALID[8:]]).bleu)
    again = Mixture.open(path, lm, memories="knn", use_tuned=False).tune(VALID, weights="fixed", quality=6)
    assert Mixture.open(path, lm).lmbda == pytest.approx(again.lmbda)


def test_odds_of_the_end_are_changed_while_bleu_rises(lm, path, monkeypatch):
    """On a made-up surface of BLEU: the search ends where no place beside has a better one that keeps other text."""
    mixture = Mixture.open(path, lm, memories="knn", lmbda=0.2, k=4, knn_temperature=10.0)
    search, settings, fitted = OddsSearch(mixture, VALID), [memory.settings for memory in mixture.memories], None
    translated = []

    def bleu(factor, end):
        # Without a change of the end, larger factors are worse; the best place of all is (4, 1/8).
        place = END_FACTORS.index(end)
        return 5 - 0.4 * abs(FACTORS.index(factor) - min(2, place)) - abs(place - 3)

    def figures_of(weights, factor, end, _):
        assert weights is fitted
        translated.append((factor, end))
        return OddsFigures(factor, bleu(factor, end), 0.0, 40.0 if end > 0.1 else 39.0, None, end)

    monkeypatch.setattr(search, "_translate", figures_of)
    monkeypatch.setattr(search, "_translate_alone", lambda _: OddsFigures(0.0, 1.0, 0.0, 40.0))
    fitted = mixture.weights
    first = search.choose(settings, fitted)
    assert (first.factor, first.end_odds) == (1.0, 1.0)
    chosen = search.choose_end(settings, fitted, first)
    assert (chosen.factor, chosen.end_odds, chosen.best.bleu) == (4.0, 0.125, 5)
    assert chosen.weights == multiply_odds(fitted, 4)
    assert len(set(translated)) == len(translated)
    assert {(own.factor, own.end_odds) for own in chosen.figures[1:]} == set(translated)
    again = OddsSearch(mixture, VALID)  # which has not chosen anything before
    monkeypatch.setattr(again, "_translate", figures_of)
    monkeypatch.setattr(again, "_translate_alone", lambda _: OddsFigures(0.0, 1.0, 0.0, 40.0))
    others = tuple(replace(figures, max_k=1024, bleu=9.0) for figures in first.figures[1:])
    both = replace(first, figures=(*first.figures, *others))  # of other settings
    assert again.choose_end(settings, fitted, both).best == chosen.best


def test_odds_that_keep_other_text_come_before_a_better_bleu(lm, path, monkeypatch):
    mixture = Mixture.open(path, lm, memories="knn", lmbda=0.2, k=4, knn_temperature=10.0)
    search, settings = OddsSearch(mixture, VALID), [memory.settings for memory in mixture.memories]

    def figures_of(_, factor, end, __):
        return OddsFigures(factor, 5.0 - factor - (end < 1), 0.0, 39.7 if end == 0.5 else 39.6, None, end)

    monkeypatch.setattr(search, "_translate", figures_of)
    monkeypatch.setattr(search, "_translate_alone", lambda _: OddsFigures(0.0, 1.0, 0.0, 40.0))
    first = search.choose(settings, mixture.weights)
    assert (first.factor, first.end_odds) == (1.0, 1.0)
    chosen = search.choose_end(settings, mixture.weights, first)
    assert (chosen.factor, chosen.end_odds) == (1.0, 0.5)
    monkeypatch.setattr(odds, "MAX_LOSS", -1.0)  # nothing keeps other text: the better BLEU remains
    assert search.choose_end(settings, mixture.weights, first).best == first.best


def test_lines_lead_away_from_a_pair_of_factors():
    assert lines(4.0, 0.25) == [
        [(4.0, 0.125), (4.0, 0.0625)],
        [(4.0, 0.5), (4.0, 1.0)],
        [(8.0, 0.25), (16.0, 0.25)],
        [(2.0, 0.25), (1.0, 0.25)],
    ]
    assert [len(line) for line in lines(1.0, 0.0625)] == [0, 4, 4, 0]


@pytest.mark.parametrize(
    ("line", "found", "read"),
    [((), 5, 0), ((4, 6, 5), 6, 3), ((4, 4, 9), 5, 2), ((6, 4, 7, 4, 3, 9), 7, 5), ((5, 5), 5, 2)],
)
def test_line_ends_after_two_that_are_not_better(line, found, read):
    walked = []
    figures = (walked.append(bleu) or OddsFigures(1.0, bleu, 0.0) for bleu in line)
    assert walk(OddsFigures(1.0, 5, 0.0), figures, lambda own: own.bleu).bleu == found
    assert len(walked) == read


def two_stores(lm, path, folder, **settings):
    """A mixture of the memories of two stores."""
    build(pairs(18, start=30), folder, lm=lm).close()
    return Mixture.open(path, lm, memories=f"knn,ngram,knn={folder}", **settings)


def test_few_neighbours_are_tried_for_every_store(lm, path, tmp_path):
    mixture = two_stores(lm, path, tmp_path / "other.store", use_tuned=False)
    trace = mixture.record(VALID, tmp_path / "trace")
    for sweeps in (sweep_all(trace, ks=FEW_KS), sweep_all(trace, grid=Grid.of(lambdas=[0.5]), ks=FEW_KS)):
        assert [own and tuple(own.ks) for own in sweeps] == [FEW_KS, None, FEW_KS]
    own, _, other = sweep_all(trace, grid=Grid.of(ks=[2]), ks=FEW_KS)
    assert (tuple(own.ks), tuple(other.ks)) == ((2,), FEW_KS)  # what was asked for stays


def test_figures_equal_translations_with_other_odds_of_the_end(lm, path, monkeypatch):
    """Greedy translation by hand: the mixture's probabilities, with those of the end divided, step by step."""
    monkeypatch.setattr(odds, "_NEW_TOKENS", 12)
    mixture = Mixture.open(path, lm, memories="knn", lmbda=0.6, k=4, knn_temperature=10.0)
    search = OddsSearch(mixture, VALID[:4])
    own = search._translate(mixture.weights, 2.0, 0.125, lambda _: None)
    assert mixture.end_odds == 1.0
    by_hand = Mixture.open(path, lm, memories="knn", lmbda=1.2 / 1.6, k=4, knn_temperature=10.0)
    model = KnnForSeq2SeqLM(by_hand)
    texts = []
    for pair in VALID[:4]:
        source = lm.pad_sources(lm.encode_sources([pair.source_text]))
        target = [*lm.start_tokens]
        while len(target) <= 12 and target[-1] != lm.end_tokens[-1]:
            ids = torch.tensor([target])
            with torch.no_grad():
                probs = model(**source, decoder_input_ids=ids).logits[0, -1].double().exp()
            probs[lm.end_tokens[-1]] *= 0.125
            for (banned,) in lm.model.generation_config.bad_words_ids or []:
                probs[banned] = 0
            target.append(int(probs.argmax()))
        texts.append(lm.tokenizer.decode(target[1:], skip_special_tokens=True).strip())
    assert own.bleu == pytest.approx(score_translations(texts, [pair.text for pair in VALID[:4]]).bleu)
    assert own.end_odds == 0.125


def test_odds_of_the_end_are_tuned_saved_and_loaded(lm, path, monkeypatch):
    monkeypatch.setattr(odds, "best_factor", lambda figures: figures[-1].factor)
    mixture = Mixture.open(path, lm, memories="knn", use_tuned=False)
    chosen = []

    def choose_end(_, __, weights, first):
        chosen.append(weights)
        return replace(first, end_odds=0.25)

    monkeypatch.setattr(OddsSearch, "choose_end", choose_end)
    monkeypatch.setattr(ChosenOdds, "best", property(lambda own: own.figures[1]))
    result = mixture.tune(VALID, quality=4, samples=0)
    assert result.end_odds == mixture.end_odds == Mixture.open(path, lm).end_odds == 0.25
    assert len(chosen) == 1
    assert result.odds.as_dict()["end_odds"] == 0.25
    assert Mixture.open(path, lm, lmbda=0.3).end_odds == 1.0  # as in the paper
    mixture.lmbda = 0.3
    assert mixture.end_odds == 1.0
    for weights, expected in (("fixed", 1.0), ("fitted", 0.25), ("buckets", 0.25)):
        other = Mixture.open(path, lm, memories="knn", use_tuned=False)
        assert other.tune(VALID, quality=4, weights=weights).end_odds == other.end_odds == expected
    other.set_weights(FixedWeights((1.0, 0.0)), [memory.settings[:1] for memory in other.memories])
    assert other.end_odds == 1.0


@pytest.mark.parametrize("stored", [0, -1.0, "1", True, float("inf")])
def test_corrupt_odds_of_the_end_are_refused(stored, tmp_path):
    assert load_end_odds({}, tmp_path) == 1.0  # weights that were tuned before there were any
    for found in (stored, [stored], [0.5]):
        with pytest.raises(DatastoreCorrupt, match=r"odds of the end token are .*Tune the store again"):
            load_end_odds({"end_odds": found}, tmp_path)


def vars_of(result):
    """The k and τ of a tuning with one setting."""
    ((setting,),) = (spec.settings for spec in result.specs)
    return {"k": setting.k, "knn_temperature": setting.knn_temperature}


def test_few_neighbours_are_tried_beside_many(lm, path):
    mixture = Mixture.open(path, lm, memories="knn", use_tuned=False)
    result = mixture.tune(VALID, quality=4, samples=0)
    chosen = result.odds
    tried = {own.max_k for own in chosen.figures[1:]}
    assert len(tried) == 2
    assert min(tried) <= 16 < max(tried)
    assert result.odds.as_dict()["max_k"] == max(setting.k for setting in result.specs[0].settings)
    assert chosen.best.bleu == max(own.bleu for own in chosen.figures[1:])
    given = Mixture.open(path, lm, memories="knn", use_tuned=False).tune(VALID, quality=4, samples=0, ks=[32])
    assert {own.max_k for own in given.odds.figures[1:]} == {32}


def test_held_out_pairs_are_at_most_a_third(lm, path):
    mixture = Mixture.open(path, lm, memories="knn", use_tuned=False)
    assert mixture.tune(VALID, weights="fixed", quality=100).documents == 8
    assert mixture.tune(VALID, weights="fixed", quality=2).documents == 10
    with pytest.raises(CorpusError, match="at least 3"):
        mixture.tune(VALID[:2], weights="fixed", quality=1)


def test_quality_without_translations_is_refused(lm, path):
    mixture = Mixture.open(path, lm, memories="knn", use_tuned=False)
    with pytest.raises(ParameterError, match="at least 0, not -1"):
        mixture.tune(VALID, quality=-1)
    with pytest.raises(CorpusError, match="no pairs"):
        OddsSearch(mixture, [])
