"""Translation with stores of pairs: BLEU and chrF in and outside of their domains, and the time of a sentence.

    python benchmarks/translation.py GENERAL DOMAIN... --model FOLDER --train-seconds 180 --device cuda --batch 256
    python benchmarks/translation.py GENERAL DOMAIN... --model FOLDER --systems gated,ivf-pq --sentences 200
    python benchmarks/translation.py GENERAL DOMAIN --width 64 --layers 1 --train-seconds 60 --pairs 300 --sentences 50

GENERAL and DOMAIN are folders with train, valid and test .jsonl (also .gz, .xz, .zst), a pair a line: the translation
in `text`, its source in `source`. A small Marian model is trained on the train pairs of GENERAL for a time, or opened
from --model where it was saved before, and then stays as it is. A store of each DOMAIN is built from train and tuned on
valid, the weight of the store by the BLEU of --quality translations. Systems, all greedy, each on the test sentences of
its own domain and of GENERAL:

- model: without a store.
- vanilla: the kNN-MT of the paper, with one λ; vanilla-end: with the odds of the end token chosen as those of gated.
- brute-force: the same from the formula, without the library's search and votes.
- gated: what `tune` chooses; gated-other: with the valid pairs of GENERAL as text of another domain.
- subset: as gated-other, but each sentence searches only the pairs with the nearest sources (--subset).
- together: all stores at once, each with the weights of gated-other; a source is translated with one of them.
- fine-tuned: the model after training on the domain's train pairs, in plain torch.
- decoder: the model after `distill --into decoder` on the store, alone; gated-decoder: as gated-other, with the model,
  the store and this decoder (--memories knn,decoder=FOLDER).
- ivf-pq: the recipe of knn-transformers, an IVF4096,PQ64 index of FAISS on the CPU with 32 probes and distances from
  the codes, with k, τ and λ of vanilla; ivf-pq-1024: with k = 1024, τ = 100 and λ = 0.25, its default and its README's.

Scores are those of sacreBLEU, whose signatures are printed. Times are of the first --timed test sentences of each
domain in batches of --timed-batch, the systems in turns: a sentence as it is translated, and a step when all write 32
tokens. On a CPU, stores have the index that `knnlm index` builds; on a GPU they are searched exactly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import knnlm
from knnlm.corpus import Document, read_documents
from knnlm.datastore.store import Datastore
from knnlm.evaluation.odds import ChosenOdds, OddsSearch
from knnlm.evaluation.quality import TextScores, score_translations
from knnlm.evaluation.tune import Tuning, apply_tuning
from knnlm.index.base import Neighbours
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.mixture.weights import multiply_odds
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model
from marian import TrainingConfig, fine_tune, open_or_train

NEW_TOKENS = 128  # of a translation, at most
TIMED_TOKENS = 32  # of a translation whose steps are timed
SYSTEMS = (
    "vanilla",
    "brute-force",
    "gated",
    "gated-other",
    "together",
    "fine-tuned",
    "vanilla-end",
    "subset",
    "decoder",
    "gated-decoder",
    "ivf-pq",
    "ivf-pq-1024",
)
DEFAULT_SYSTEMS = SYSTEMS[:7]
Translate = Callable[[Sequence[str]], list[str]]
Row = dict[str, Any]


def main() -> None:
    options = parse()
    general = Corpus(options.general, options)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(options.train_seconds, batch_tokens=options.batch_tokens)
        size = {"vocabulary": options.vocabulary, "width": options.width, "layers": options.layers}
        lm = open_or_train(
            options.model or Path(folder) / "model", general.train, config, device=options.device, **size
        )
        run = Run(lm, general, [Corpus(path, options) for path in options.domain], Path(folder), options)
        rows, times = list(run.qualities()), run.times
    if options.json:
        options.json.write_text(json.dumps({"quality": rows, "times": times}, indent=2, ensure_ascii=False))
    show(rows, times)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("general", type=Path, metavar="GENERAL")
    parser.add_argument("domain", type=Path, nargs="+", metavar="DOMAIN")
    parser.add_argument("--model", type=Path, help="folder of the base model; it is trained and saved there if missing")
    parser.add_argument("--systems", default=",".join(DEFAULT_SYSTEMS), help=f"some of {','.join(SYSTEMS)}")
    parser.add_argument("--train-seconds", type=float, default=180)
    parser.add_argument("--tune-seconds", type=float, default=60, help="of fine-tuning on each domain")
    parser.add_argument("--decoder-epochs", type=int, default=3, help="of the decoder")
    parser.add_argument("--batch-tokens", type=int, default=16_384, help="tokens of a training batch")
    parser.add_argument("--vocabulary", type=int, default=12_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4, help="of the encoder, and as many of the decoder")
    parser.add_argument("--pairs", type=int, help="pairs of train, of each corpus (default: all)")
    parser.add_argument("--valid", type=int, default=2000, help="pairs of valid to tune on")
    parser.add_argument("--quality", type=int, default=600, help="of these, translated to choose the stores' weight")
    parser.add_argument("--sentences", type=int, help="sentences of test (default: all)")
    parser.add_argument("--batch", type=int, default=32, help="sentences that are translated together")
    parser.add_argument("--k", type=int, default=16, help="neighbours of vanilla kNN-MT")
    parser.add_argument("--subset", type=int, default=512, help="pairs that a sentence of subset searches")
    parser.add_argument("--timed", type=int, default=256, help="sentences that are timed; 0: none")
    parser.add_argument("--timed-batch", type=int, default=32, help="sentences of a batch that is timed")
    parser.add_argument("--repeats", type=int, default=3, help="turns of the timing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the rows into this file")
    options = parser.parse_args()
    options.systems = options.systems.split(",")
    if unknown := sorted(set(options.systems) - set(SYSTEMS)):
        parser.error(f"no system is named {unknown[0]}; there are {', '.join(SYSTEMS)}")
    if "together" in options.systems and "gated-other" not in options.systems:
        parser.error("together uses the stores as gated-other tuned them: name both")
    return options


class Corpus:
    """The pairs of a folder."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.name = path.name
        self.train = list(islice(self._split(path, "train"), options.pairs))
        self.valid = list(islice(self._split(path, "valid"), options.valid))
        self.test = list(islice(self._split(path, "test"), options.sentences))

    @property
    def test_sources(self) -> list[str]:
        """The sources of the test pairs."""
        return [pair.source_text or "" for pair in self.test]

    @staticmethod
    def _split(path: Path, name: str) -> Iterator[Document]:
        files = sorted(path.glob(f"{name}.jsonl*"))
        if not files:
            raise SystemExit(f"{path} has no {name}.jsonl")
        return read_documents(files[0], source_field="source")


@dataclass
class Run:
    """A base model, its corpora, and what was measured."""

    lm: Seq2SeqLM
    general: Corpus
    domains: Sequence[Corpus]
    folder: Path
    options: argparse.Namespace

    def __post_init__(self) -> None:
        self.times: list[Row] = []
        store = knnlm.build(self.general.train[:4], self.folder / "plain", lm=self.lm)
        self.plain = Mixture.open(store, self.lm, lmbda=0.0)

    def qualities(self) -> Iterator[Row]:
        """Yield a row for each system and test text, and keep the rows of the times."""
        for corpus in (self.general, *self.domains):
            yield self.row("model", "–", corpus, self.translator(self.plain, use_memory=False))
        for domain in self.domains:
            yield from self.qualities_of(domain)
        if "together" in self.options.systems and len(self.domains) > 1:
            together = self.together()
            names = " and ".join(domain.name for domain in self.domains)
            for corpus in (*self.domains, self.general):
                yield self.row("together", names, corpus, self.translator(together))

    def qualities_of(self, domain: Corpus) -> Iterator[Row]:
        """Yield the rows of the systems of one domain."""
        self.build(domain)
        mixtures = self.mixtures(domain)
        systems = {name: self.translator(mixture) for name, mixture in mixtures.items()}
        if "brute-force" in self.options.systems:
            settings = VoteSettings.of(mixtures["vanilla"])
            systems["brute-force"] = BruteForce(self.lm, domain.train, settings, batch=self.options.batch).translate
        if "fine-tuned" in self.options.systems:
            systems["fine-tuned"] = self.translator(self.fine_tuned(domain), use_memory=False)
        for name, translate in systems.items():
            if name in self.options.systems:
                for corpus in (domain, self.general):
                    yield self.row(name, domain.name, corpus, translate)
        if self.options.timed:
            self.times += self.times_of(domain, mixtures)

    def build(self, domain: Corpus) -> None:
        """Build the store of a domain, with an index if it is searched on a CPU."""
        with closing(knnlm.build(domain.train, self.store(domain), lm=self.lm)) as store:
            if self.lm.device.type == "cpu":
                store.build_index()

    def mixtures(self, domain: Corpus) -> dict[str, Mixture]:
        """Return the tuned mixtures of a domain's store."""
        wanted, made = self.options.systems, {}
        if {"vanilla", "vanilla-end", "brute-force", "ivf-pq", "ivf-pq-1024"} & set(wanted):
            made["vanilla"] = self.opened(domain)
            tuned = made["vanilla"].tune(
                domain.valid, weights="fixed", ks=[self.options.k], online=False, quality=self.options.quality
            )
            print(f"{domain.name}: {tuned.sweep.best if tuned.sweep else None}, {odds_of(tuned.odds)}", flush=True)
            if "vanilla-end" in wanted:
                made["vanilla-end"] = self.with_end_odds(domain, tuned)
        if "gated" in wanted:
            made["gated"] = self.opened(domain)
            tuned = made["gated"].tune(domain.valid, quality=self.options.quality)
            print(f"{domain.name}, gated: {odds_of(tuned.odds)}", flush=True)
        if {"decoder", "gated-decoder"} & set(wanted):
            decoder = self.decoder(domain)
            made["decoder"] = self.opened(domain, f"decoder={decoder}:1")
            made["gated-decoder"] = self.opened(domain, f"knn,decoder={decoder}")
        if "subset" in wanted:
            made["subset"] = self.opened(domain, subset=self.options.subset)
        if "gated-other" in wanted:
            made["gated-other"] = self.opened(domain)
        # The last tuning of the same memories stays in the store, for `together`.
        for name in ("gated-decoder", "subset", "gated-other"):
            if name in wanted:
                tuned = made[name].tune(domain.valid, other=self.general.valid, quality=self.options.quality)
                print(f"{domain.name}, {name}: {odds_of(tuned.odds)}", flush=True)
        return made | self.recipes(domain, made.get("vanilla"))

    def opened(self, domain: Corpus, memories: str = "knn", subset: int | None = None) -> Mixture:
        """Return a mixture of a domain's store that is not tuned."""
        config = MixtureOptions(subset=subset)
        return Mixture.open(self.store(domain), self.lm, memories=memories, use_tuned=False, options=config)

    def decoder(self, domain: Corpus) -> Path:
        """Train a decoder on the pairs of a domain's store, and return its folder."""
        folder = self.folder / f"{domain.name}.decoder"
        config = DecoderConfig(epochs=self.options.decoder_epochs)
        initial = open_initial_model(self.lm.name, like=self.lm)
        with closing(Datastore.open(self.store(domain))) as store:
            card = train_decoder(store, initial, folder, config, device=self.options.device)
        print(f"{domain.name}: a decoder, {card.steps} steps in {card.seconds:.0f} s", flush=True)
        return folder

    def with_end_odds(self, domain: Corpus, tuned: Tuning) -> Mixture:
        """Return the mixture of fixed weights that were tuned, with odds of the end token chosen on the same pairs."""
        mixture = self.opened(domain)
        apply_tuning(mixture, tuned)
        if tuned.odds is None:
            return mixture
        held_out = domain.valid[tuned.documents :]
        settings, fitted = [spec.settings for spec in tuned.specs], multiply_odds(tuned.weights, 1 / tuned.odds.factor)
        chosen = OddsSearch(mixture, held_out).choose_end(settings, fitted, tuned.odds)
        mixture.weights, mixture.end_odds = chosen.weights, chosen.end_odds
        print(f"{domain.name}, vanilla-end: {odds_of(chosen)}", flush=True)
        return mixture

    def recipes(self, domain: Corpus, vanilla: Mixture | None) -> dict[str, Mixture]:
        """Return the mixtures that search the usual index of other implementations."""
        names = [name for name in ("ivf-pq", "ivf-pq-1024") if name in self.options.systems]
        if not names or vanilla is None or vanilla.knn is None:
            return {}
        made: dict[str, Mixture] = {}
        index = UsualIndex(vanilla.knn.store)
        for name in names:
            settings = VoteSettings(1024, 100.0, 0.25) if name == "ivf-pq-1024" else VoteSettings.of(vanilla)
            made[name] = Mixture.open(self.store(domain), self.lm, memories="knn", use_tuned=False, **vars(settings))
            knn = made[name].knn
            assert knn is not None
            knn.index = index
        return made

    def together(self) -> Mixture:
        """Return the mixture of all stores, each with the settings and weights of gated-other."""
        first, *others = [self.store(domain) for domain in self.domains]
        return Mixture.open(first, self.lm, memories=",".join(["knn", *(f"knn={other}" for other in others)]))

    def fine_tuned(self, domain: Corpus) -> Mixture:
        """Return the model after training on the pairs of a domain."""
        config = TrainingConfig(self.options.tune_seconds, learning_rate=2e-4, batch_tokens=self.options.batch_tokens)
        folder = self.folder / f"{domain.name}.tuned"
        lm = fine_tune(self.lm, folder, domain.train, config, device=self.options.device)
        return Mixture.open(knnlm.build(domain.train[:4], self.folder / f"{domain.name}.alone", lm=lm), lm)

    def store(self, domain: Corpus) -> Path:
        """Return the path of a domain's store."""
        return self.folder / f"{domain.name}.store"

    def translator(self, mixture: Mixture, **settings: Any) -> Translate:
        """Return greedy translation by a mixture."""
        settings = {"batch_size": self.options.batch, "max_new_tokens": NEW_TOKENS, **settings}
        return lambda sources: mixture.translate(sources, num_beams=1, do_sample=False, **settings)

    def row(self, system: str, store: str, corpus: Corpus, translate: Translate) -> Row:
        """Translate a test text, and return the row of it, and print it."""
        begin = time.perf_counter()
        scores = score(translate(corpus.test_sources), corpus)
        made = {
            "system": system,
            "store": store,
            "text": corpus.name,
            "sentences": len(corpus.test),
            "bleu": scores.bleu,
            "chrf": scores.chrf,
            "seconds": time.perf_counter() - begin,
            "signatures": [scores.bleu_signature, scores.chrf_signature],
        }
        print(json.dumps(made, ensure_ascii=False), flush=True)
        return made

    def times_of(self, domain: Corpus, mixtures: dict[str, Mixture]) -> list[Row]:
        """Return the times of a sentence and of a step by the model and each mixture, in turns."""
        sources = domain.test_sources[: self.options.timed]
        batch = {"batch_size": self.options.timed_batch}
        fixed = {**batch, "max_new_tokens": TIMED_TOKENS, "min_new_tokens": TIMED_TOKENS}
        steps = -(-len(sources) // self.options.timed_batch) * TIMED_TOKENS
        systems = {"model": (self.plain, False), **{name: (mixture, True) for name, mixture in mixtures.items()}}
        sentence: dict[str, list[float]] = {name: [] for name in systems}
        step: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(self.options.repeats + 1):  # the first one compiles kernels
            for name, (mixture, use_memory) in systems.items():
                as_it_is = self.translator(mixture, use_memory=use_memory, **batch)
                sentence[name].append(seconds_of(as_it_is, sources) / len(sources))
                step[name].append(seconds_of(self.translator(mixture, use_memory=use_memory, **fixed), sources) / steps)
        made = []
        for name in systems:
            own = statistics.median(sentence[name][1:]), statistics.median(step[name][1:])
            base = statistics.median(sentence["model"][1:]), statistics.median(step["model"][1:])
            ratios = {"sentence of the model": own[0] / base[0], "step of the model": own[1] / base[1]}
            made.append({"store": domain.name, "system": name, "sentence": own[0], "step": own[1], **ratios})
            print(json.dumps(made[-1]), flush=True)
        return made


def odds_of(odds: ChosenOdds | None) -> str:
    """Describe the choice of the odds by BLEU."""
    if odds is None:
        return "as fitted"
    tried = [(own.max_k, own.factor, own.end_odds, round(own.bleu, 2)) for own in odds.figures]
    return f"odds × {odds.factor:g}, of the end × {odds.end_odds:g}, of (k, odds, end, BLEU) {tried}"


def seconds_of(translate: Translate, sources: Sequence[str]) -> float:
    """Return the seconds of translating sources."""
    begin = time.perf_counter()
    translate(sources)
    return time.perf_counter() - begin


def score(found: Sequence[str], corpus: Corpus) -> TextScores:
    """Return the scores of translations of test sentences."""
    return score_translations(found, [pair.text for pair in corpus.test])


@dataclass(frozen=True)
class VoteSettings:
    """Neighbours, temperature and weight of the store in vanilla kNN-MT."""

    k: int
    knn_temperature: float
    lmbda: float

    @classmethod
    def of(cls, mixture: Mixture) -> VoteSettings:
        """Return the settings of a mixture with one λ."""
        assert mixture.knn is not None
        assert mixture.lmbda is not None
        return cls(mixture.knn.k, mixture.knn.knn_temperature, mixture.lmbda)


class UsualIndex:
    """The usual FAISS index of kNN-LM implementations, over the keys of a store."""

    metric = "l2"

    def __init__(self, store: Datastore, spec: str | None = None) -> None:
        from baselines import USUAL_SPEC, usual_index  # FAISS is not on every machine that translates

        keys = np.concatenate([keys.numpy() for _, keys in store.chunks(1 << 16)])
        self.index = usual_index(keys, spec or USUAL_SPEC).index

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Return the k nearest of each of (N, D) queries, by the distances of their codes."""
        distances, nearest = (torch.from_numpy(found) for found in self.index.search(queries.cpu().float().numpy(), k))
        distances = distances.masked_fill(nearest < 0, torch.inf)
        return Neighbours(nearest.to(queries.device), distances.to(queries.device))


class BruteForce:
    """Greedy kNN-MT from the formula: every key is compared at every step, without the library's search or votes.

    p = (1 - λ) · p_NMT + λ · Σ over the k nearest keys of softmax(-d² / τ) at their values. Keys are the inputs of the
    last decoder layer's first FFN matrix, read with plain hooks.
    """

    def __init__(self, lm: Seq2SeqLM, pairs: Sequence[Document], settings: VoteSettings, *, batch: int) -> None:
        self.lm, self.settings, self.batch = lm, settings, batch
        self.model: Any = self.lm.model
        self.tokenizer: Any = self.lm.tokenizer
        self.captured: list[Tensor] = []
        layer = self.model.get_decoder().layers[-1].fc1
        layer.register_forward_pre_hook(lambda _, inputs: self._capture(inputs[0]))
        keys, values = zip(*self._read(pairs), strict=True)
        self.keys = torch.cat(keys).half().float()  # rounded, as they are stored
        self.values, self.squares = torch.cat(values), self.keys.square().sum(1)

    def _capture(self, keys: Tensor) -> None:
        self.captured[:] = [keys]  # the last ones alone: other systems run the same model

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
        rows = self.tokenizer(
            list(texts), padding=True, truncation=True, return_tensors="pt", return_token_type_ids=False
        )
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
        distances, nearest = self._search(queries, min(self.settings.k, len(self.keys)))
        votes = torch.softmax(-distances / self.settings.knn_temperature, 1)
        by_token = torch.zeros_like(probabilities).scatter_add_(1, self.values[nearest], votes)
        return (1 - self.settings.lmbda) * probabilities + self.settings.lmbda * by_token

    def _search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the (B, k) distances and numbers of the nearest keys."""
        every = self.squares - 2 * queries @ self.keys.T + queries.square().sum(1)[:, None]
        found = every.topk(k, largest=False)
        return found.values, found.indices


def show(rows: Sequence[Row], times: Sequence[Row]) -> None:
    """Print the tables and the signatures."""
    print("\n| store | system | text | sentences | BLEU | chrF | seconds |")
    print("|---|---|---|---|---|---|---|")
    for each in rows:
        figures = f"{each['bleu']:.2f} | {each['chrf']:.2f} | {each['seconds']:.1f}"
        print(f"| {each['store']} | {each['system']} | {each['text']} | {each['sentences']:,} | {figures} |")
    print("\n".join(rows[0]["signatures"] if rows else []))
    if times:
        print("\n| store | system | ms a sentence | of the model | ms a step | of the model |")
        print("|---|---|---|---|---|---|")
    for each in times:
        sentence = f"{1000 * each['sentence']:.2f} | {each['sentence of the model']:.2f}"
        step = f"{1000 * each['step']:.2f} | {each['step of the model']:.2f}"
        print(f"| {each['store']} | {each['system']} | {sentence} | {step} |")


if __name__ == "__main__":
    main()
