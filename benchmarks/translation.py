"""Translation with stores of pairs: BLEU and chrF in and outside of their domains, and the time of a sentence.

    python benchmarks/translation.py GENERAL DOMAIN... --model FOLDER --train-seconds 180 --device cuda
    python benchmarks/translation.py GENERAL DOMAIN --width 64 --layers 1 --train-seconds 60 --pairs 300 --sentences 50

GENERAL and DOMAIN are folders with train, valid and test .jsonl (also .gz, .xz, .zst), a pair a line: the translation
in `text`, its source in `source`. A small Marian model is trained on the train pairs of GENERAL for a time, or opened
from --model where it was saved before, and then stays as it is. A store of each DOMAIN is built from train and tuned on
valid. Systems, all greedy: the model; vanilla, the kNN-MT of the paper with one λ; the same by brute force, from the
formula; gated, what `tune` chooses; the same with the valid pairs of GENERAL as text of another domain; all stores at
once, so too; and the model after fine-tuning on the domain's train pairs. Each translates test sentences of its own
domain and of GENERAL. Scores are those of sacreBLEU, whose signatures are printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import knnlm
from knnlm.corpus import Document, read_documents
from knnlm.evaluation.quality import TextScores, score_translations
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.mixture.mixture import Mixture
from marian import TrainingConfig, fine_tune, open_or_train

NEW_TOKENS = 128  # of a translation, at most


def main() -> None:
    options = parse()
    general = Corpus(options.general, options)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(options.train_seconds, batch_tokens=options.batch_tokens)
        size = {"vocabulary": options.vocabulary, "width": options.width, "layers": options.layers}
        lm = open_or_train(
            options.model or Path(folder) / "model", general.train, config, device=options.device, **size
        )
        rows = list(measure(lm, general, [Corpus(path, options) for path in options.domain], Path(folder), options))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    show(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("general", type=Path, metavar="GENERAL")
    parser.add_argument("domain", type=Path, nargs="+", metavar="DOMAIN")
    parser.add_argument("--model", type=Path, help="folder of the base model; it is trained and saved there if missing")
    parser.add_argument("--train-seconds", type=float, default=180)
    parser.add_argument("--tune-seconds", type=float, default=60, help="of fine-tuning on each domain; 0: without it")
    parser.add_argument("--batch-tokens", type=int, default=16_384, help="tokens of a training batch")
    parser.add_argument("--vocabulary", type=int, default=12_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4, help="of the encoder, and as many of the decoder")
    parser.add_argument("--pairs", type=int, help="pairs of train, of each corpus (default: all)")
    parser.add_argument("--valid", type=int, default=1000, help="pairs of valid to tune on")
    parser.add_argument("--sentences", type=int, help="sentences of test (default: all)")
    parser.add_argument("--batch", type=int, default=32, help="sentences that are translated together")
    parser.add_argument("--k", type=int, default=16, help="neighbours of vanilla kNN-MT")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the rows into this file")
    return parser.parse_args()


class Corpus:
    """The pairs of a folder."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.name = path.name
        self.train = list(islice(self._split(path, "train"), options.pairs))
        self.valid = list(islice(self._split(path, "valid"), options.valid))
        self.test = list(islice(self._split(path, "test"), options.sentences))

    @staticmethod
    def _split(path: Path, name: str) -> Iterator[Document]:
        files = sorted(path.glob(f"{name}.jsonl*"))
        if not files:
            raise SystemExit(f"{path} has no {name}.jsonl")
        return read_documents(files[0], source_field="source")


def measure(
    lm: Seq2SeqLM, general: Corpus, domains: Sequence[Corpus], folder: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for each system and test text, as soon as it is known."""
    plain = Mixture.open(knnlm.build(general.train[:4], folder / "plain", lm=lm), lm, lmbda=0.0)
    base: dict[str, tuple[TextScores, float]] = {}
    for corpus in (general, *domains):
        base[corpus.name] = translate(plain, corpus, options, use_memory=False)
        yield row("model", "–", corpus, base[corpus.name], base[corpus.name][1])
    for domain in domains:
        store = folder / f"{domain.name}.store"
        knnlm.build(domain.train, store, lm=lm).close()
        vanilla = Mixture.open(store, lm, memories="knn", use_tuned=False)
        tuned = vanilla.tune(domain.valid, weights="fixed", ks=[options.k], online=False)
        print(f"{domain.name}: {tuned.sweep.best if tuned.sweep else None}", flush=True)
        gated = Mixture.open(store, lm, memories="knn", use_tuned=False)
        gated.tune(domain.valid)
        protected = Mixture.open(store, lm, memories="knn", use_tuned=False)
        protected.tune(domain.valid, other=general.valid)
        systems = {"vanilla": vanilla, "gated": gated, "gated, other text": protected}
        for name, mixture in systems.items():
            for corpus in (domain, general):
                yield row(name, domain.name, corpus, translate(mixture, corpus, options), base[corpus.name][1])
        brute_force = BruteForce(vanilla, domain.train, options)
        for corpus in (domain, general):
            begin = time.perf_counter()
            scores = score(brute_force.translate([pair.source_text or "" for pair in corpus.test]), corpus)
            yield row("brute force", domain.name, corpus, (scores, time.perf_counter() - begin), base[corpus.name][1])
        if options.tune_seconds:
            config = TrainingConfig(options.tune_seconds, learning_rate=2e-4, batch_tokens=options.batch_tokens)
            tuned_lm = fine_tune(lm, folder / f"{domain.name}.tuned", domain.train, config, device=options.device)
            alone = Mixture.open(knnlm.build(domain.train[:4], folder / f"{domain.name}.alone", lm=tuned_lm), tuned_lm)
            for corpus in (domain, general):
                found = translate(alone, corpus, options, use_memory=False)
                yield row("fine-tuned", domain.name, corpus, found, base[corpus.name][1])
    if len(domains) > 1:
        yield from measure_together(lm, general, domains, folder, base, options)


def measure_together(
    lm: Seq2SeqLM,
    general: Corpus,
    domains: Sequence[Corpus],
    folder: Path,
    base: dict[str, tuple[TextScores, float]],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of all stores at once, gated, tuned on the valid pairs of all domains, beside general ones."""
    first, *others = [folder / f"{domain.name}.store" for domain in domains]
    memories = ",".join(["knn", *(f"knn={other}" for other in others)])
    together = Mixture.open(first, lm, memories=memories, use_tuned=False)
    together.tune([pair for domain in domains for pair in domain.valid], other=general.valid)
    names = " and ".join(domain.name for domain in domains)
    for corpus in (*domains, general):
        yield row("gated, other text", names, corpus, translate(together, corpus, options), base[corpus.name][1])


def translate(
    mixture: Mixture, corpus: Corpus, options: argparse.Namespace, *, use_memory: bool = True
) -> tuple[TextScores, float]:
    """Return the scores of greedy translations of test sentences, and the seconds that they took."""
    sources = [pair.source_text or "" for pair in corpus.test]
    settings: dict[str, Any] = {"batch_size": options.batch, "max_new_tokens": NEW_TOKENS, "num_beams": 1}
    mixture.translate(sources[: options.batch], use_memory=use_memory, **settings)  # so that kernels are compiled
    begin = time.perf_counter()
    found = mixture.translate(sources, use_memory=use_memory, do_sample=False, **settings)
    seconds = time.perf_counter() - begin
    return score(found, corpus), seconds


def score(found: Sequence[str], corpus: Corpus) -> TextScores:
    """Return the scores of translations of test sentences."""
    return score_translations(found, [pair.text for pair in corpus.test])


def row(
    system: str, store: str, corpus: Corpus, found: tuple[TextScores, float], base_seconds: float
) -> dict[str, Any]:
    """Return the row of a system on a test text, and print it."""
    scores, seconds = found
    made = {
        "system": system,
        "store": store,
        "text": corpus.name,
        "sentences": len(corpus.test),
        "bleu": scores.bleu,
        "chrf": scores.chrf,
        "seconds": seconds,
        "of the model": seconds / base_seconds,
        "signatures": [scores.bleu_signature, scores.chrf_signature],
    }
    print(json.dumps(made, ensure_ascii=False), flush=True)
    return made


class BruteForce:
    """Greedy kNN-MT from the formula: every key is compared at every step, without the library's search or votes.

    p = (1 - λ) · p_NMT + λ · Σ over the k nearest keys of softmax(-d² / τ) at their values. Keys are the inputs of the
    last decoder layer's first FFN matrix, read with plain hooks.
    """

    def __init__(self, vanilla: Mixture, pairs: Sequence[Document], options: argparse.Namespace) -> None:
        assert isinstance(vanilla.lm, Seq2SeqLM)
        assert vanilla.knn is not None
        assert vanilla.lmbda is not None
        self.lm, self.lmbda, self.batch = vanilla.lm, vanilla.lmbda, options.batch
        self.k, self.knn_temperature = vanilla.knn.k, vanilla.knn.knn_temperature
        self.model: Any = self.lm.model
        self.tokenizer: Any = self.lm.tokenizer
        self.captured: list[Tensor] = []
        layer = self.model.get_decoder().layers[-1].fc1
        layer.register_forward_pre_hook(lambda _, inputs: self.captured.append(inputs[0]))
        keys, values = zip(*self._read(pairs), strict=True)
        self.keys = torch.cat(keys).half().float()  # rounded, as they are stored
        self.values, self.squares = torch.cat(values), self.keys.square().sum(1)

    @torch.no_grad()
    def _read(self, pairs: Sequence[Document]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and the next tokens of all positions of the targets."""
        pad, start = self.model.config.pad_token_id, self.model.config.decoder_start_token_id
        for begin in range(0, len(pairs), 64):
            some = pairs[begin : begin + 64]
            sources = self._encode([pair.source_text or "" for pair in some])
            targets = self._encode([pair.text for pair in some])["input_ids"]
            read = torch.cat([torch.full_like(targets[:, :1], start), targets[:, :-1]], 1)
            self.captured.clear()
            self.model(**sources, decoder_input_ids=read)
            real = targets != pad
            yield self.captured.pop().float()[real], targets[real]

    def _encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        rows = self.tokenizer(list(texts), padding=True, return_tensors="pt", return_token_type_ids=False)
        return {name: tensor.to(self.lm.device) for name, tensor in rows.items()}

    def translate(self, sources: Sequence[str]) -> list[str]:
        """Return greedy translations, one batch after the other."""
        found: list[str] = []
        for begin in range(0, len(sources), self.batch):
            found += self._translate(sources[begin : begin + self.batch])
        return found

    @torch.no_grad()
    def _translate(self, sources: Sequence[str]) -> list[str]:
        inputs = self._encode(sources)
        encoded = self.model.get_encoder()(**inputs)
        config = self.model.config
        written = torch.full((len(sources), 1), config.decoder_start_token_id, device=self.lm.device)
        ended = torch.zeros(len(sources), dtype=torch.bool, device=self.lm.device)
        for _ in range(NEW_TOKENS):
            self.captured.clear()
            logits = self.model(
                encoder_outputs=encoded, attention_mask=inputs["attention_mask"], decoder_input_ids=written
            ).logits[:, -1]
            mixed = self._mixed(self.captured.pop()[:, -1].float(), logits.float().softmax(1))
            mixed[:, config.pad_token_id] = 0  # Marian never writes it
            following = mixed.argmax(1)
            written = torch.cat([written, following.where(~ended, config.pad_token_id)[:, None]], 1)
            ended |= following == config.eos_token_id
            if bool(ended.all()):
                break
        texts = self.tokenizer.batch_decode(written[:, 1:].tolist(), skip_special_tokens=True)
        return [str(text).strip() for text in texts]

    def _mixed(self, queries: Tensor, probabilities: Tensor) -> Tensor:
        distances = self.squares - 2 * queries @ self.keys.T + queries.square().sum(1)[:, None]
        nearest = distances.topk(min(self.k, len(self.keys)), largest=False)
        votes = torch.softmax(-nearest.values / self.knn_temperature, 1)
        by_token = torch.zeros_like(probabilities).scatter_add_(1, self.values[nearest.indices], votes)
        return (1 - self.lmbda) * probabilities + self.lmbda * by_token


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table and the signatures."""
    print("\n| store | system | text | sentences | BLEU | chrF | seconds | of the model |")
    print("|---|---|---|---|---|---|---|---|")
    for each in rows:
        figures = f"{each['bleu']:.2f} | {each['chrf']:.2f} | {each['seconds']:.1f} | {each['of the model']:.2f}"
        print(f"| {each['store']} | {each['system']} | {each['text']} | {each['sentences']:,} | {figures} |")
    print("\n".join(rows[0]["signatures"] if rows else []))


if __name__ == "__main__":
    main()
