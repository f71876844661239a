"""Who may ask: API keys from files, compared in constant time. Knows nothing about HTTP."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from knnlm.errors import ParameterError

_SHORTEST = 8  # characters


@dataclass(frozen=True)
class ApiKeys:
    """The keys of ordinary callers and of those who may change the memory; none: everyone may ask."""

    users: tuple[bytes, ...] = ()
    admins: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, users: Path | None, admins: Path | None) -> ApiKeys:
        """Read key files: a key a line."""
        return cls(_read(users), _read(admins))

    @property
    def needed(self) -> bool:
        """Whether a key is needed to ask at all."""
        return bool(self.users)

    def may_ask(self, key: str) -> bool:
        """Say whether this key lets its bearer ask."""
        return not self.needed or _among(key, self.users + self.admins)

    def may_change(self, key: str) -> bool:
        """Say whether this key lets its bearer change the memory."""
        return _among(key, self.admins)


def _among(key: str, known: tuple[bytes, ...]) -> bool:
    """Compare with every key, so that the time taken tells nothing."""
    given = key.encode("latin-1", errors="replace")  # the bytes that came: so headers are read
    return sum(hmac.compare_digest(given, each) for each in known) > 0


def _read(path: Path | None) -> tuple[bytes, ...]:
    if path is None:
        return ()
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ParameterError(
            f"Cannot read the key file {path} ({reason}). Give a text file with a key a line."
        ) from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys or any(len(key) < _SHORTEST or not key.isascii() for key in keys):
        raise ParameterError(f"{path} must hold a key of at least {_SHORTEST} plain characters (ASCII) on each line.")
    return tuple(key.encode() for key in keys)


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach a host name or address."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, keys: ApiKeys) -> None:
    """Refuse to listen where others can ask without a key."""
    if not is_loopback(host) and not keys.needed:
        raise ParameterError(f"{host} can be reached from other machines, so a key is needed: --api-key-file FILE.")
