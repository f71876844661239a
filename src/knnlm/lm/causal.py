"""Read text with a decoder-only model: hidden states and next-token logits.

A key is the hidden state at one place of the model (see `key_layers`) at the position that predicts a token. Keys and
logits come from one forward pass with ordinary hooks; the model itself is not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from knnlm.errors import ModelError, ParameterError
from knnlm.lm.detokenizer import token_texts
from knnlm.lm.fingerprint import relevant_config, tokenizer_fingerprint, weights_fingerprint
from knnlm.lm.key_layers import KeyLayer, check_causal, find_key_layer
from knnlm.lm.loading import BUNDLED, choose_device, choose_dtype, load_model
from knnlm.lm.windows import Window, WindowShape, batches, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_CONTEXT = 1024

_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class KeyBatch:
    """The scored positions of a batch of windows: row numbers, keys, targets and, if requested, logits."""

    rows: Tensor  # (N,) numbers of the targets, counted through all documents of the call
    keys: Tensor  # (N, D) float32
    targets: Tensor  # (N,)
    logits: Tensor | None  # (N, V)


class TextDocument(Protocol):
    """What a model reads of a document: its text and, for an encoder-decoder model, the text that it translates."""

    @property
    def source(self) -> str:
        """Where the document comes from, for messages."""

    @property
    def text(self) -> str:
        """The text, of a pair the target."""

    @property
    def source_text(self) -> str | None:
        """The source of a pair; None otherwise."""

    @property
    def cut_off(self) -> bool:
        """Whether the text goes on, so that no end token follows a target."""


class CausalLM:
    """A decoder, its tokenizer, and the place where its keys are captured."""

    has_encoder = False  # whether documents are pairs of a source and a target
    reads_audio = False  # whether the sources of pairs are sound files
    prefix_tokens: tuple[int, ...] = ()  # that are read before the start token of a text, and are no part of it

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        key_layer: str | None = None,
        layer: int = -1,
    ) -> None:
        self._check(model)
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.key_layer = find_key_layer(model, key_layer, layer)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.start_token = _start_token(tokenizer)

    @staticmethod
    def _check(model: PreTrainedModel) -> None:
        """Raise an error for a model of another kind."""
        check_causal(model)

    @classmethod
    def open(
        cls,
        name: str = BUNDLED,
        *,
        key_layer: str | None = None,
        layer: int = -1,
        device: str = "auto",
        dtype: str = "auto",
    ) -> CausalLM:
        """Open the bundled model, a local folder, a .gguf file or a hub name."""
        name, model, tokenizer = open_on_device(name, device, dtype)
        return cls(model, tokenizer, name=name, key_layer=key_layer, layer=layer)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def dtype(self) -> str:
        """The dtype of the model, by the name that `open` takes."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def width(self) -> int:
        """The number of dimensions of a key."""
        return self.key_layer.width

    @property
    def max_length(self) -> int | None:
        """The maximal number of tokens of one pass, None where positions are unlimited."""
        config = self.model.config.get_text_config()
        # Relative positions (ALiBi) are unlimited, whatever number the configuration contains.
        if getattr(config, "alibi", False):
            return None
        limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
        return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)

    @property
    def max_source_length(self) -> int | None:
        """The maximal number of tokens of a source; None: unlimited, or there are no sources."""
        return None

    @property
    def languages(self) -> dict[str, Any]:
        """The options of `open` that name the languages of the model; a decoder-only model has none."""
        return {}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What identifies the model and its key layer; stores record it."""
        return {
            "name": self.name,
            "class": type(self.model).__name__,
            "weights": weights_fingerprint(self.model),
            "config": relevant_config(self.model),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "start_token": self.start_token,
            "vocab_size": self.vocab_size,
            "width": self.width,
            "key_layer": self.key_layer.place,
            "layer": self.key_layer.layer,
            "layers": self.key_layer.layers,
            "key_module": self.key_layer.module,
        }

    def find_layer(self, place: str, layer: int) -> KeyLayer:
        """Return a place in a layer of the model; negative layers count from the last."""
        own = self.key_layer
        known = (own.place, own.layer) == (place, layer % own.layers)
        return own if known else find_key_layer(self.model, place, layer)

    def window(self, context: int | None = None, stride: int | None = None) -> WindowShape:
        """Return the window shape: by default 1,024 tokens, or the maximal length, shifted by half of them."""
        if context is not None and self.max_length is not None and context > self.max_length:
            raise ParameterError(
                f"context {context:,} is longer than the {self.max_length:,} tokens that {self.name} can read at once. "
                f"Use --context {self.max_length} or less."
            )
        context = context if context is not None else min(DEFAULT_CONTEXT, self.max_length or DEFAULT_CONTEXT)
        return WindowShape(context, stride if stride is not None else max(1, context // 2))

    def with_own_tokenizer(self) -> CausalLM:
        """Return the same model with a copy of its tokenizer, which only one thread may use at a time."""
        clone = copy.copy(self)
        clone.tokenizer = copy.deepcopy(self.tokenizer)
        return clone

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        check_text(text)
        # verbose=False: a document may be longer than the model reads at once, since it is cut into windows.
        return self._checked(list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))

    def encode_document(self, document: TextDocument) -> list[int]:
        """Return the tokens of a document that `read` takes."""
        _refuse_source(document, self.name)
        return self.encode(document.text)

    def encode_documents(self, documents: Sequence[TextDocument]) -> list[list[int]]:
        """Return the tokens of many documents, each as by `encode_document`."""
        for document in documents:
            _refuse_source(document, self.name)
        return self.encode_all([document.text for document in documents])

    def stored_document(self, tokens: list[int], source_text: str | None) -> list[int]:  # noqa: ARG002
        """Return stored tokens of a document as `read` takes them."""
        return tokens

    def require_text(self, what: str) -> None:
        """Raise an error if `what`, which continues or reads plain text, is impossible with this model."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text as by `encode`, and the characters that each stands for: begin and end."""
        check_text(text)
        tokens, offsets = token_offsets(self.tokenizer, text)
        return self._checked(tokens), offsets

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of many texts, each as by `encode`, on all cores where the tokenizer supports it."""
        for text in texts:
            check_text(text)
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [self._checked(list(tokens)) for tokens in encoded]

    def _checked(self, tokens: list[int], size: int | None = None) -> list[int]:
        size = self.vocab_size if size is None else size
        # Some tokenizers have a few more tokens than their model, for images say, which do no harm until they are used.
        if tokens and max(tokens) >= size:
            raise ModelError(
                f"The tokenizer of {self.name} produced token {max(tokens):,}, but the model has only "
                f"{size:,}: they do not belong together."
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without clean-up of spaces."""
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; a character of several tokens is the text of the last of them."""
        return token_texts(tokens, self.decode)

    def prompt(self, text: str, *, room: int = 0, max_length: int | None = None) -> list[int]:
        """Return the tokens of a prompt; raise an error if they leave no room for `room` more.

        `max_length` is the limit of other models that read the prompt too.
        """
        tokens = [self.start_token, *self.encode(text)]
        limits = [limit for limit in (self.max_length, max_length) if limit is not None]
        if limits and len(tokens) + room > min(limits):
            raise ParameterError(
                f"The prompt has {len(tokens):,} tokens and {room:,} more are requested, but {self.name} can read only "
                f"{min(limits):,}. Shorten the prompt, or request fewer new tokens."
            )
        return tokens

    def read(
        self,
        documents: Sequence[Sequence[int]],
        shape: WindowShape,
        *,
        batch_tokens: int = 2048,
        logits: bool = True,
    ) -> Iterator[KeyBatch]:
        """Read documents in batches of windows of similar length; `rows` tells which targets a batch contains."""
        ready: list[Window] = []
        row = 0
        for document in documents:
            ready.extend(windows(document, shape, start_token=self.start_token, row=row))
            row += len(document)
        for batch in batches(ready, batch_tokens):
            (keys,), output = self.read_batch(batch, [self.key_layer], logits=logits)
            rows, targets = scored_targets(batch)
            yield KeyBatch(rows=rows, keys=keys, targets=targets.to(self.device), logits=output)

    @torch.inference_mode()
    def read_batch(
        self,
        batch: Sequence[Window],
        layers: Sequence[KeyLayer],
        *,
        logits: bool,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the (N, D) keys of each layer and the (N, V) logits at the scored positions of windows.

        `inputs` are those of the model besides the tokens; None: those of an encoder, if it has one.
        """
        length = max(len(window) + len(self.prefix(window)) for window in batch)
        # Padding is on the right, where no earlier position attends, so no mask is needed.
        ids = torch.full((len(batch), length), self.start_token)
        scored = torch.zeros(len(batch), length, dtype=torch.bool)
        for i, window in enumerate(batch):
            tokens = [*self.prefix(window), *window.tokens]
            ids[i, : len(tokens)] = torch.as_tensor(tokens)
            scored[i, len(tokens) - (window.end - window.scored) : len(tokens)] = True
        scored = scored.to(self.device)
        inputs = self.sources(batch) if inputs is None else inputs
        keys, output = self.forward(ids.to(self.device), layers, logits=logits, sources=inputs)
        return [key[scored].float() for key in keys], None if output is None else output[scored]

    def prefix(self, window: Window) -> Sequence[int]:
        """Return the tokens that the decoder reads before the start token of a window."""
        return () if window.begin else self.prefix_tokens

    def sources(self, batch: Sequence[Window]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the inputs of the encoder for windows; none without an encoder."""
        return {}

    def forward(
        self,
        ids: Tensor,
        layers: Sequence[KeyLayer] | None = None,
        *,
        logits: bool = True,
        sources: Mapping[str, Tensor] | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the (B, T, D) keys of each layer and the (B, T, V) logits of a batch.

        `sources` are the inputs of an encoder. Without logits, the pass ends at the key layer if there is only one, and
        the LM head does not run.
        """
        layers = [self.key_layer] if layers is None else layers
        kept: list[list[Tensor]] = []
        output = None
        with eval_mode(self.model), ExitStack() as hooks:
            kept.extend(hooks.enter_context(layer.capture(stop=not logits and len(layers) == 1)) for layer in layers)
            output = self._run(ids, sources or {})
        return [keys[-1] for keys in kept], output.logits if logits and output is not None else None

    def _run(self, ids: Tensor, sources: Mapping[str, Tensor]) -> Any:  # noqa: ARG002
        """Run the model on (B, T) tokens of texts."""
        return self.model(input_ids=ids, use_cache=False)


def token_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of a text without special ones, and the characters of each: begin and end.

    Where the tokenizer does not return the characters, each token stands for none.
    """
    encoding = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=tokenizer.is_fast)
    tokens = list(encoding["input_ids"])
    return tokens, list(encoding["offset_mapping"]) if "offset_mapping" in encoding else [(0, 0)] * len(tokens)


def check_text(text: str) -> None:
    """Raise an error if a text contains half of a surrogate pair, which is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(f"The text is not Unicode at character {error.start}: give it as UTF-8.") from None


def _refuse_source(document: TextDocument, name: str) -> None:
    if document.source_text is not None:
        raise ModelError(
            f"{document.source} has a source text, which {name} would not read: it is a decoder-only model. Use an "
            "encoder-decoder model such as Marian or T5, or read the text without --source and --source-field."
        )


def scored_targets(batch: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """Return the (N,) rows and the (N,) targets of the scored positions of windows."""
    rows = torch.cat([torch.arange(window.row, window.row + len(window.targets)) for window in batch])
    return rows, torch.cat([torch.as_tensor(window.targets) for window in batch])


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Switch dropout off temporarily; every module returns to the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def open_on_device(
    name: str, device: str, dtype: str, *, encoder: bool = False
) -> tuple[str, PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, and return them with the name that a store records."""
    target = choose_device(device)
    if Path(name).exists():
        name = str(Path(name).resolve())  # the store may be opened from another folder
    model, tokenizer = load_model(name, dtype=choose_dtype(dtype, target), encoder=encoder)
    return name, model.to(target), tokenizer  # type: ignore[arg-type]


def dynamic_shape_attention(device: torch.device) -> AbstractContextManager[None]:
    """Disable cuDNN's attention on a GPU.

    cuDNN plans for a tenth of a second at each new shape. Training windows, and the growing text of a generation, have
    a new shape nearly every time.
    """
    return sdpa_kernel(_WITHOUT_CUDNN) if device.type == "cuda" else nullcontext()


def _start_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that documents begin with: BOS, or EOS where there is no BOS."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise ModelError(
        "The tokenizer has neither a BOS nor an EOS token, and documents must begin with one. Set tokenizer.bos_token."
    )
