"""Read text with a decoder-only model: hidden states and next-token logits. Knows nothing about stores or memories.

A key is the hidden state at one place of the model (see `key_layers`) at the position that predicts a token. Keys and
logits come out of one forward pass through ordinary hooks; nothing of the model is replaced, and outside a call of
this class the model behaves as if the class did not exist.

Which attention passes of ever-changing shapes use. Knows nothing about what is read.

cuDNN's plans for a tenth of a second at each shape that it has not seen. Windows of a training, and the growing text of
a generation, are of another shape nearly every time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from knnlm.errors import ModelError, ParameterError
from knnlm.lm import loading as bundled
from knnlm.lm.detokenizer import token_texts
from knnlm.lm.fingerprint import config_facts, tokenizer_fingerprint, weights_fingerprint
from knnlm.lm.key_layers import PLACES, KeyLayer, check_causal, find_key_layer
from knnlm.lm.loading import _dtype, choose_device, load
from knnlm.lm.windows import Window, WindowShape, batches, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def for_any_shape(device: torch.device) -> AbstractContextManager[None]:
    """Let passes on a GPU do without cuDNN's attention."""
    return sdpa_kernel(_ANY_SHAPE) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class Reading:
    """What one batch of windows gave: for each scored position its row, key, target and, if asked for, logits."""

    rows: Tensor  # (N,) numbers of the targets, counted through all documents of the call
    keys: Tensor  # (N, D) float32
    targets: Tensor  # (N,)
    logits: Tensor | None  # (N, V)


class CausalLM:
    """A decoder, its tokenizer, and the place its keys are read from."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        key_layer: str = PLACES[0],
        layer: int = -1,
    ) -> None:
        check_causal(model)
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.key_layer = find_key_layer(model, key_layer, layer)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.start_token = _start_token(tokenizer)

    @classmethod
    def open(
        cls,
        name: str = bundled.NAME,
        *,
        key_layer: str = PLACES[0],
        layer: int = -1,
        device: str = "auto",
        dtype: str = "auto",
    ) -> CausalLM:
        """Open the bundled model, a local folder, a .gguf file or a hub name."""
        where = choose_device(device)
        precision = _dtype(dtype, where)
        if Path(name).exists():
            # A store remembers this name, and may be opened from another folder.
            name = str(Path(name).resolve())
        model, tokenizer = load(name, dtype=precision)
        return cls(model.to(where), tokenizer, name=name, key_layer=key_layer, layer=layer)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.model.device

    @property
    def dtype(self) -> str:
        """The precision of the model, by the name that `open` takes."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def width(self) -> int:
        """The number of dimensions of a key."""
        return self.key_layer.width

    @property
    def longest(self) -> int | None:
        """The most tokens that the model can read at once, None where its positions have no end."""
        config = self.model.config.get_text_config()
        # Relative positions (ALiBi) have no end, whatever number the configuration carries.
        if getattr(config, "alibi", False):
            return None
        limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
        return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a store must remember of the model that made its keys."""
        return {
            "name": self.name,
            "class": type(self.model).__name__,
            "weights": weights_fingerprint(self.model),
            "config": config_facts(self.model),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "start_token": self.start_token,
            "vocab_size": self.vocab_size,
            "width": self.width,
            "key_layer": self.key_layer.place,
            "layer": self.key_layer.layer,
            "layers": self.key_layer.layers,
            "key_module": self.key_layer.module,
        }

    def window(self, context: int | None = None, stride: int | None = None) -> WindowShape:
        """Choose the window: 1,024 tokens, moved on by half, or what the model can read if that is less."""
        if context is not None and self.longest is not None and context > self.longest:
            raise ParameterError(
                f"context {context:,} is longer than the {self.longest:,} tokens that {self.name} can read at once. "
                f"Use --context {self.longest} or less."
            )
        context = context if context is not None else min(1024, self.longest or 1024)
        return WindowShape(context, stride if stride is not None else max(1, context // 2))

    def with_own_tokenizer(self) -> CausalLM:
        """Give the same model with a copy of its tokenizer, which only one thread may use at a time."""
        made = copy.copy(self)
        made.tokenizer = copy.deepcopy(self.tokenizer)
        return made

    def encode(self, text: str) -> list[int]:
        """Turn text into tokens, without special ones."""
        _check_text(text)
        # verbose=False: a document may be longer than the model reads at once; windows see to that.
        return self._checked(list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn many texts into tokens, each as `encode` does, on all cores where the tokenizer can."""
        for text in texts:
            _check_text(text)
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [self._checked(list(tokens)) for tokens in encoded]

    def _checked(self, tokens: list[int]) -> list[int]:
        # Some tokenizers have a few more tokens than their model, for pictures say; that is fine until one is used.
        if tokens and max(tokens) >= self.vocab_size:
            raise ModelError(
                f"The tokenizer of {self.name} gives token {max(tokens):,}, but the model has only {self.vocab_size:,}"
                ": they do not belong together."
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn tokens into text, as they were."""
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; a character of several tokens is the text of the last of them."""
        return token_texts(tokens, self.decode)

    def prompt(self, text: str, *, room: int = 0, longest: int | None = None) -> list[int]:
        """Turn the beginning of a document into tokens, and refuse one that leaves no room for what is to follow.

        `longest` is what others who read along can read at once, if that is less than what this model can.
        """
        tokens = [self.start_token, *self.encode(text)]
        limits = [limit for limit in (self.longest, longest) if limit is not None]
        if limits and len(tokens) + room > min(limits):
            raise ParameterError(
                f"The prompt has {len(tokens):,} tokens and {room:,} more are wanted, but {self.name} can read only "
                f"{min(limits):,}. Shorten the prompt, or ask for fewer new tokens."
            )
        return tokens

    def read(
        self,
        documents: Sequence[Sequence[int]],
        shape: WindowShape,
        *,
        batch_tokens: int = 2048,
        logits: bool = True,
    ) -> Iterator[Reading]:
        """Read documents in windows of like length; the rows of a reading say which targets it holds."""
        ready: list[Window] = []
        row = 0
        for document in documents:
            ready.extend(windows(document, shape, start_token=self.start_token, row=row))
            row += len(document)
        for batch in batches(ready, batch_tokens):
            (keys,), output = self.read_batch(batch, [self.key_layer], logits=logits)
            rows, targets = expected(batch)
            yield Reading(rows=rows, keys=keys, targets=targets.to(self.device), logits=output)

    @torch.inference_mode()
    def read_batch(
        self, batch: Sequence[Window], layers: Sequence[KeyLayer], *, logits: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """Give the (N, D) keys at each of the layers, and the (N, V) logits, of the scored positions of windows."""
        longest = len(batch[0])
        # Padding goes to the right, where no earlier position looks, so no mask is needed.
        ids = torch.full((len(batch), longest), self.start_token)
        scored = torch.zeros(len(batch), longest, dtype=torch.bool)
        for i, window in enumerate(batch):
            ids[i, : len(window)] = torch.as_tensor(window.tokens)
            scored[i, window.scored - window.begin : len(window)] = True
        scored = scored.to(self.device)
        keys, output = self.forward(ids.to(self.device), layers, logits=logits)
        return [key[scored].float() for key in keys], None if output is None else output[scored]

    def forward(
        self, ids: Tensor, layers: Sequence[KeyLayer] | None = None, *, logits: bool = True
    ) -> tuple[list[Tensor], Tensor | None]:
        """Give keys (B, T, D) at each of the layers and logits (B, T, V) of a batch.

        Without logits, the pass ends at the key layer if there is only one: the LM head never runs.
        """
        layers = [self.key_layer] if layers is None else layers
        kept: list[list[Tensor]] = []
        output = None
        with evaluating(self.model), ExitStack() as hooks:
            kept.extend(hooks.enter_context(layer.capture(stop=not logits and len(layers) == 1)) for layer in layers)
            output = self.model(input_ids=ids, use_cache=False)
        return [keys[-1] for keys in kept], output.logits if logits and output is not None else None


def _check_text(text: str) -> None:
    """Refuse what is no Unicode: a lone half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(f"The text is not Unicode at character {error.start}: give it as UTF-8.") from None


def expected(batch: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """Give the (N,) rows and the (N,) targets of the scored positions of windows."""
    rows = torch.cat([torch.arange(window.row, window.row + len(window.targets)) for window in batch])
    return rows, torch.cat([torch.as_tensor(window.targets) for window in batch])


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Switch dropout off for a while, and leave every module as it was."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _start_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Choose what a document begins with: BOS, or EOS where there is no BOS."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise ModelError(
        "The tokenizer has neither a BOS nor an EOS token, so a document has nothing to begin with. "
        "Set tokenizer.bos_token."
    )
