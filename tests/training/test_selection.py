"""The choice of the learning rate and the epochs: which pieces are trained, their steps, and the weights at the end."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from helpers.cli import failure, knnlm
from helpers.decoders import equal
from helpers.stores import documents
from knnlm.errors import KnnlmWarning, ParameterError
from knnlm.ingest.build import build
from knnlm.training import decoder, selecting_trainer
from knnlm.training.data import TokenStream, TrainingBatches
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.model_teacher import make_model_targets
from knnlm.training.selection import MAX_RATES, Piece, Trial, constant_rates, falling_rates, next_piece, planned_epochs

RATE = 2e-3
CONFIG = DecoderConfig(select=True, epochs=3, batch_tokens=256, learning_rate=RATE, context=64)

MIDDLE = 6.4e-2  # a rate that is better than half and twice as much


@pytest.fixture(scope="module")
def texts(lm):
    every = lm.encode_all([document.text for document in documents(16, words=24)])
    return every[:12], every[12:]


@pytest.fixture(scope="module")
def whole(texts, initial, tmp_path_factory):
    """The card and the folder of a selection that was not interrupted."""
    folder = tmp_path_factory.mktemp("selection") / "whole"
    return train_decoder(texts[0], initial, folder, CONFIG, held_out_text=texts[1], device="cpu"), folder


def trials(*rows):
    return [Trial(None, 0.0, 9.0), *(Trial(*row) for row in rows)]


def test_given_rate_is_tried_first_for_half_an_epoch():
    assert next_piece(RATE, 3, trials()) == Piece(RATE, 0.0, pytest.approx(1 / 3), 0.5)


@given(st.integers(-6, 6), st.floats(0, 0.9), st.integers(0, 9))
def test_rates_are_doubled_or_halved_until_the_best_is_between_two_others(best, tilt, diverging):
    """Losses fall towards one rate from both sides; rates from some factor above it diverge."""

    def loss(rate):
        factor = math.log2(rate / RATE) - best
        return math.inf if factor > diverging else abs(factor) * (1 + tilt * (factor > 0))

    tried = []
    while (piece := next_piece(RATE, 1, trials(*tried))) is not None and piece.end == 0.5:
        assert piece == Piece.until(piece.learning_rate, 0.5)
        tried.append((piece.learning_rate, 0.5, loss(piece.learning_rate)))
    rates = [rate for rate, _, _ in tried]
    found = min(tried, key=lambda trial: trial[2])
    assert len(set(rates)) == len(rates) <= MAX_RATES
    assert {math.log2(rate / RATE) % 1 for rate in rates} == {0.0}
    if len(rates) < MAX_RATES:  # the best one was reached, and both of its neighbours
        assert found[0] == RATE * 2.0**best
        assert {found[0] / 2, 2 * found[0]} < set(rates)
    else:
        assert abs(best) >= 2
    if math.isfinite(found[2]):
        assert piece == Piece.until(found[0], 1, after=0.5)
    else:
        assert piece is None


def test_best_rate_goes_on_until_an_epoch_hardly_helps():
    first = [(2e-3, 0.5, 4.5), (4e-3, 0.5, 6.0), (1e-3, 0.5, 5.0)]
    assert next_piece(RATE, 3, trials(*first)) == Piece(2e-3, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)
    assert next_piece(RATE, 3, trials(*first, (2e-3, 1.0, 4.0))) == Piece.until(2e-3, 2, after=1)
    assert next_piece(RATE, 3, trials(*first, (2e-3, 1.0, 4.495))) is None
    assert next_piece(RATE, 1, trials(*first, (2e-3, 1.0, 4.0))) is None
    assert next_piece(RATE, 3, trials(*first, (2e-3, 1.0, 4.0), (2e-3, 2.0, 3.995))) is None
    better = [*first, (2e-3, 1.0, 4.0), (2e-3, 2.0, 3.9)]
    assert next_piece(RATE, 3, trials(*better)) == Piece.until(2e-3, 3, after=2)
    assert next_piece(RATE, 3, trials(*better, (2e-3, 3.0, 3.8))) is None


def test_epochs_of_one_step_are_no_reason_to_stop():
    """Half an epoch has as many steps as a whole one then, so that both have the same loss."""
    first = [(2e-3, 0.5, 4.5), (4e-3, 0.5, 6.0), (1e-3, 0.5, 5.0)]
    assert next_piece(RATE, 3, trials(*first, (2e-3, 1.0, 4.5))) == Piece.until(2e-3, 2, after=1)
    assert next_piece(RATE, 3, trials(*first, (2e-3, 1.0, 4.5), (2e-3, 2.0, 4.5))) is None


def test_no_rate_goes_on_where_all_diverge():
    tried = [(RATE / 2**number, 0.5, math.inf) for number in range(MAX_RATES)]
    assert next_piece(RATE, 3, trials(*tried[:2])) == Piece.until(RATE / 4, 0.5)
    assert next_piece(RATE, 3, trials(*tried)) is None


def test_two_rates_that_are_nearly_equal_are_compared_after_an_epoch():
    first = [(2e-3, 0.5, 4.5), (4e-3, 0.5, 4.515), (1e-3, 0.5, 4.504)]
    once = [*first, (2e-3, 1.0, 4.2)]
    assert next_piece(RATE, 3, trials(*first)) == Piece.until(2e-3, 1, after=0.5)
    assert next_piece(RATE, 3, trials(*once)) == Piece.until(1e-3, 1)  # from the beginning
    assert next_piece(RATE, 3, trials(*once, (1e-3, 1.0, 4.1))) == Piece.until(1e-3, 2, after=1)
    assert next_piece(RATE, 3, trials(*once, (1e-3, 1.0, 4.3))) == Piece.until(2e-3, 2, after=1)
    assert next_piece(RATE, 3, trials(*first, (2e-3, 1.0, 4.6), (1e-3, 1.0, 4.4))) == Piece.until(1e-3, 2, after=1)
    assert next_piece(RATE, 3, trials(*first, (2e-3, 1.0, 4.6), (1e-3, 1.0, 4.55))) is None
    assert next_piece(RATE, 3, trials(*first, (2e-3, 1.0, math.inf), (1e-3, 1.0, 4.4))) == Piece.until(1e-3, 2, after=1)
    assert next_piece(RATE, 3, trials(*once, (1e-3, 1.0, 4.1), (1e-3, 2.0, 4.15))) is None


@given(st.integers(1, 300), st.integers(0, 40), st.integers(0, 500))
def test_rates_rise_stay_and_fall_to_nearly_zero(count, warm_up, before):
    constant = list(constant_rates(0.5, before, count, warm_up))
    assert constant == [0.5 * min(1.0, (before + step + 1) / warm_up) if warm_up else 0.5 for step in range(count)]
    falling = list(falling_rates(0.5, count))
    differences = [one - other for one, other in zip([0.5, *falling], [*falling, 0.0], strict=True)]
    assert differences == pytest.approx([0.5 / (count + 1)] * (count + 1))


@pytest.mark.parametrize(("epochs", "passes"), [(1, 2 + 2 / 3), (3, 2 + 2 / 3 + 4 / 3 + 5 / 3)])
def test_selection_takes_less_than_twice_the_time_of_three_epochs(epochs, passes):
    assert planned_epochs(epochs) == pytest.approx(passes)
    assert planned_epochs(3) < 2 * 3


@pytest.fixture(scope="module")
def plain(initial, texts):
    """A training of some rate and epochs, which is run once."""
    return functools.cache(functools.partial(train_plainly, initial, texts))


def train_plainly(initial, texts, rate: float, epochs: float) -> tuple[dict[str, torch.Tensor], float]:
    """The weights and the held-out loss after a constant rate and a decay, in a loop of torch's own AdamW."""
    lm = initial.lm
    config = CONFIG.resolve(TokenStream.from_documents(texts[0]), initial, torch.device("cpu"))
    batches = TrainingBatches(
        TokenStream.from_documents(texts[0]),
        config.window,
        start_token=lm.start_token,
        held_out=0.0,
        held_out_text=TokenStream.from_documents(texts[1]),
        seed=0,
    )
    model = copy.deepcopy(lm.model).float().train()
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups)
    steps = [step for epoch in range(4) for step in batches.steps(epoch, 256)]
    counts = [len(batches.steps(epoch, 256)) for epoch in range(4)]
    places = [sum(counts[: int(at)]) + math.ceil(round(at % 1 * counts[int(at)], 6)) for at in (2 / 3 * epochs, epochs)]
    count, falling = places[0], max(1, places[1] - places[0])
    warm_up = math.ceil(0.05 * counts[0])
    rates = [rate * min(1, (step + 1) / warm_up) for step in range(count)]
    rates += [rate * (falling - step) / (falling + 1) for step in range(falling)]
    for step, own in zip(steps, rates, strict=False):
        read = [batches.read(group) for group in step]
        counted = sum(int((batch.targets >= 0).sum()) for batch in read)
        for batch in read:
            logits = model(input_ids=batch.ids).logits.flatten(0, 1)
            kept = batch.targets >= 0
            loss = torch.nn.functional.cross_entropy(logits[kept], batch.targets[kept], reduction="sum") / counted
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = own
        optimiser.step()
        optimiser.zero_grad()
    return dict(model.named_parameters()), held_out_loss(model.eval(), lm, texts[1])


@torch.no_grad()
def held_out_loss(model, lm, rows) -> float:
    total = count = 0
    for tokens in rows:
        for begin in range(0, len(tokens), 64):
            window = tokens[begin : begin + 64]
            ids = torch.tensor([[lm.start_token if begin == 0 else tokens[begin - 1], *window[:-1]]])
            log_p = model(input_ids=ids).logits[0].log_softmax(-1)
            total -= float(log_p[torch.arange(len(window)), torch.tensor(window)].sum())
            count += len(window)
    return total / count


def test_trials_equal_trainings_that_end_there(texts, lm, whole, plain):
    card, _ = whole
    found = [Trial(**trial) for trial in card.selection["trials"]]
    assert found[0].loss == pytest.approx(held_out_loss(lm.model, lm, texts[1]), rel=1e-4)
    assert [trial.learning_rate for trial in found[1:3]] == [RATE, 2 * RATE]
    assert len(found) > 4
    for trial in found[1:]:
        _, loss = plain(trial.learning_rate, trial.epochs)
        assert trial.loss == pytest.approx(loss, rel=2e-3)
    assert next_piece(RATE, 3, found) is None


def test_trials_of_a_taught_decoder_are_compared_by_the_cross_entropy(texts, lm, initial, tmp_path):
    """Targets of held-out text say what the teacher knows, which has read that text."""
    config = replace(CONFIG, beta=0.5, held_out=0.2, epochs=1)
    stream = TokenStream.from_documents(texts[0])
    targets = make_model_targets(stream, tmp_path / "targets", lm)
    card = train_decoder(texts[0], initial, tmp_path / "out", config, targets=targets, device="cpu")
    first = card.held_out[0]
    assert first["kl"] != pytest.approx(first["ce"], rel=0.05)
    assert first["loss"] == pytest.approx((first["kl"] + first["ce"]) / 2, rel=1e-4)
    assert card.selection["trials"][0]["loss"] == first["ce"]
    found = {trial["loss"] for trial in card.selection["trials"]}
    assert {line["ce"] for line in card.held_out} == found


def test_text_that_is_held_out_apart_needs_no_targets(texts, lm, initial, tmp_path):
    stream = TokenStream.from_documents(texts[0])
    targets = make_model_targets(stream, tmp_path / "targets", lm)
    config, options = replace(CONFIG, beta=0.5, epochs=1), {"targets": targets, "held_out_text": texts[1]}
    card = train_decoder(texts[0], initial, tmp_path / "out", config, device="cpu", **options)
    assert [line["loss"] for line in card.held_out] == pytest.approx([line["ce"] for line in card.held_out])
    assert card.held_out[0]["ce"] == pytest.approx(held_out_loss(lm.model, lm, texts[1]), rel=1e-4)
    assert card.losses["kl"] > 0


@pytest.mark.parametrize("helps", [True, False])
def test_result_is_the_best_point_between_the_initial_and_the_best_weights(
    texts, lm, initial, tmp_path, monkeypatch, plain, helps
):
    evaluate = selecting_trainer.SelectingTrainer._evaluate
    found = []  # of the average; with so little text it does not help

    def better(self, epoch):
        evaluation = evaluate(self, epoch)
        if len(self.averages) != 1:
            return evaluation
        found.append(evaluation[0]["ce"])
        return [{"ce": 0.1}] if helps else evaluation

    monkeypatch.setattr(selecting_trainer.SelectingTrainer, "_evaluate", better)
    card = train_decoder(texts[0], initial, tmp_path / "out", CONFIG, held_out_text=texts[1], device="cpu")
    selection = card.selection
    chosen, averages = selection["chosen"], dict(map(tuple, selection["averages"]))
    tried = sorted((Trial(**trial) for trial in selection["trials"][1:]), key=lambda trial: trial.loss)
    assert (chosen["learning_rate"], chosen["epochs"]) == (tried[0].learning_rate, tried[0].epochs)
    (best, _), (second, _) = (plain(trial.learning_rate, trial.epochs) for trial in tried[:2])
    mean = {name: (best[name] + second[name]).detach() / 2 for name in best}
    assert averages[0.0] == tried[0].loss
    model = copy.deepcopy(lm.model).float()
    model.load_state_dict(mean, strict=False)
    assert found == [pytest.approx(held_out_loss(model.eval(), lm, texts[1]), rel=2e-3)]
    assert averages[0.5] == (0.1 if helps else found[0])
    assert chosen["average"] == (0.5 if helps else 0.0)
    trained = mean if helps else best
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        base = dict(initial.lm.model.named_parameters())[name].float()
        wanted = torch.lerp(base, trained[name], chosen["interpolation"])
        torch.testing.assert_close(tensor, wanted, atol=2e-3, rtol=2e-2)
    shares = dict(map(tuple, selection["interpolations"]))
    assert shares[1.0] == min(averages.values())
    assert shares[0.0] == pytest.approx(selection["trials"][0]["loss"], rel=1e-4)
    assert shares[chosen["interpolation"]] == min(shares.values()) <= shares[0.0]


def test_text_that_teaches_nothing_leaves_the_model_as_it_is(texts, lm, initial, tmp_path):
    """No token of the held-out text occurs in the training text: every trial is worse than the model."""
    others = sorted(set(range(lm.vocab_size)) - {token for row in texts[1] for token in row})
    noise = [[others[(7 * place + 3 * row) % len(others)] for place in range(60)] for row in range(12)]
    config = DecoderConfig(select=True, epochs=2, batch_tokens=256, learning_rate=0.05, context=64)
    card = train_decoder(noise, initial, tmp_path / "out", config, held_out_text=texts[1], device="cpu")
    assert card.selection["chosen"]["interpolation"] == 0.0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in initial.lm.model.named_parameters():
        if name in weights:
            assert torch.equal(weights[name], weight.float())


@pytest.mark.parametrize("stop_at", [2, 7, 12, 16])
def test_interrupted_selection_resumes_with_the_same_result(texts, initial, tmp_path, monkeypatch, whole, stop_at):
    card, folder = whole
    taken = 0
    step = selecting_trainer.SelectingTrainer._step

    def interrupted(self, *args):
        nonlocal taken
        taken += 1
        if taken == stop_at:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(selecting_trainer.SelectingTrainer, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_decoder(texts[0], initial, tmp_path / "out", CONFIG, held_out_text=texts[1], device="cpu")
    resumed = train_decoder(texts[0], initial, tmp_path / "out", CONFIG, held_out_text=texts[1], device="cpu")
    assert taken >= card.steps
    assert resumed.selection == card.selection
    assert equal(folder, tmp_path / "out")


@pytest.mark.parametrize("stage", ["interpolated", "published"])
def test_selection_that_is_interrupted_after_the_average_resumes_with_the_same_result(
    texts, initial, tmp_path, monkeypatch, stage
):
    trainer = selecting_trainer.SelectingTrainer
    evaluate, config = trainer._evaluate, replace(CONFIG, epochs=1)

    def better(self, epoch):  # the average
        return [{"ce": 0.1}] if len(self.averages) == 1 else evaluate(self, epoch)

    def interrupted(self, epoch):
        if len(self.averages) == 2:
            raise KeyboardInterrupt
        return better(self, epoch)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "_evaluate", better)
    whole = train_decoder(texts[0], initial, tmp_path / "whole", config, held_out_text=texts[1], device="cpu")
    assert whole.selection["chosen"]["average"] == 0.5
    with monkeypatch.context() as patch:
        if stage == "interpolated":
            patch.setattr(trainer, "_evaluate", interrupted)
        else:
            patch.setattr(decoder, "_publish", killed)
        with pytest.raises(KeyboardInterrupt):
            train_decoder(texts[0], initial, tmp_path / "out", config, held_out_text=texts[1], device="cpu")
    resumed = train_decoder(texts[0], initial, tmp_path / "out", config, held_out_text=texts[1], device="cpu")
    assert resumed.selection == whole.selection
    assert equal(tmp_path / "whole", tmp_path / "out")


def diverge_at(monkeypatch, rates, *, from_step=2):
    """Make the losses of these rates NaN, from some step of each piece on."""
    trainer = selecting_trainer.SelectingTrainer
    original = trainer._step

    def diverging(self, parts, curve, rate):
        original(self, parts, curve, rate)
        piece = next_piece(self._rate, self.config.epochs, self._trials)
        if piece.learning_rate in rates and self.state.batch >= from_step:
            curve._pending[-1] = replace(curve._pending[-1], sums=curve._pending[-1].sums * math.nan)

    monkeypatch.setattr(trainer, "_step", diverging)


def test_rate_that_diverges_is_left_out_also_if_the_run_is_killed_afterwards(texts, initial, tmp_path, monkeypatch):
    run, config = {"held_out_text": texts[1], "device": "cpu"}, replace(CONFIG, epochs=1)
    rate = 4 * RATE
    diverge_at(monkeypatch, {rate})
    with pytest.warns(KnnlmWarning, match=f"diverged with the learning rate {rate:g}"):
        card = train_decoder(texts[0], initial, tmp_path / "out", config, **run)
    trials = [Trial(**trial) for trial in card.selection["trials"]]
    assert (trials[3].learning_rate, trials[3].loss) == (rate, math.inf)
    assert len(trials) == 5
    assert all(math.isfinite(trial.loss) for trial in (*trials[:3], trials[4]))
    assert card.selection["chosen"]["learning_rate"] == trials[4].learning_rate != rate
    assert all(torch.isfinite(tensor).all() for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    step = selecting_trainer.SelectingTrainer._step

    def interrupted(self, *args):
        if len(self.state.trials) == 4 and self.state.decays:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(selecting_trainer.SelectingTrainer, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_decoder(texts[0], initial, tmp_path / "killed", config, **run)
    resumed = train_decoder(texts[0], initial, tmp_path / "killed", config, **run)
    assert resumed.selection == card.selection
    assert resumed.steps == card.steps


def test_best_rate_that_diverges_later_ends_with_its_best_weights(texts, initial, tmp_path, monkeypatch):
    run = {"held_out_text": texts[1], "device": "cpu"}
    trainer = selecting_trainer.SelectingTrainer
    original = trainer._step
    config = replace(CONFIG, epochs=1, learning_rate=MIDDLE)

    def diverging(self, parts, curve, rate):
        original(self, parts, curve, rate)
        if len(self.state.trials) == 4:
            curve._pending[-1] = replace(curve._pending[-1], sums=curve._pending[-1].sums * math.nan)

    monkeypatch.setattr(trainer, "_step", diverging)
    with pytest.warns(KnnlmWarning, match="diverged"):
        card = train_decoder(texts[0], initial, tmp_path / "out", config, **run)
    losses = [trial["loss"] for trial in card.selection["trials"]]
    assert len(losses) == 5
    assert losses[4] == math.inf
    assert dict(card.selection["interpolations"])[1.0] == pytest.approx(min(losses[1:4]), rel=1e-6)


def test_text_that_diverges_with_every_rate_is_one_clear_error(texts, initial, tmp_path, monkeypatch):
    diverge_at(monkeypatch, {RATE / 2**number for number in range(MAX_RATES)})
    with (
        pytest.warns(KnnlmWarning) as caught,
        pytest.raises(ParameterError, match="every learning rate that was tried"),
    ):
        train_decoder(texts[0], initial, tmp_path / "out", CONFIG, held_out_text=texts[1], device="cpu")
    assert len(caught) == 1


def test_selection_without_held_out_text_is_refused(texts, initial, tmp_path):
    with pytest.raises(ParameterError, match=r"held-out text.*select=False \(--no-select\)"):
        train_decoder(texts[0], initial, tmp_path / "out", CONFIG, device="cpu")


def test_store_with_too_little_text_for_a_selection_is_trained_on_without(lm, model_folder, tmp_path, capfd):
    build(documents(1), tmp_path / "tiny.store", lm=lm).close()
    command = ("distill", tmp_path / "tiny.store", "--into", "decoder", "--out", tmp_path / "out")
    options = ("--model", model_folder, "--epochs", 1)
    assert "--no-select" in failure(capfd, *command, *options)
    assert knnlm(capfd, *command, *options, "--no-select")[0] == 0


def test_progress_bar_is_as_long_as_the_planned_trials(texts, initial, tmp_path):
    totals, done = [], []

    @contextmanager
    def progress(what, *, total=None, unit="tokens"):
        totals.append(total)
        yield done.append

    run = {"held_out_text": texts[1], "device": "cpu", "progress": progress}
    config = replace(CONFIG, epochs=1, batch_tokens=64, learning_rate=3.2e-2)
    card = train_decoder(texts[0], initial, tmp_path / "out", config, **run)
    assert totals == [round(planned_epochs(1) * card.tokens)]
    assert sum(done) == pytest.approx(totals[0], rel=0.2)  # pieces have whole steps


@pytest.mark.parametrize(("device", "size", "place"), [("cpu", 100, "cpu"), ("cuda", 25, "cuda"), ("cuda", 26, "cpu")])
def test_copies_are_on_the_gpu_if_it_has_memory_to_spare(monkeypatch, device, size, place):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 200))
    assert selecting_trainer.place_of_copies(torch.device(device), size).type == place


def test_copies_take_nine_times_the_memory_of_the_weights(texts, initial, monkeypatch, tmp_path):
    found = []

    def place_of_copies(device, size):
        found.append(size)
        raise KeyboardInterrupt

    monkeypatch.setattr(selecting_trainer, "place_of_copies", place_of_copies)
    with pytest.raises(KeyboardInterrupt):
        train_decoder(texts[0], initial, tmp_path / "out", CONFIG, held_out_text=texts[1], device="cpu")
    weights = list(initial.lm.model.parameters())
    # The optimiser counts its steps for each weight, and is kept twice.
    assert found == [4 * (9 * sum(weight.numel() for weight in weights) + 2 * len(weights))]
