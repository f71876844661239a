"""A small Marian model and its tokenizer, trained on pairs: the base model of translation.py."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from knnlm.corpus import Document
from knnlm.lm.seq2seq import Seq2SeqLM

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
Pair = tuple[list[int], list[int]]  # tokens of source and target, each with the end token


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained, within a time."""

    seconds: float
    learning_rate: float = 5e-4
    warmup: float = 0.2  # share of the time
    batch_tokens: int = 16_384  # of padded targets
    label_smoothing: float = 0.1
    seed: int = 0


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of both languages, which ends every text with the end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=512
    )


def new_model(vocabulary: int, *, width: int = 512, layers: int = 4, dropout: float = 0.2) -> MarianMTModel:
    """Return a Marian model with random weights: as many encoder as decoder layers, one embedding for all."""
    model = MarianMTModel(
        MarianConfig(
            vocab_size=vocabulary,
            d_model=width,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            encoder_ffn_dim=4 * width,
            decoder_ffn_dim=4 * width,
            dropout=dropout,
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=1,
            forced_eos_token_id=None,
            decoder_start_token_id=0,
        )
    )
    # As that of published Marian models: the padding token is never written.
    model.generation_config.update(bad_words_ids=[[0]], num_beams=1, pad_token_id=0, eos_token_id=1)
    return model


def encode_pairs(tokenizer: Any, documents: Sequence[Document], *, longest: int = 256) -> list[Pair]:
    """Return the tokens of pairs, without those that are longer."""
    sources = tokenizer([document.source_text for document in documents])["input_ids"]
    targets = tokenizer([document.text for document in documents])["input_ids"]
    pairs = zip(sources, targets, strict=True)
    return [(source, target) for source, target in pairs if max(len(source), len(target)) <= longest]


def batches(pairs: Sequence[Pair], tokens: int, rng: random.Random) -> Iterator[list[Pair]]:
    """Yield batches of pairs with similar lengths, in a random order, without an end."""
    while True:
        order = sorted(range(len(pairs)), key=lambda number: (len(pairs[number][1]), rng.random()))
        made, batch, longest = [], list[Pair](), 0
        for number in order:
            longest = max(longest, *map(len, pairs[number]))
            if batch and longest * (len(batch) + 1) > tokens:
                made.append(batch)
                batch, longest = [], max(map(len, pairs[number]))
            batch.append(pairs[number])
        made.append(batch)
        rng.shuffle(made)
        yield from made


def train(model: Any, pairs: Sequence[Pair], config: TrainingConfig, device: str) -> dict[str, float]:
    """Train a model for a time, and leave it in evaluation mode; return the steps and the last mean loss."""
    torch.manual_seed(config.seed)
    model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    begin, steps, mean = time.perf_counter(), 0, math.nan
    for batch in batches(pairs, config.batch_tokens, random.Random(config.seed)):
        done = (time.perf_counter() - begin) / config.seconds
        if done >= 1:
            break
        rate = min(done / config.warmup, (1 - done) / (1 - config.warmup)) if config.warmup else 1 - done
        for group in optimiser.param_groups:
            group["lr"] = config.learning_rate * max(rate, 1e-3)
        with precision(device):
            loss = smoothed_loss(model, batch, config.label_smoothing, device)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        steps += 1
        if steps % 50 == 1:
            mean = loss.item()
    model.eval()
    return {"steps": steps, "loss": mean, "seconds": time.perf_counter() - begin}


def precision(device: str) -> AbstractContextManager[Any]:
    """Compute in bfloat16 on a GPU; the weights stay in float32."""
    return torch.autocast("cuda", torch.bfloat16) if device.startswith("cuda") else nullcontext()


def smoothed_loss(model: Any, batch: Sequence[Pair], smoothing: float, device: str) -> Tensor:
    """Return the mean cross entropy of the targets' tokens with label smoothing."""
    pad, start = model.config.pad_token_id, model.config.decoder_start_token_id
    sources = padded([source for source, _ in batch], pad, device)
    targets = padded([target for _, target in batch], pad, device)
    read = torch.cat([torch.full_like(targets[:, :1], start), targets[:, :-1]], 1)
    logits = model(input_ids=sources, attention_mask=sources.ne(pad), decoder_input_ids=read).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=pad, label_smoothing=smoothing
    )


def padded(rows: Sequence[list[int]], value: int, device: str) -> Tensor:
    """Return rows of tokens as one tensor, padded at the end."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value).to(device)


def open_or_train(
    folder: Path, documents: Sequence[Document], config: TrainingConfig, *, device: str, vocabulary: int, **size: Any
) -> Seq2SeqLM:
    """Open the model of a folder, or train one on pairs and save it there."""
    if not (folder / "config.json").exists():
        texts = [text for document in documents for text in (document.source_text or "", document.text)]
        tokenizer = train_tokenizer(texts, vocabulary)
        model = new_model(len(tokenizer), **size)
        figures = train(model, encode_pairs(tokenizer, documents), config, device)
        print(
            f"trained for {figures['seconds']:.0f} s: {figures['steps']} steps, loss {figures['loss']:.3f}", flush=True
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return Seq2SeqLM.open(str(folder), device=device, dtype="float32")


def fine_tune(
    lm: Seq2SeqLM, folder: Path, documents: Sequence[Document], config: TrainingConfig, *, device: str
) -> Seq2SeqLM:
    """Train a copy of a model on pairs of a domain, and save and open it."""
    if not (folder / "config.json").exists():
        model = AutoModelForSeq2SeqLM.from_pretrained(lm.name)
        train(model, encode_pairs(lm.tokenizer, documents), config, device)
        model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
    return Seq2SeqLM.open(str(folder), device=device, dtype="float32")
