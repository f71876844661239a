"""Tiny real models and a tiny real tokenizer, made from configurations without downloads.

Every family has width 32, 3 layers and room for 320 tokens; all weights are random, those of norms too, so
that no two norms agree and no norm is close to the identity.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 320
WIDTH = 32
LAYERS = 3

EOS, BOS = "<eos>", "<bos>"

TEXT = """
The memory of a model is a list of contexts, and each context remembers the token that came after it. When
the model reads a new context, it looks for old contexts that are near, and lets them vote. The near ones
speak loudly, the far ones softly. A model that has a memory can learn a new fact without training: the fact
is written down once, and it is found again when it is needed. In 1998 the library had 20 rooms; in 2024 it
has 3. "Where are the others?" asked Anna. "They are closed," said the librarian, "but the books are still
there, and you may read them."
""".strip()


def _config(name: str, **options: object) -> hf.PretrainedConfig:
    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    return hf.CONFIG_MAPPING[name](**{**common, **options})


def _long(name: str, **options: object) -> Callable[[], hf.PreTrainedModel]:
    """A family whose configuration uses the long names."""
    shape = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "max_position_embeddings": 128,
    }
    return lambda: hf.AutoModelForCausalLM.from_config(_config(name, **{**shape, **options}))


def _short(name: str, **options: object) -> Callable[[], hf.PreTrainedModel]:
    """A family whose configuration uses names of its own."""
    return lambda: hf.AutoModelForCausalLM.from_config(_config(name, **options))


_GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 128}
_FALCON = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_OPT = {"ffn_dim": 80, "word_embed_proj_dim": WIDTH}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

FAMILIES: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "gpt2": _short("gpt2", **_GPT),
    "gpt_neox": _long("gpt_neox", use_parallel_residual=True),
    "gpt_neox_sequential": _long("gpt_neox", use_parallel_residual=False),
    "gpt_neo": _short(
        "gpt_neo",
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=4,
        attention_types=[[["global", "local", "global"], 1]],
        window_size=64,
        max_position_embeddings=128,
    ),
    "gptj": _short("gptj", **_GPT, rotary_dim=4),
    "opt": _long("opt", **_OPT),
    "opt_post_norm": _long("opt", **_OPT, do_layer_norm_before=False),
    "bloom": _short("bloom", hidden_size=WIDTH, n_layer=LAYERS, n_head=4),
    "falcon": _short("falcon", **_FALCON, multi_query=True, parallel_attn=True),
    "falcon_new": _short("falcon", **_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_sequential": _short("falcon", **_FALCON, parallel_attn=False, alibi=True, multi_query=False, bias=True),
    "llama": _long("llama"),
    "mistral": _long("mistral", sliding_window=64),
    "qwen2": _long("qwen2"),
    "qwen3": _long("qwen3", head_dim=8),
    "gemma2": _long("gemma2", head_dim=8, query_pre_attn_scalar=8, sliding_window=64),
    "gemma3": _long("gemma3_text", head_dim=8, query_pre_attn_scalar=8, sliding_window=64),
    "phi": _long("phi"),
    "phi3": _long("phi3"),
    "olmo": _long("olmo"),
    "olmo2": _long("olmo2"),
    "mixtral": _long("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _long("qwen3_moe", head_dim=8, num_experts=4, **_EXPERTS),
    "cohere": _long("cohere"),
    "mpt": _short("mpt", d_model=WIDTH, n_layers=LAYERS, n_heads=4, max_seq_len=128),
    "starcoder2": _long("starcoder2"),
    "stablelm": _long("stablelm"),
    "dbrx": _short(
        "dbrx",
        d_model=WIDTH,
        n_layers=LAYERS,
        n_heads=4,
        max_seq_len=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
    ),
    "bert_decoder": _long("bert", is_decoder=True),
}


_PAIR_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}  # as fairseq numbers them


def _pair(name: str, **options: object) -> Callable[[], hf.PreTrainedModel]:
    """An encoder-decoder family of BART's kind: 2 layers of the encoder, 3 of the decoder."""
    shape = {
        "d_model": WIDTH,
        "encoder_layers": 2,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 80,
        "decoder_ffn_dim": 80,
        "max_position_embeddings": 128,
        **_PAIR_IDS,
        "forced_eos_token_id": None,
    }
    return lambda: hf.AutoModelForSeq2SeqLM.from_config(_config(name, **{**shape, **options}))


def _t5(name: str, **options: object) -> Callable[[], hf.PreTrainedModel]:
    shape = {"d_model": WIDTH, "d_kv": 8, "d_ff": 80, "num_layers": 4, "num_decoder_layers": LAYERS, "num_heads": 4}
    options = {"decoder_start_token_id": 1, **_PAIR_IDS, **options}
    return lambda: hf.AutoModelForSeq2SeqLM.from_config(_config(name, **shape, **options))


def _whisper() -> hf.PreTrainedModel:
    shape = {"encoder_layers": 2, "decoder_layers": LAYERS, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    width = {"d_model": WIDTH, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "num_mel_bins": 6}
    lengths = {"max_source_positions": 12, "max_target_positions": 128, "decoder_start_token_id": 1}
    config = _config("whisper", **shape, **width, **lengths, suppress_tokens=None, begin_suppress_tokens=None)
    return hf.WhisperForConditionalGeneration(config)


# Every encoder-decoder family; the encoder has another number of layers than the decoder.
SEQ2SEQ_FAMILIES: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "marian": _pair("marian", decoder_start_token_id=1),
    "m2m_100": _pair("m2m_100", decoder_start_token_id=2),
    "t5": _t5("t5"),
    "t5_gated": _t5("t5", feed_forward_proj="gated-gelu"),
    "mt5": _t5("mt5"),
    "bart": _pair("bart", decoder_start_token_id=2),
    "mbart": _pair("mbart"),
    "pegasus": _pair("pegasus", decoder_start_token_id=1),
    "whisper": _whisper,
}


def tiny(family: str, *, seed: int = 0) -> hf.PreTrainedModel:
    """A new tiny model of a family, the same for the same seed; in evaluation mode and float32."""
    return randomise({**FAMILIES, **SEQ2SEQ_FAMILIES}[family], seed=seed)


def randomise(make: Callable[[], hf.PreTrainedModel], *, seed: int = 0) -> hf.PreTrainedModel:
    """Make a model and draw all its weights, without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = make().float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@lru_cache
def _trained(bos: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[EOS, BOS] if bos else [EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str()


def tiny_tokenizer(*, bos: bool = True) -> hf.PreTrainedTokenizerFast:
    """A byte-level tokenizer of 300 tokens for any text; adds no special tokens, and pads with <eos>."""
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(bos)),
        bos_token=BOS if bos else None,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
    )


LANGUAGES = {"m2m_100": ("deu_Latn", "eng_Latn"), "mbart": ("de_DE", "en_XX")}
_PAIR_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]


@lru_cache
def _trained_pairs(*, bytes_: bool) -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if bytes_ else pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if bytes_ else list(string.printable)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=_PAIR_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str()


_WHISPER_TOKENS = ["startoftranscript", "en", "translate", "transcribe", "notimestamps"]
SAMPLING_RATE = 3840  # 24 frames, as many as the tiny encoder reads, take a second


def whisper_tokenizer() -> hf.PreTrainedTokenizerBase:
    """Whisper's tokenizer with few tokens and one language; its end token has the number 0."""
    special = [f"<|{name}|>" for name in ("endoftext", *_WHISPER_TOKENS)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return hf.WhisperTokenizer(vocab=model["vocab"], merges=merges, extra_special_tokens=special[1:])


def whisper_extractor() -> hf.WhisperFeatureExtractor:
    """A feature extractor for the tiny Whisper."""
    return hf.WhisperFeatureExtractor(feature_size=6, sampling_rate=SAMPLING_RATE, hop_length=160, chunk_length=1)


def pair_tokenizer(family: str = "marian") -> hf.PreTrainedTokenizerBase:
    """A tokenizer for pairs, with the special tokens of its family: M2M-100 has NLLB's tokenizer, mBART its own."""
    if family == "m2m_100":
        model = json.loads(_trained_pairs(bytes_=False))["model"]
        merges = [tuple(pair) for pair in model["merges"]]
        return hf.NllbTokenizer(vocab=model["vocab"], merges=merges, extra_special_tokens=list(LANGUAGES[family]))
    if family == "mbart":
        pieces = {*string.printable, "▁", *(f"▁{word}" for word in TEXT.split())} - {*string.whitespace}
        return hf.MBartTokenizer(vocab=[(token, 0.0) for token in _PAIR_TOKENS] + [(piece, -9.0) for piece in pieces])
    tokenizer = Tokenizer.from_str(_trained_pairs(bytes_=True))
    single = "<s> $A </s>" if family == "bart" else "$A </s>"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 2)])
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def logits_in_steps(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the (B, T, V) logits of texts that are read in steps with a cache, the last ones token by token."""
    past, steps = None, []
    for begin, end in ((0, 5), (5, 6), (6, 9), *((n, n + 1) for n in range(9, ids.shape[1]))):
        output = model(ids[:, begin:end], past_key_values=past, use_cache=True)
        past = output.past_key_values
        steps.append(output.logits)
    return torch.cat(steps, 1)
