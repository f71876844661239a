"""Read facts from a JSON file that may come from a stranger. Knows nothing about what they are of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from knnlm.errors import DatastoreCorrupt, DatastoreError

SUM = "sha256"  # the fact that vouches for the others
_MOST = 1 << 28  # bytes: read whole, so a file that only claims to be large must not fill the memory


def load_facts(file: Path, *, version: int, missing: str, again: str) -> dict[str, Any]:
    """Give what the file holds; `missing` is said where it is not there, `again` how it is made again."""
    try:
        if file.stat().st_size > _MOST:
            raise DatastoreCorrupt(f"{file} has {file.stat().st_size:,} bytes, too many for facts. {again}")
        facts = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatastoreError(missing) from None
    except OSError as error:
        raise DatastoreError(f"Cannot read {file}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise DatastoreCorrupt(f"{file} is no JSON. {again}") from None
    if not isinstance(facts, dict) or facts.get("format") != version:
        found = facts.get("format") if isinstance(facts, dict) else None
        raise DatastoreError(f"{file} has format version {found}, this knnlm reads version {version}. {again}")
    check_sum(file, facts, again)
    return facts


def summed(facts: dict[str, Any]) -> dict[str, Any]:
    """Add what vouches for facts that JSON can keep."""
    return {**facts, SUM: hash_facts(facts)}


def check_sum(file: Path, facts: dict[str, Any], again: str) -> None:
    """Refuse facts that are not as they were written; older files have nothing to compare with."""
    if SUM in facts and facts[SUM] != hash_facts({name: facts[name] for name in facts if name != SUM}):
        raise DatastoreCorrupt(f"{file} is not as it was written: its SHA-256 is another. {again}")


def hash_facts(facts: dict[str, Any]) -> str:
    """Give the SHA-256 of facts that JSON can keep, in whatever order they are."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
