"""Shards at URLs that fsspec reads, such as s3://bucket/part-1.store: copies of them on this machine, and uploads.

A store at a URL is a folder with the files of an ordinary store. Its copies are in the cache folder of knnlm:

cache/shards/<digest of the URL>/
  current.json    the version that was fetched last, and what identified the catalog at the URL then
  <version>/      a complete store, named by the SHA-256 of its catalog; read-only
  partial/        a copy that is being made

The catalog is fetched first and contains the SHA-256 of every other file. Each file gets its name when its checksum is
right, and the copy gets its own when it is complete, so an interrupted copy is continued at the next file. Files that
an earlier version has too are linked, not fetched again. While the catalog at the URL is the same, nothing is fetched.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from knnlm.datastore.catalog import Catalog, check_complete
from knnlm.datastore.locks import ReaderLock, without_readers
from knnlm.datastore.manifest import CURRENT_FILE, is_sharded, is_url, read_current, read_manifest, shard_cache
from knnlm.datastore.schema import (
    CATALOG_FILE,
    CODEC_FILE,
    MAP_FILE,
    REMOTE_FILE,
    SHARDED,
    array_checksums,
    connect,
    segment_folder,
)
from knnlm.datastore.segments import index_file
from knnlm.errors import DatastoreCorrupt, DatastoreError, KnnlmError, MissingExtra, ParameterError
from knnlm.io import atomic_write, checksum, commit_folder, translate_os_errors
from knnlm.progress import Advance, Progress, silent

_PARTIAL, _LOCK, _DOWNLOAD = "partial", "lock", ".download"
_MAX_ATTEMPTS = 3  # while the store at the URL is being replaced
_KEPT_VERSIONS = 2  # the present one, and the one that a process may be opening
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


@dataclass(frozen=True)
class Pushed:
    """The result of an upload."""

    url: str
    files: int  # that were uploaded
    bytes: int  # of them
    unchanged: int  # files that were there already


class _Remote:
    """The folder of a store at a URL."""

    def __init__(self, url: str) -> None:
        if not is_url(url) or "::" in url:
            raise ParameterError(f"{url} is no URL of a shard: write it as s3://bucket/part-1.store.")
        try:
            import fsspec
        except ImportError:
            raise MissingExtra("A shard at a URL", "fsspec", "remote") from None
        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url)
        except ImportError:
            package = _PACKAGES.get(scheme, f"of fsspec for {scheme}://")
            raise MissingExtra(f"{scheme}://", package, "remote", also=f"pip install {package}") from None
        except ValueError as error:
            raise ParameterError(f"{url}: {error}.") from None
        self._root = str(root).rstrip("/")
        self._fs.invalidate_cache()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn any error of a file system into one line; a missing file stays one."""
        try:
            yield
        except (FileNotFoundError, KnnlmError):
            raise
        except Exception as error:  # packages of fsspec have their own errors, with no common root
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise DatastoreError(f"{self.url}: cannot {what} ({reason}). Check the URL and the credentials.") from error

    def version(self) -> str:
        """Return what identifies the present catalog, such as its ETag."""
        with self._errors("read its catalog"):
            return str(self._fs.ukey(f"{self._root}/{CATALOG_FILE}"))

    def size(self, name: str) -> int | None:
        """Return the size of a file; None where there is none."""
        try:
            with self._errors(f"read {name}"):
                return int(self._fs.info(f"{self._root}/{name}")["size"])
        except FileNotFoundError:
            return None

    def download(self, name: str, target: Path) -> None:
        """Fetch a file."""
        with translate_os_errors(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
        with self._errors(f"read {name}"):
            self._fs.get_file(f"{self._root}/{name}", str(target))

    def upload(self, name: str, source: Path) -> None:
        """Write a file."""
        place = f"{self._root}/{name}"
        with self._errors(f"write {name}"):
            self._fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(source), place)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError), self._errors(f"remove {name}"):
            self._fs.rm_file(f"{self._root}/{name}")


def fetch_shard(url: str, *, progress: Progress = silent) -> Path:
    """Return the folder of a copy of the store at a URL, which is fetched unless it is unchanged."""
    remote = _Remote(url)
    home = shard_cache(remote.url)
    with translate_os_errors(home):
        home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / _LOCK):
        for _ in range(_MAX_ATTEMPTS):
            try:
                version = remote.version()
            except FileNotFoundError:
                raise DatastoreError(f"{url} is not a store: it has no {CATALOG_FILE}.") from None
            current = read_current(remote.url)
            if current is not None and current.key == version and (current.folder / CATALOG_FILE).is_file():
                return current.folder
            try:
                return _fetch(remote, home, version, progress)
            except FileNotFoundError as error:
                missing = error
            if remote.version() == version:
                break  # otherwise it was replaced meanwhile: fetch the new one
        raise DatastoreError(f"{url} is incomplete or is being replaced: {missing}. Push the shard again.")


def has_store(url: str) -> bool:
    """Whether there is a store at a URL."""
    return _Remote(url).size(CATALOG_FILE) is not None


def fetch_catalog(url: str, folder: Path) -> Path:
    """Fetch the catalog of the store at a URL, with its map and codec, to a folder and return that."""
    remote = _Remote(url)
    try:
        remote.download(CATALOG_FILE, folder / CATALOG_FILE)
        for name, sha256 in listed_files(folder).items():
            if name in (MAP_FILE, CODEC_FILE):
                _fetch_file(remote, name, folder / name, sha256)
    except FileNotFoundError as error:
        raise DatastoreError(f"{url} is incomplete: {error}. Push the shard again.") from None
    return folder


def fetch_shards(folder: Path) -> None:
    """Fetch the shards of a sharded store that are at URLs and have changed there."""
    for url in read_manifest(folder).urls if is_sharded(folder) else ():
        fetch_shard(url)


def _fetch(remote: _Remote, home: Path, version: str, progress: Progress) -> Path:
    """Fetch what is missing, and make the copy the current one."""
    partial = home / _PARTIAL
    _fetch_catalog(remote, partial)
    name = checksum(partial / CATALOG_FILE)[:32]
    final = home / name
    if not (final / CATALOG_FILE).is_file():
        files = listed_files(partial)
        with progress(f"fetching {remote.url}", total=len(files), unit="files") as advance:
            _fetch_files(remote, home, files, advance)
        _remove_others(partial, files)
        shutil.rmtree(final, ignore_errors=True)  # a copy whose catalog was removed
        (partial / REMOTE_FILE).write_text(json.dumps({"url": remote.url}), encoding="utf-8")
        commit_folder(partial, final)
    with atomic_write(home / CURRENT_FILE) as pointer:
        pointer.write_text(json.dumps({"url": remote.url, "key": version, "version": name}), encoding="utf-8")
    _drop_old(home, name)
    return final


def _fetch_catalog(remote: _Remote, partial: Path) -> None:
    """Fetch the catalog to the copy that is being made."""
    with translate_os_errors(partial):
        partial.mkdir(parents=True, exist_ok=True)
    for suffix in ("-wal", "-shm", "-journal"):
        (partial / f"{CATALOG_FILE}{suffix}").unlink(missing_ok=True)
    fetched = partial / f"{CATALOG_FILE}{_DOWNLOAD}"
    remote.download(CATALOG_FILE, fetched)
    fetched.replace(partial / CATALOG_FILE)


def listed_files(folder: Path) -> dict[str, str]:
    """Return the files that the catalog in a folder names, relative to it, with their SHA-256."""
    with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
        if catalog.get("state") == SHARDED:
            raise DatastoreError(f"{folder} is a sharded store. Name its shards.")
        check_complete(catalog)
        files: dict[Path, str] = {}
        for segment in catalog.segments():
            place = segment_folder(folder, segment.id)
            files |= {place / name: sha256 for name, sha256 in array_checksums(segment).items() if sha256}
        files |= {index_file(folder, row): row.sha256 for row in catalog.indexes()}
        for key, name in (("map", MAP_FILE), ("codec", CODEC_FILE)):
            if (metadata := catalog.get(key)) is not None:
                files[folder / name] = _sha256(metadata, folder / name)
    return {path.relative_to(folder).as_posix(): sha256 for path, sha256 in files.items()}


def _sha256(metadata: Any, path: Path) -> str:
    found = metadata.get("sha256") if isinstance(metadata, dict) else None
    if not isinstance(found, str):
        raise DatastoreCorrupt(f"{path}: its checksum is missing from the catalog. Build the store again.")
    return found


def _fetch_files(remote: _Remote, home: Path, files: dict[str, str], advance: Advance) -> None:
    """Fetch every file that neither an interrupted copy nor an earlier version has."""
    earlier = [folder for folder in home.iterdir() if folder.is_dir() and folder.name != _PARTIAL]
    for name, sha256 in files.items():
        target = home / _PARTIAL / name
        if not (target.is_file() and checksum(target) == sha256):
            with translate_os_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
            if not any(_link(folder / name, target, sha256) for folder in earlier):
                _fetch_file(remote, name, target, sha256)
        advance(1)


def _link(source: Path, target: Path, sha256: str) -> bool:
    """Link a file of an earlier version, or copy it; return False unless it has this checksum."""
    if not source.is_file() or checksum(source) != sha256:
        return False
    with translate_os_errors(target):
        try:
            os.link(source, target)
        except OSError:  # no links on this file system
            shutil.copyfile(source, target)
    return True


def _fetch_file(remote: _Remote, name: str, target: Path, sha256: str) -> None:
    fetched = target.with_name(f"{target.name}{_DOWNLOAD}")
    remote.download(name, fetched)
    if checksum(fetched) != sha256:
        fetched.unlink()
        raise DatastoreCorrupt(f"{remote.url}/{name}: checksum mismatch (SHA-256). Push the shard again.")
    fetched.replace(target)


def _remove_others(folder: Path, files: dict[str, str]) -> None:
    """Remove files of a copy that its catalog does not name: those of a version that was never completed."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            with suppress(OSError):  # not empty
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in {*files, CATALOG_FILE}:
            path.unlink()


def _drop_old(home: Path, current: str) -> None:
    """Remove versions that no process reads, except the latest ones."""
    versions = [folder for folder in home.iterdir() if folder.is_dir() and folder.name not in (_PARTIAL, current)]
    versions.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in versions[_KEPT_VERSIONS - 1 :]:
        with without_readers(folder) as sole:
            if sole:
                shutil.rmtree(folder, ignore_errors=True)


def push_shard(store: str | Path, url: str, *, replace: bool = False, progress: Progress = silent) -> Pushed:
    """Upload an ordinary store to a URL: its catalog last, so that a reader never finds a file missing.

    With `replace`, a store that is there is replaced; files that both have are not uploaded again.
    """
    folder, remote = Path(store), _Remote(url)
    if is_sharded(folder):
        raise DatastoreError(f"{folder} is a sharded store. Push its shards.")
    if not (folder / CATALOG_FILE).is_file():
        raise DatastoreError(f"{folder} is not a store: it has no {CATALOG_FILE}. Make one with: knnlm build")
    with closing(ReaderLock(folder)), tempfile.TemporaryDirectory(prefix="knnlm-push-") as temporary:
        snapshot, before = Path(temporary) / "new", Path(temporary) / "old"
        _copy_catalog(folder, snapshot)
        files, present = listed_files(snapshot), _present_files(remote, before, replace=replace)
        count = size = 0
        with progress(f"pushing {folder}", total=len(files) + 1, unit="files") as advance:
            for name, sha256 in files.items():
                length = (folder / name).stat().st_size if (folder / name).is_file() else -1
                if present.get(name) != sha256 or remote.size(name) != length:
                    _upload(remote, folder, name, sha256)
                    count, size = count + 1, size + length
                advance(1)
            remote.upload(CATALOG_FILE, snapshot / CATALOG_FILE)
            advance(1)
        for name in present.keys() - files.keys():
            remote.remove(name)
    return Pushed(remote.url, count + 1, size, len(files) - count)


def copy_shard(store: Path, partial: Path, final: Path) -> None:
    """Copy an ordinary store to another disk; the copy has the name `partial` until it is complete and checked."""
    with translate_os_errors(partial), closing(ReaderLock(store)):
        _copy_catalog(store, partial)
        for name, sha256 in listed_files(partial).items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(store / name, partial / name)
            if checksum(partial / name) != sha256:
                raise DatastoreCorrupt(f"{partial / name}: checksum mismatch (SHA-256). Run the same command again.")
        commit_folder(partial, final)


def _copy_catalog(folder: Path, target: Path) -> None:
    """Copy the present catalog as one file, without a log beside it."""
    target.mkdir()
    with (
        closing(connect(folder / CATALOG_FILE, write=False)) as source,
        closing(sqlite3.connect(target / CATALOG_FILE)) as copy,
    ):
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")


def _present_files(remote: _Remote, folder: Path, *, replace: bool) -> dict[str, str]:
    """Return the files of the store that is at the URL, with their SHA-256."""
    if remote.size(CATALOG_FILE) is None:
        return {}
    if not replace:
        raise DatastoreError(f"{remote.url} is a store already. Choose another --out, or add --replace.")
    try:
        remote.download(CATALOG_FILE, folder / CATALOG_FILE)
        return listed_files(folder)
    except (KnnlmError, FileNotFoundError):  # damaged: all files are uploaded
        return {}


def _upload(remote: _Remote, folder: Path, name: str, sha256: str) -> None:
    if not (folder / name).is_file() or checksum(folder / name) != sha256:
        raise DatastoreCorrupt(f"{folder / name}: missing or checksum mismatch (SHA-256). Run: knnlm repair {folder}")
    remote.upload(name, folder / name)
