"""The Memory Decoder: its loss by the formula, its training to the end and through a kill, and what comes of it."""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from helpers import oracle
from helpers.decoders import PlainTraining, equal, losses
from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from helpers.training import fit_decoder, retrieve_targets
from knnlm.cli import output as screen
from knnlm.errors import DatastoreError, MissingExtra, ModelError, ModelMismatch, ParameterError
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.fingerprint import tokenizer_fingerprint
from knnlm.lm.windows import WindowShape
from knnlm.lm.windows import windows as cut
from knnlm.memories.decoder import CARD, load_card, save_card, set_lambda
from knnlm.memories.output import load_tensors
from knnlm.progress import note, silent
from knnlm.training import decoder, decoder_trainer, trainer
from knnlm.training.data import TokenStream, TrainingBatches, count_targets
from knnlm.training.initial_model import first_and_last, keep_layers, open_initial_model
from knnlm.training.teacher import RetrievalTeacher, TeacherConfig
from knnlm.training.trainer import CHECKPOINT, Schedule, distillation_loss, read_curve

QUICK = {"epochs": 2, "batch_tokens": 512, "learning_rate": 1e-3, "context": 64, "device": "cpu"}


@pytest.fixture(scope="module")
def small(lm, tmp_path_factory):
    """A store of ten short documents, with its targets."""
    folder = tmp_path_factory.mktemp("small")
    store = build(documents(10, words=20), folder / "docs.store", lm=lm)
    return store, retrieve_targets(store, folder / "targets", k=32, knn_temperature=20.0, device="cpu")


# ----------------------------------------------------------------------------------------------------------- loss


def formula(logits, targets, ids, probs, beta):
    """The mean loss, KL and CE in NumPy, position by position."""
    total = kl_sum = ce_sum = 0.0
    counted = answered = 0
    for row, target in enumerate(targets):
        if target < 0:
            continue
        counted += 1
        q = oracle.softmax(logits[row])
        ce = -math.log(q[target])
        p = np.zeros(len(q))
        np.add.at(p, ids[row], probs[row])
        ce_sum += ce
        if p.sum() > 0:
            kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
            kl_sum, answered, total = kl_sum + kl, answered + 1, total + beta * kl + (1 - beta) * ce
        else:
            total += ce
    return total / max(1, counted), kl_sum, ce_sum, answered


def random_case(seed, *, rows=7, words=11, width=4):
    """Logits, targets, and sparse probabilities of which some rows have none; some rows do not count."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, words)) * 3
    targets = np.where(random.random(rows) < 0.2, -1, random.integers(words, size=rows))
    ids = np.stack([random.choice(words, width, replace=False) for _ in range(rows)])
    probs = random.dirichlet(np.ones(width), size=rows) * (random.random((rows, 1)) < 0.7)
    return [torch.from_numpy(np.asarray(part)) for part in (logits, targets, ids, probs)]


@given(seed=st.integers(0, 10**6), beta=st.floats(0, 1), rows=st.integers(1, 9))
def test_loss_matches_the_formula_for_any_number_of_rows_at_a_time(seed, beta, rows):
    logits, targets, ids, probs = random_case(seed)
    right = formula(*(part.numpy() for part in (logits, targets, ids, probs)), beta)
    found = distillation_loss(logits, targets, ids, probs, beta=beta, rows=rows)
    if beta == 0:
        right = (right[2] / max(1, int((targets >= 0).sum())), 0, right[2], 0)
    np.testing.assert_allclose([float(part) for part in found], right, rtol=1e-9, atol=1e-9)
    whole, part = (logits.clone().requires_grad_() for _ in range(2))
    distillation_loss(whole, targets, ids, probs, beta=beta).total.backward()
    distillation_loss(part, targets, ids, probs, beta=beta, rows=rows).total.backward()
    torch.testing.assert_close(whole.grad, part.grad)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_matches_finite_differences(beta, seed):
    logits, targets, ids, probs = random_case(seed, rows=5)

    def loss(scores):
        return distillation_loss(scores, targets, ids, probs, beta=beta, rows=2).total * 3

    assert torch.autograd.gradcheck(loss, (logits.requires_grad_(),))
    # And, worked out again without any of torch's checks, at one logit of each row.
    loss(logits).backward()
    for row in range(5):
        moved = [logits.detach().clone() for _ in range(2)]
        moved[0][row, row] += 1e-5
        moved[1][row, row] -= 1e-5
        up, down = (formula(m.numpy(), targets.numpy(), ids.numpy(), probs.numpy(), beta)[0] for m in moved)
        assert float(logits.grad[row, row]) == pytest.approx(3 * (up - down) / 2e-5, abs=1e-6)


def test_half_precision_logits_get_the_gradient_of_their_values():
    logits, targets, ids, probs = random_case(1)
    half = logits.bfloat16().requires_grad_()
    exact = logits.bfloat16().double().requires_grad_()
    one, other = (distillation_loss(part, targets, ids, probs, beta=0.5) for part in (half, exact))
    assert one.total.item() == pytest.approx(other.total.item(), rel=1e-5)
    one.total.backward()
    other.total.backward()
    torch.testing.assert_close(half.grad.double(), exact.grad, rtol=1e-2, atol=1e-4)


def test_without_targets_the_loss_is_the_cross_entropy_and_parts_sum_to_the_whole():
    logits, targets, ids, probs = random_case(5)
    right = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1)
    torch.testing.assert_close(distillation_loss(logits, targets).total, right)
    torch.testing.assert_close(distillation_loss(logits, targets, ids, probs, beta=0.0).total, right)
    torch.testing.assert_close(distillation_loss(logits, targets, ids, probs * 0, beta=0.9).total, right)
    whole = distillation_loss(logits, targets, ids, probs, beta=0.4)
    count = int((targets >= 0).sum())
    parts = [
        distillation_loss(logits[s], targets[s], ids[s], probs[s], beta=0.4, positions=count)
        for s in (slice(3), slice(3, 7))
    ]
    torch.testing.assert_close(parts[0].total + parts[1].total, whole.total)


# ----------------------------------------------------------------------------------------------------------- text


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    context=st.integers(1, 16),
    part=st.floats(0.1, 1),
    batch_tokens=st.integers(1, 100),
    epoch=st.integers(0, 3),
    held_out=st.sampled_from([0.0, 0.3]),
)
def test_every_token_is_a_target_once_within_its_own_document(sizes, context, part, batch_tokens, epoch, held_out):
    if not sum(sizes):
        return
    random = np.random.default_rng(0)
    texts = [random.integers(2, 99, size).tolist() for size in sizes]
    text = TokenStream.from_documents(texts)
    stride = max(1, int(context * part))
    try:
        batches = TrainingBatches(text, WindowShape(context, stride), start_token=1, held_out=held_out, seed=3)
    except ParameterError:
        assert held_out  # nothing is left
        return
    first = np.cumsum([0, *sizes])
    steps = batches.steps(epoch, batch_tokens)
    assert all(steps)
    groups = [group for step in steps for group in step]
    assert sum(map(count_targets, groups)) == batches.tokens
    rows = []
    for windows in [*groups, *batches.held_out_groups(batch_tokens)]:
        batch = batches.read(windows)
        assert len(windows) == 1 or batch.ids.numel() <= batch_tokens / 2
        assert batch.ids.shape[1] <= context
        counted = batch.targets.view(batch.ids.shape) >= 0
        assert int(counted.sum()) == count_targets(windows)
        for ids, targets, found in zip(
            batch.ids.tolist(), batch.targets.view(batch.ids.shape).tolist(),
            batch.positions.view(batch.ids.shape).tolist(), strict=True,
        ):  # fmt: skip
            for place, row in enumerate(found):
                if row < 0:
                    assert targets[place] == -1
                    continue
                number = int(np.searchsorted(first, row, side="right")) - 1
                local = row - first[number]
                assert targets[place] == texts[number][local]
                seen = [1, *texts[number][:local]]
                assert ids[: place + 1] == seen[len(seen) - place - 1 :]
                # With a stride, positions after the first window have at least the promised context.
                assert place >= min(local, context - stride)
                rows.append(row)
    assert sorted(rows) == list(range(sum(sizes)))


def test_long_documents_are_cut_at_different_places_in_each_epoch():
    sizes = [64, 20, 21, 5, 300]
    batches = TrainingBatches(
        TokenStream.from_documents([[7] * n for n in sizes]), WindowShape(20, 20), start_token=1, held_out=0, seed=4
    )
    starts = np.cumsum([0, *sizes])
    for epoch in range(5):
        right = []
        for number, size in enumerate(sizes):
            first = np.random.default_rng([4, epoch, number]).integers(1, 21) if size > 20 else size
            borders = [0, *range(first, size, 20), size]
            right += [(starts[number], a, a, b) for a, b in itertools.pairwise(borders)]
        assert sorted(map(tuple, batches.windows(epoch).tolist())) == sorted(right)
    assert len({tuple(map(tuple, batches.windows(epoch).tolist())) for epoch in range(5)}) == 5


@pytest.mark.parametrize("stride", [10, 4])
def test_held_out_windows_are_the_same_in_every_epoch(stride):
    book = list(range(1000))
    batches = TrainingBatches(
        TokenStream.from_documents([book]), WindowShape(10, stride), start_token=1, held_out=0.1, seed=0
    )
    plain = [(0, one.begin, one.scored, one.end) for one in cut(book, WindowShape(10, stride), start_token=1)]
    held = set(map(tuple, batches.held_out.tolist()))
    assert held < set(plain)
    left = {row for _, _, scored, end in held for row in range(scored, end)}
    cuts = set()
    for epoch in range(3):
        windows = batches.windows(epoch)
        rows = batches.read(windows).positions
        assert sorted([*rows[rows >= 0].tolist(), *left]) == book
        cuts.add(tuple(map(tuple, windows.tolist())))
    assert len(cuts) == 3


def test_order_depends_on_the_seed_and_the_epoch():
    text = TokenStream.from_documents([[n] * (5 + n % 7) for n in range(60)])

    def order(seed, epoch):
        batches = TrainingBatches(text, WindowShape(8, 8), start_token=1, held_out=0.0, seed=seed)
        return [[group.tolist() for group in step] for step in batches.steps(epoch, 32)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) != order(1, 1)


@pytest.mark.parametrize(("batch_tokens", "least", "parts"), [(2048, 0.5, 2), (4096, 0.5, 2), (8192, 0.7, 4)])
def test_step_has_documents_of_several_lengths_and_none_is_a_remainder(batch_tokens, least, parts):
    random = np.random.default_rng(0)
    lengths = random.integers(10, 500, size=900)
    batches = TrainingBatches(
        TokenStream.from_documents([[7] * n for n in lengths]),
        WindowShape(512, 512),
        start_token=1,
        held_out=0.0,
        seed=0,
    )
    mixed, neighbours = 0, []
    for epoch in range(2):
        steps = batches.steps(epoch, batch_tokens)
        assert len(steps) == round(lengths.sum() / batch_tokens)
        for step in steps:
            sizes = [group[:, 3] - group[:, 1] for group in step]
            assert least <= sum(size.sum() for size in sizes) / batch_tokens <= 2 - least
            assert all(len(size) * size.max() <= batch_tokens // parts for size in sizes)  # what is read at once
            assert len(step) >= parts - 1
            mixed += np.ptp(np.concatenate(sizes)) > 100
        assert mixed > 0.75 * (epoch + 1) * len(steps)
        neighbours.append({frozenset(group[:, 0].tolist()) for step in steps for group in step})
    assert len(neighbours[0] & neighbours[1]) < 0.5 * len(neighbours[0])
    # A little more than one step is one step, and not one and a crumb.
    short = TrainingBatches(
        TokenStream.from_documents([[7] * 64] * 40), WindowShape(64, 64), start_token=1, held_out=0.0, seed=0
    )
    assert [sum(map(count_targets, step)) for step in short.steps(0, 2048)] == [2560]


def test_held_out_are_whole_documents_with_their_copies_or_windows_of_a_book():
    texts = [[n, n + 1, n + 2, n + 3, n + 4] for n in range(0, 200, 5)] + [[0, 1, 2, 3, 4]] * 2
    text = TokenStream.from_documents(texts)
    for seed in range(20):
        batches = TrainingBatches(text, WindowShape(3, 3), start_token=1, held_out=0.2, seed=seed)
        held, train = (
            {token for token in batches.read(windows).targets.tolist() if token >= 0}
            for windows in (batches.held_out, batches.windows(0))
        )
        assert not held & train
        assert 0.2 <= count_targets(batches.held_out) / len(text.tokens) <= 0.31
        assert count_targets(batches.held_out) % 5 == 0
        assert count_targets(batches.held_out) + batches.tokens == len(text.tokens)
    book = TokenStream.from_documents([np.arange(1000) % 211])
    batches = TrainingBatches(book, WindowShape(10, 10), start_token=1, held_out=0.1, seed=0)
    assert 100 <= count_targets(batches.held_out) <= 120
    with pytest.raises(ParameterError, match="no text"):
        TrainingBatches(TokenStream.from_documents([[]]), WindowShape(3, 3), start_token=1, held_out=0.1, seed=0)


# -------------------------------------------------------------------------------------------------------- initial


def test_layers_are_taken_from_both_ends():
    assert first_and_last(30, 8) == (0, 1, 24, 25, 26, 27, 28, 29)
    assert first_and_last(30, 30) == tuple(range(30))
    assert first_and_last(30, 2) == (0, 29)
    assert first_and_last(7, 5) == (0, 1, 4, 5, 6)
    assert first_and_last(5, 1) == (0,)
    for count in range(1, 12):
        for wanted in range(1, count + 1):
            kept = first_and_last(count, wanted)
            assert len(set(kept)) == wanted
            assert list(kept) == sorted(kept)
            assert set(kept) <= set(range(count))
            assert kept[0] == 0
            assert wanted == 1 or kept[-1] == count - 1


@pytest.mark.parametrize(("family", "stack"), [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_shortened_model_computes_its_remaining_layers(family, stack):
    model = tiny(family)
    made, kept = keep_layers(model, 2)
    assert kept == (0, 2)
    ids = torch.arange(5, 25)[None]
    blocks = model.get_submodule(stack)
    # The whole model, its middle block made to do nothing.
    handle = blocks[1].register_forward_hook(
        lambda _, args, out: (args[0], *out[1:]) if isinstance(out, tuple) else args[0]
    )
    with torch.no_grad():
        right = model(ids, use_cache=False).logits
        handle.remove()
        assert not torch.allclose(right, model(ids, use_cache=False).logits, atol=1e-2)
        torch.testing.assert_close(made(ids, use_cache=False).logits, right)
        # With a cache, each block has a place of its own in it.
        torch.testing.assert_close(made(ids, use_cache=True).logits, right)
        first = made(ids[:, :12], use_cache=True)
        rest = made(ids[:, 12:], past_key_values=first.past_key_values, use_cache=True).logits
        torch.testing.assert_close(rest, right[:, 12:], rtol=1e-4, atol=1e-4)
    assert made.config.num_hidden_layers == 2


def test_per_layer_options_of_a_configuration_are_shortened_too():
    model = tiny("gemma2")
    before = model.config.layer_types
    made, kept = keep_layers(model, 2)
    assert made.config.layer_types == [before[number] for number in kept]
    with pytest.raises(ParameterError, match="from 1 to 3"):
        keep_layers(model, 4)
    with pytest.raises(ParameterError, match="from 1 to 3"):
        keep_layers(model, 0)
    assert keep_layers(tiny("gpt_neo"), 2)[0].config.attention_layers == ["global", "global"]


def test_initial_model_of_some_layers_has_their_weights(model_folder, lm):
    made = open_initial_model(str(model_folder), like=lm, layers=2)
    assert made.metadata["layers"] == [0, 2]
    assert made.metadata["parameters"] == sum(p.numel() for p in made.lm.model.parameters())
    assert made.metadata["parameters"] < sum(p.numel() for p in lm.model.parameters())
    theirs = lm.model.model.layers[2].mlp.up_proj.weight
    assert torch.equal(made.lm.model.model.layers[1].mlp.up_proj.weight, theirs)
    assert torch.equal(made.lm.model.model.embed_tokens.weight, lm.model.model.embed_tokens.weight)


def test_initial_model_from_a_configuration_has_seeded_weights_and_the_models_vocabulary(lm, tmp_path):
    path = tmp_path / "small.json"
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 99, **shape}))
    one, same, other = (open_initial_model(str(path), like=lm, seed=seed) for seed in (0, 0, 1))
    assert one.lm.vocab_size == lm.vocab_size
    assert one.lm.start_token == lm.start_token
    assert one.lm.model.config.hidden_size == 16
    states = [made.lm.model.state_dict() for made in (one, same, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])
    with pytest.raises(ParameterError, match="how many layers"):
        open_initial_model(str(path), like=lm, layers=1)
    for text, message in [
        ("{", "not valid JSON"),
        ("[]", "model_type"),
        ('{"model_type": "nonsense"}', "No model can be built"),
    ]:
        path.write_text(text)
        with pytest.raises(ModelError, match=message):
            open_initial_model(str(path), like=lm)
    with pytest.raises(ModelError, match="No such file"):
        open_initial_model(str(tmp_path / "no.json"), like=lm)


def test_initial_model_with_another_tokenizer_is_refused_with_both_fingerprints(lm, tmp_path):
    other = tiny_tokenizer(bos=False)
    lm.model.save_pretrained(tmp_path / "m")
    other.save_pretrained(tmp_path / "m")
    with pytest.raises(ModelMismatch) as caught:
        open_initial_model(str(tmp_path / "m"), like=lm)
    assert tokenizer_fingerprint(other) in str(caught.value)
    assert tokenizer_fingerprint(lm.tokenizer) in str(caught.value)
    wider = tiny("llama")
    wider.resize_token_embeddings(333)
    wider.save_pretrained(tmp_path / "w")
    lm.tokenizer.save_pretrained(tmp_path / "w")
    with pytest.raises(ModelMismatch, match=r"333 tokens.* 320"):
        open_initial_model(str(tmp_path / "w"), like=lm)


# ------------------------------------------------------------------------------------------------------- training


def test_tiny_decoder_learns_the_distribution_of_a_tiny_store(lm, initial, tmp_path):
    store = build(documents(3, words=5), tmp_path / "docs.store", lm=lm)
    targets = retrieve_targets(store, tmp_path / "targets", k=500, knn_temperature=10.0, top=500, mass=1.0)
    card = fit_decoder(
        store, initial, tmp_path / "out", targets=targets, beta=1.0, epochs=200, batch_tokens=256, learning_rate=2e-2,
        weight_decay=0.0, device="cpu",
    )  # fmt: skip
    assert read_curve(tmp_path / "out" / "losses.jsonl")[0]["kl"] > 1
    assert card.losses["kl"] < 0.03
    # The finished folder has the same loss, position by position, against brute force.
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    keys, values = store.take(torch.arange(store.entry_count)).numpy(), store.values(torch.arange(store.entry_count))
    away, kl = [], []
    for document in store.catalog.documents():
        rows = torch.arange(document.first_entry, document.first_entry + document.entries)
        tokens = [lm.start_token, *values[rows].tolist()]
        with torch.no_grad():
            probs = model(torch.tensor([tokens[:-1]])).logits[0].double().softmax(1).numpy()
        for row, q in zip(rows.tolist(), probs, strict=True):
            others = np.arange(store.entry_count) != row
            p = oracle.knn_distribution(
                keys[row], keys[others], values.numpy()[others], lm.vocab_size, k=500, knn_temperature=10.0
            )
            # Equal contexts, as at the first token of a document, leave out a different one of them each, and so have
            # different targets, which no model can learn.
            if oracle.distances(keys[row], keys[others]).min() > 1e-6:
                away.append(np.abs(p - q).max())
                kl.append(np.sum(p[p > 0] * np.log(p[p > 0] / q[p > 0])))
    assert len(kl) > 0.9 * store.entry_count
    assert np.mean(kl) < 0.01
    assert max(away) < 0.05


def test_curve_matches_a_training_in_plain_torch(small, lm, initial, tmp_path):
    """Plain torch, whole documents one by one: AdamW, warm-up, decay, clipping, the mean over count_targets."""
    store, targets = small
    options = {**QUICK, "epochs": 2, "beta": 0.6, "weight_decay": 10.0, "clip": 0.5, "warm_up": 0.3}
    fit_decoder(store, initial, tmp_path / "out", targets=targets, schedule="cosine", **options)
    text = TokenStream.from_store(store)
    batches = TrainingBatches(text, WindowShape(64, 64), start_token=lm.start_token, held_out=0.0, seed=0)
    plain = PlainTraining(tiny("llama"), batches, weight_decay=10.0, clip=0.5)
    steps_of_windows = [(epoch, np.concatenate(groups)) for epoch in range(2) for groups in batches.steps(epoch, 512)]
    warm, steps = math.ceil(0.3 * len(steps_of_windows)), len(steps_of_windows)
    for step, ((epoch, windows), line) in enumerate(zip(steps_of_windows, losses(tmp_path / "out"), strict=True)):
        left = (steps - step) / (steps - warm + 1)
        rate = 1e-3 * ((step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (1 - left))))
        loss = plain.step(windows, rate, targets, 0.6)
        assert line["step"] == step + 1
        assert line["epoch"] == epoch
        assert line["learning_rate"] == pytest.approx(rate)
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
    plain.check_weights(tmp_path / "out")


def test_accumulated_parts_are_the_same_batch(small, initial, tmp_path):
    store, targets = small
    for number, accumulate in enumerate((1, 3, 100)):
        fit_decoder(store, initial, tmp_path / str(number), targets=targets, beta=0.5, accumulate=accumulate, **QUICK)
    curves = [losses(tmp_path / str(number)) for number in range(3)]
    for other in curves[1:]:
        assert [line["loss"] for line in other] == pytest.approx([line["loss"] for line in curves[0]], rel=1e-4)
        assert [line["kl"] for line in other] == pytest.approx([line["kl"] for line in curves[0]], rel=1e-4)


def test_joined_groups_are_the_same_batch(small, initial, tmp_path, monkeypatch):
    store, targets = small
    passes = []
    read = TrainingBatches.read
    monkeypatch.setattr(
        TrainingBatches, "read", lambda self, windows: passes.append(len(windows)) or read(self, windows)
    )
    counts = []
    for number, room in enumerate((0, 4 * 512)):
        passes.clear()
        monkeypatch.setattr(decoder_trainer, "_max_positions", lambda *_, room=room: room)
        fit_decoder(store, initial, tmp_path / str(number), targets=targets, beta=0.5, **QUICK)
        counts.append(len(passes))
    apart, together = (losses(tmp_path / str(number)) for number in range(2))
    assert counts[1] == len(together) < counts[0]
    for name in ("loss", "kl", "ce"):
        assert [line[name] for line in together] == pytest.approx([line[name] for line in apart], rel=1e-4)


@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=6),
    room=st.integers(0, 400),
)
def test_groups_are_joined_up_to_the_maximum(lengths, room):
    groups = [np.array([[7, 0, 0, length] for length in group]) for group in lengths]
    text = TokenStream.from_documents([range(50)])
    found = TrainingBatches(text, WindowShape(64, 64), start_token=0, held_out=0, seed=0).join_groups(groups, room)
    assert sorted(length for group in found for length in group[:, 3]) == sorted(itertools.chain(*lengths))
    given_ = {tuple(sorted(group)) for group in map(tuple, lengths)}
    for group in found:
        padded = len(group) * group[:, 3].max()
        assert padded <= room or tuple(sorted(group[:, 3].tolist())) in given_
    # Two that stand side by side would not have fitted together.
    for one, other in itertools.pairwise(found):
        assert (len(one) + min(map(len, lengths))) * one[:, 3].max() > room or len(other) > min(map(len, lengths))


def test_learning_rate_rises_and_decays_to_zero():
    linear = Schedule(2.0, warm_up=2, decay="linear")
    assert [linear.rate_of_step(step, 8) for step in range(8)] == pytest.approx(
        [1, 2, *(n * 2 / 7 for n in range(6, 0, -1))]
    )
    cosine = Schedule(2.0, warm_up=0, decay="cosine")
    assert [cosine.rate_of_step(step, 4) for step in range(4)] == pytest.approx(
        [2.0, 1 + math.cos(math.pi / 4), 1.0, 1 - math.cos(math.pi / 4)]
    )


def test_same_seed_gives_the_same_weights_and_another_gives_others(small, lm, tmp_path):
    store, _ = small
    path = tmp_path / "gpt2.json"
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
    path.write_text(json.dumps({"model_type": "gpt2", **shape}))  # it has dropout
    before = torch.random.get_rng_state()
    for number in range(3):
        made = open_initial_model(str(path), like=lm)
        fit_decoder(store, made, tmp_path / str(number), beta=0.0, seed=number // 2, **QUICK)
    assert equal(tmp_path / "0", tmp_path / "1")
    assert not equal(tmp_path / "0", tmp_path / "2")
    assert torch.equal(before, torch.random.get_rng_state())


def stopping(after):
    """A progress that raises after so many steps."""

    @contextmanager
    def progress(what, *, total=None, unit="tokens"):
        counts = []

        def advance(count):
            counts.append(count)
            if len(counts) == after + 1:
                raise KeyboardInterrupt

        yield advance

    return progress


def test_interrupted_training_resumes_with_the_same_curve(small, lm, tmp_path):
    store, targets = small
    path = tmp_path / "gpt2.json"
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
    path.write_text(json.dumps({"model_type": "gpt2", **shape}))  # what dropout draws must be the same, too
    options = {**QUICK, "beta": 0.5, "targets": targets, "held_out": 0.2, "batch_tokens": 128}
    initial = open_initial_model(str(path), like=lm)
    whole = fit_decoder(store, initial, tmp_path / "whole", **options)
    assert whole.steps >= 8
    half = whole.steps // 2
    for number, (stops, every) in enumerate([([1], 0), ([half, 2], 0), ([half + 1], 1e9), ([whole.steps], 0)]):
        out = tmp_path / f"stopped {number}"
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                fit_decoder(store, initial, out, checkpoint_every=every, progress=stopping(stop), **options)
            assert not out.exists()
        work = Path(f"{out}.partial")
        assert load_tensors(work / CHECKPOINT)[1]["state"]["step"] == sum(stops)
        if number == 1:
            with pytest.raises(DatastoreError, match=r"another beta \(0.5, now 0.25\)"):
                fit_decoder(store, initial, out, **{**options, "beta": 0.25})
            with (work / "losses.jsonl").open("a") as file:
                file.write('{"step": 999, "epoch": 0, "loss": 1.0}\n{"step": 999, "epo')
        card = fit_decoder(store, initial, out, checkpoint_every=every, **options)
        assert losses(out) == losses(tmp_path / "whole")
        assert equal(out, tmp_path / "whole")
        assert replace(card, seconds=0) == replace(whole, seconds=0)
        assert not work.exists()


@pytest.mark.parametrize("where", ["optimiser", "curve", "held out"])
def test_interruption_anywhere_leaves_a_consistent_state(small, initial, tmp_path, monkeypatch, where):
    store, targets = small
    options = {**QUICK, "beta": 0.5, "targets": targets, "held_out": 0.2, "batch_tokens": 128}
    whole = fit_decoder(store, initial, tmp_path / "whole", **options)
    owner, name, call = {
        "optimiser": (torch.optim.AdamW, "step", 5),
        "curve": (trainer.LossCurve, "_append", 3),  # the first one is at the beginning
        "held out": (decoder_trainer.DecoderTrainer, "_evaluate", 2),
    }[where]
    original, calls = getattr(owner, name), []

    def breaking(*given, **named):
        calls.append(name)
        if len(calls) == call:
            if where == "curve":
                original(*given, **named)  # written, but not recorded
            elif where == "optimiser":
                given[0].param_groups[0]["params"][0].data.fill_(7.0)  # half done
            raise KeyboardInterrupt
        return original(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaking)
        patch.setattr(decoder_trainer, "STEPS_PER_FLUSH", 2)
        with pytest.raises(KeyboardInterrupt):
            fit_decoder(store, initial, tmp_path / "out", checkpoint_every=1e9, **options)
    assert len(calls) == call
    assert (tmp_path / "out.partial" / CHECKPOINT).exists() == (where == "held out")
    card = fit_decoder(store, initial, tmp_path / "out", **options)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert equal(tmp_path / "out", tmp_path / "whole")
    assert replace(card, seconds=0) == replace(whole, seconds=0)


def test_finished_training_is_not_repeated_if_publishing_failed(small, initial, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_publish", full)
        with pytest.raises(OSError, match="no space"):
            fit_decoder(small[0], initial, tmp_path / "out", held_out=0.2, **QUICK)
    steps = []

    @contextmanager
    def watch(what, *, total=None, unit="tokens"):
        yield steps.append
        assert steps == [total]

    card = fit_decoder(small[0], initial, tmp_path / "out", held_out=0.2, progress=watch, **QUICK)
    whole = fit_decoder(small[0], initial, tmp_path / "whole", held_out=0.2, **QUICK)
    assert len(steps) == 1
    assert equal(tmp_path / "out", tmp_path / "whole")
    assert replace(card, seconds=0) == replace(whole, seconds=0)


def test_killed_training_resumes_with_the_same_curve(small, lm, initial, model_folder, tmp_path):
    store, targets = small
    code = f"""
        import os, signal, torch
        os.environ["HF_HUB_OFFLINE"] = "1"
        torch.set_num_threads(1)
        from contextlib import contextmanager
        from knnlm import CausalLM, Datastore
        from knnlm.training.decoder import train_decoder
        from knnlm.training.decoder_trainer import DecoderConfig
        from knnlm.training.initial_model import open_initial_model
        from knnlm.training.teacher import Targets

        @contextmanager
        def deadly(what, *, total=None, unit="tokens"):
            counts = []
            def advance(count):
                counts.append(count)
                if len(counts) == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield advance

        lm = CausalLM.open({str(model_folder)!r}, device="cpu")
        initial = open_initial_model({str(model_folder)!r}, like=lm)
        config = DecoderConfig(beta=0.5, epochs=2, batch_tokens=256, learning_rate=1e-3, context=64)
        train_decoder(Datastore.open({str(store.path)!r}), initial, {str(tmp_path / "killed")!r}, config,
                      targets=Targets.open({str(targets.path)!r}), device="cpu", checkpoint_every=0, progress=deadly)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, capture_output=True)
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()[-2000:]
    assert not (tmp_path / "killed").exists()
    assert (tmp_path / "killed.partial" / CHECKPOINT).exists()
    options = {**QUICK, "beta": 0.5, "targets": targets, "batch_tokens": 256}
    steps = []

    @contextmanager
    def watch(what, *, total=None, unit="tokens"):
        yield steps.append

    fit_decoder(store, initial, tmp_path / "killed", progress=watch, **options)
    card = fit_decoder(store, initial, tmp_path / "whole", **options)
    assert sum(1 for count in steps[1:]) == card.steps - 3
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert equal(tmp_path / "killed", tmp_path / "whole")


def test_held_out_text_is_measured_before_and_after_each_epoch(small, lm, initial, tmp_path):
    store, targets = small
    card = fit_decoder(
        store, initial, tmp_path / "out", targets=targets, beta=0.5, held_out=0.2, **{**QUICK, "learning_rate": 3e-3}
    )
    assert [entry["epoch"] for entry in card.held_out] == [0, 1, 2]
    assert card.held_out[-1]["loss"] < card.held_out[0]["loss"]
    assert card.tokens + card.held_out_tokens == store.entry_count
    batches = TrainingBatches(
        TokenStream.from_store(store), WindowShape(64, 64), start_token=lm.start_token, held_out=0.2, seed=0
    )
    assert count_targets(batches.held_out) == card.held_out_tokens
    for model, entry in (
        (lm.model, card.held_out[0]),
        (hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), card.held_out[-1]),
    ):
        nats = 0.0
        for one in batches.held_out:
            window = batches.read(one[None])
            with torch.no_grad():
                log_q = model(window.ids).logits[0].log_softmax(1)
            nats -= float(log_q.gather(1, window.targets[:, None]).sum())
        assert entry["ce"] == pytest.approx(nats / card.held_out_tokens, rel=1e-4)


def test_targets_can_be_retrieved_on_the_fly(small, initial, tmp_path):
    store, targets = small
    fit_decoder(store, initial, tmp_path / "stored", targets=targets, beta=0.5, **QUICK)
    live = RetrievalTeacher(store, TeacherConfig(32, 20.0, "self", 64, 0.99))
    card = fit_decoder(store, initial, tmp_path / "live", targets=live, beta=0.5, **QUICK)
    for one, other in zip(losses(tmp_path / "stored"), losses(tmp_path / "live"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
    assert card.teacher == store.fingerprint


# --------------------------------------------------------------------------------------------------- what comes out


def test_folder_is_an_ordinary_model_and_is_not_rewritten(small, lm, initial, tmp_path, model_folder, with_plots):
    store, targets = small
    out = tmp_path / "out"
    before = {name: weight.clone() for name, weight in initial.lm.model.state_dict().items()}
    card = fit_decoder(store, initial, out, targets=targets, beta=0.5, **QUICK)
    assert all(torch.equal(before[name], weight) for name, weight in initial.lm.model.state_dict().items())
    plain = hf.AutoModelForCausalLM.from_pretrained(out)
    opened = CausalLM.open(str(out), device="cpu")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, opened.model(ids).logits)
        assert not torch.allclose(plain(ids).logits, lm.model(ids).logits, atol=1e-3)
    assert hf.AutoTokenizer.from_pretrained(out)("a memory")["input_ids"] == lm.encode("a memory")
    assert tokenizer_fingerprint(opened.tokenizer) == card.tokenizer == lm.identity["tokenizer"]
    assert (card.vocab_size, card.start_token) == (lm.vocab_size, lm.start_token)
    assert card.teacher == store.fingerprint
    assert card.targets["bytes_per_token"] == targets.metadata["bytes_per_token"]
    assert card.tokens == store.entry_count
    assert card.steps == len(read_curve(out / "losses.jsonl"))
    assert card.initial_model["parameters"] == sum(p.numel() for p in plain.parameters())
    assert (out / "learning.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert card.notes == []
    assert load_card(out) == card
    files = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert fit_decoder(store, initial, out, targets=targets, beta=0.5, **QUICK) == card
    # Killed when all was done but tidying up.
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / CHECKPOINT).write_bytes(b"")
    assert fit_decoder(store, initial, out, targets=targets, beta=0.5, **QUICK) == card
    assert not (tmp_path / "out.partial").exists()
    assert files == {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    with pytest.raises(DatastoreError, match="another seed"):
        fit_decoder(store, initial, out, targets=targets, beta=0.5, seed=1, **QUICK)
    cut = open_initial_model(str(model_folder), like=lm, layers=2)
    with pytest.raises(DatastoreError, match="another initial"):
        fit_decoder(store, cut, out, targets=targets, beta=0.5, **QUICK)
    assert not Path(f"{out}.partial").exists()


def test_documents_alone_are_enough_for_plain_fine_tuning(small, lm, initial, tmp_path):
    store, _ = small
    by_store = fit_decoder(store, initial, tmp_path / "a", beta=0.0, **QUICK)
    given = [lm.encode(document.text) for document in documents(10, words=20)]
    by_tokens = fit_decoder(given, initial, tmp_path / "b", beta=0.0, **QUICK)
    assert replace(by_store, seconds=0) == replace(by_tokens, seconds=0)
    assert equal(tmp_path / "a", tmp_path / "b")
    assert (by_store.teacher, by_store.targets, by_store.losses["kl"]) == (None, None, None)
    assert by_store.losses["loss"] == pytest.approx(by_store.losses["ce"])


def test_without_matplotlib_the_card_names_the_missing_extra(small, initial, tmp_path, monkeypatch, with_plots):
    monkeypatch.setattr(trainer, "find_spec", lambda _: None)
    card = fit_decoder(small[0], initial, tmp_path / "out", beta=0.0, **QUICK)
    assert "pip install 'knnlm[report]'" in card.notes[0]
    assert not (tmp_path / "out" / "learning.png").exists()


def test_progress_bar_shows_the_loss(small, initial, tmp_path):
    counts, notes = [], []

    class Bar:
        def __call__(self, count):
            counts.append(count)

        def note(self, text):
            notes.append(text)

    @contextmanager
    def progress(what, *, total=None, unit="tokens"):
        yield Bar()
        assert sum(counts) == total

    card = fit_decoder(small[0], initial, tmp_path / "out", beta=0.0, progress=progress, **QUICK)
    last = [line["loss"] for line in read_curve(tmp_path / "out" / "losses.jsonl")][-(card.steps % 20 or 20) :]
    assert notes[-1] == f"loss {np.mean(last):.3f}"
    with screen.bar("training", total=3) as advance:
        note(advance, notes[-1])
        advance(2)
        assert advance._progress.tasks[0].fields["done"].endswith(f"/s, {notes[-1]}")
    with silent("training") as advance:
        note(advance, "a bar without room for it")


def test_invalid_settings_and_texts_are_refused(small, lm, initial, tmp_path):
    store, targets = small
    out = tmp_path / "out"
    for options, message in [
        ({"beta": 1.5}, "beta must"),
        ({"beta": 0.5}, "needs targets"),
        ({"epochs": 0}, "epochs"),
        ({"schedule": "constant"}, "linear or cosine"),
        ({"precision": "float8"}, "float32 or bfloat16"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"clip": -1.0}, "clip"),
        ({"warm_up": 2.0}, "warm_up"),
        ({"context": 10**6}, "longer than"),
        ({"context": 8, "stride": 9}, "stride"),
        ({"targets": targets}, "would not be used"),
        ({"batch_tokens": 0}, "batch_tokens"),
    ]:
        with pytest.raises(ParameterError, match=message):
            fit_decoder(store, initial, out, **{"beta": 0.0, "device": "cpu", **options})
        assert not out.exists()
    with pytest.raises(ParameterError, match="320"):
        fit_decoder([[5, 320]], initial, out, beta=0.0)
    other = build(documents(3), tmp_path / "other", lm=lm)
    with pytest.raises(DatastoreError, match="another text"):
        fit_decoder(other, initial, out, targets=targets, beta=0.5)
    wild = {**QUICK, "batch_tokens": 64, "learning_rate": 1e30, "clip": 0.0}
    with pytest.raises(ParameterError, match="diverged"):
        fit_decoder(store, initial, out, beta=0.0, **wild)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("")
    with pytest.raises(DatastoreError, match="not empty"):
        fit_decoder(store, initial, tmp_path / "full", beta=0.0)
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["diary.txt"]


@pytest.mark.parametrize(
    ("tokens", "epochs", "right"),
    [
        (455_774, 3, 4096), (1_490_000, 3, 8192), (2_240_000, 3, 16_384), (10**8, 3, 16_384), (100, 1, 512),
        (4096 * 100, 3, 4096), (4096 * 100 - 1, 3, 2048), (51_199, 3, 512),
    ],
)  # fmt: skip
def test_default_batch_size_gives_three_hundred_steps(tokens, epochs, right):
    text = TokenStream(np.zeros(tokens, np.int8), np.array([0, tokens]))
    assert decoder_trainer.default_batch_tokens(text, epochs) == right
    assert right == 512 or tokens * epochs / right >= 300
    assert right == 16_384 or tokens * epochs / (2 * right) < 300


def test_card_records_the_default_batch_size(small, initial, tmp_path):
    card = fit_decoder(small[0], initial, tmp_path / "out", epochs=1, device="cpu")
    assert card.settings["batch_tokens"] == 512


def test_finished_decoder_is_found_where_the_default_batch_size_has_changed(small, initial, tmp_path, monkeypatch):
    card = fit_decoder(small[0], initial, tmp_path / "out", epochs=1, device="cpu")
    monkeypatch.setattr(decoder_trainer, "_MIN_BATCH_TOKENS", 1024)
    assert fit_decoder(small[0], initial, tmp_path / "out", epochs=1, device="cpu") == card
    with pytest.raises(DatastoreError, match="another batch tokens"):
        fit_decoder(small[0], initial, tmp_path / "out", epochs=1, batch_tokens=1024, device="cpu")


def test_finished_decoder_of_any_precision_is_reused_unless_one_is_given(small, initial, tmp_path):
    options = {**QUICK, "batch_tokens": 128}
    half = fit_decoder(small[0], initial, tmp_path / "out", precision="bfloat16", **options)
    assert half.settings["precision"] == "bfloat16"
    assert fit_decoder(small[0], initial, tmp_path / "out", **options) == half
    with pytest.raises(DatastoreError, match="another precision"):
        fit_decoder(small[0], initial, tmp_path / "out", precision="float32", **options)
    # What is unfinished goes on as it began, or not at all.
    with pytest.raises(KeyboardInterrupt):
        fit_decoder(small[0], initial, tmp_path / "half", precision="bfloat16", progress=stopping(3), **options)
    with pytest.raises(DatastoreError, match="another precision"):
        fit_decoder(small[0], initial, tmp_path / "half", **options)


def test_same_tokens_with_other_document_boundaries_are_refused(lm, initial, tmp_path):
    given = [lm.encode(document.text) for document in documents(4, words=20)]
    card = fit_decoder(given, initial, tmp_path / "out", **QUICK)
    joined = [given[0] + given[1], *given[2:]]
    assert TokenStream.from_documents(joined).fingerprint == card.text
    with pytest.raises(DatastoreError, match="another document boundaries"):
        fit_decoder(joined, initial, tmp_path / "out", **QUICK)


def test_tensorboard_gets_each_step_once_also_after_a_resume(small, initial, tmp_path, monkeypatch):
    """The package is large and not installed here, so a writer of a few lines stands for its own."""
    closed = []

    class SummaryWriter:
        def __init__(self, folder, **_):
            Path(folder).mkdir()
            self.path, self.lines = Path(folder, f"events.{len(closed)}"), []

        def add_scalar(self, name, value, step):
            self.lines.append(json.dumps([name, step, value]) + "\n")

        def close(self):
            self.path.write_text("".join(self.lines))
            closed.append(self.path)

    options = {**QUICK, "batch_tokens": 128, "tensorboard": True}
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "find_spec", lambda _: None)
        with pytest.raises(MissingExtra, match=r"pip install 'knnlm\[tensorboard\]'"):
            fit_decoder(small[0], initial, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(decoder, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    with pytest.raises(KeyboardInterrupt):
        fit_decoder(small[0], initial, tmp_path / "out", progress=stopping(5), **options)
    assert len(closed) == 1
    fit_decoder(small[0], initial, tmp_path / "out", **options)
    assert len(closed) == 2
    events = [json.loads(line) for file in (tmp_path / "out" / "tensorboard").iterdir() for line in file.open()]
    right = [(line["step"], line["loss"]) for line in losses(tmp_path / "out")]
    assert sorted((step, value) for name, step, value in events if name == "loss") == right
    assert {name for name, _, _ in events} == {"loss", "ce", "learning_rate", "tokens_per_second"}


def test_lambda_is_written_into_the_card_and_invalid_cards_are_refused_in_one_line(small, initial, tmp_path):
    out = tmp_path / "out"
    card = fit_decoder(small[0], initial, out, beta=0.0, **QUICK)
    assert card.lmbda is None
    assert json.loads((out / CARD).read_text())["lambda"] is None
    metadata = {"model": "x", "text": ["valid"], "tokens": 9, "base_perplexity": 3.0, "perplexity": 2.0}
    assert set_lambda(out, 0.3, metadata) == load_card(out)
    card_json = json.loads((out / CARD).read_text())
    assert (card_json["lambda"], card_json["lambda_metadata"]) == (0.3, metadata)
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ParameterError, match="lambda"):
            set_lambda(out, value)
    hostile = [
        {"format": 2}, {"lambda": 2}, {"lambda": "0.5"}, {"lambda": float("nan")}, {"vocab_size": 0},
        {"vocab_size": True},
        {"start_token": 10**9}, {"start_token": -1}, {"window": {}}, {"window": {"context": 4, "stride": 5}},
        {"window": {"context": "a", "stride": 1}}, {"teacher": 5}, {"targets": []}, {"beta": None}, {"tokens": None},
        {"initial_model": "x"}, {"losses": 1}, {"held_out": {}}, {"notes": None}, {"settings": 3}, {"tokenizer": None},
    ]  # fmt: skip
    texts = [json.dumps({**card_json, **change}) for change in hostile]
    texts += ["", "{", "[]", "null", "[" * 100_000, '{"format": 1}', "\udcff"]
    for text in texts:
        (out / CARD).write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(DatastoreError) as caught:
            load_card(out)
        assert "\n" not in str(caught.value)
        assert CARD in str(caught.value)
    save_card(out, card)
    assert load_card(out) == card
    with pytest.raises(DatastoreError, match="is not a decoder"):
        load_card(tmp_path)
