"""API keys and loopback addresses."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from knnlm.errors import ParameterError

_MIN_KEY_CHARACTERS = 8


@dataclass(frozen=True)
class ApiKeys:
    """The keys for requests, and those for changes of the store. Without user keys, every request is allowed."""

    users: tuple[bytes, ...] = ()
    admins: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, users: Path | None, admins: Path | None) -> ApiKeys:
        """Read key files with one key on each line."""
        return cls(_read(users), _read(admins))

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self.users)

    def is_user(self, key: str) -> bool:
        """Whether requests with this key are allowed."""
        return not self.required or _among(key, self.users + self.admins)

    def is_admin(self, key: str) -> bool:
        """Whether changes of the store are allowed with this key."""
        return _among(key, self.admins)


def _among(key: str, known: tuple[bytes, ...]) -> bool:
    """Whether a key is one of the known ones, in constant time."""
    data = key.encode("latin-1", errors="replace")  # the encoding of headers
    return sum(hmac.compare_digest(data, each) for each in known) > 0


def _read(path: Path | None) -> tuple[bytes, ...]:
    if path is None:
        return ()
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ParameterError(
            f"{path}: cannot read the key file ({reason}). Use a text file with one key on each line."
        ) from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys or any(len(key) < _MIN_KEY_CHARACTERS or not key.isascii() for key in keys):
        raise ParameterError(f"{path}: each line must be a key of at least {_MIN_KEY_CHARACTERS} ASCII characters.")
    return tuple(key.encode() for key in keys)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, keys: ApiKeys) -> None:
    """Raise for a host that other machines can reach, if requests need no key."""
    if not is_loopback(host) and not keys.required:
        raise ParameterError(f"{host} is reachable from other machines and needs a key. Use --api-key-file FILE.")
