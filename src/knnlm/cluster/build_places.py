"""Where the shards of a build on Ray are built, and where they are in the end.

By default a worker builds a shard at its place in the store, in a folder that all machines share. With a work folder,
or where the shards are to be at a URL, it builds on the disk of its machine and then copies the finished shard:

work folder/<digest of the store's path>/<id of the build>/
  0001/            an ordinary store, until it is copied to its place

A copy in a folder gets its name when all files are there and their checksums are right; a copy at a URL gets its
catalog last. So a shard at its place is complete, and one whose worker was killed while it copied is copied again.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from knnlm.datastore.catalog import Catalog
from knnlm.datastore.remote import copy_shard, fetch_catalog, has_store, push_shard
from knnlm.datastore.schema import CATALOG_FILE
from knnlm.datastore.shards import ShardPart, shard_part
from knnlm.errors import DatastoreError
from knnlm.io import cache_folder

PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True)
class ShardPlaces:
    """The places of the shards of one build."""

    folder: str  # of the record and, without a URL, of the shards
    url: str | None = None  # of the shards, each with its number behind it
    work_folder: str | None = None  # on the disk of each machine
    build: str = ""  # the id of the build

    @property
    def copies(self) -> bool:
        """Whether shards are built elsewhere and then copied to their places."""
        return self.url is not None or self.work_folder is not None

    def final(self, number: int) -> str | Path:
        """Return the place of a shard: a folder, or a URL."""
        name = f"{number:04}"
        return Path(self.folder) / name if self.url is None else f"{self.url.rstrip('/')}/{name}"

    def exists(self, number: int) -> bool:
        """Whether there is a store at the place of a shard, which may be unfinished if it is a folder."""
        place = self.final(number)
        return (place / CATALOG_FILE).is_file() if isinstance(place, Path) else has_store(place)

    def build_folder(self, number: int) -> Path:
        """Return the folder on this machine in which a shard is built."""
        place = self.final(number)
        # A shard that was begun at its place is continued there.
        if isinstance(place, Path) and (self.work_folder is None or self.exists(number)):
            return place
        return self._work / self.build / f"{number:04}"

    @property
    def _work(self) -> Path:
        base = cache_folder() / "builds" if self.work_folder is None else Path(self.work_folder)
        return base / hashlib.sha256(self.folder.encode()).hexdigest()[:16]

    def is_finished(self, number: int, part: ShardPart) -> bool:
        """Whether a shard is complete at its place."""
        place = self.final(number)
        if not self.exists(number):
            return False
        with self.catalog(number) as catalog:
            if shard_part(catalog) == part:
                return bool(catalog.get("state") == "complete")
        if isinstance(place, Path):
            return False  # the build reports what is different
        raise DatastoreError(f"{place} is another store. Remove it, or choose another URL.")

    @contextmanager
    def catalog(self, number: int) -> Iterator[Catalog]:
        """Open the catalog at the place of a shard, beside which its map and codec are."""
        place = self.final(number)
        with tempfile.TemporaryDirectory(prefix="knnlm-catalog-") as temporary:
            folder = place if isinstance(place, Path) else fetch_catalog(place, Path(temporary))
            with closing(Catalog.open(folder / CATALOG_FILE)) as catalog:
                yield catalog

    def copy(self, number: int) -> None:
        """Copy a shard that was built on this machine to its place, and remove it here."""
        built, place = self.build_folder(number), self.final(number)
        if built == place:
            return
        if isinstance(place, Path):
            partial = place.with_name(f"{place.name}.{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")
            try:
                copy_shard(built, partial, place)
            except DatastoreError:
                shutil.rmtree(partial, ignore_errors=True)
                if not self.exists(number):  # otherwise another worker has copied it
                    raise
        else:
            push_shard(built, place)
        shutil.rmtree(built, ignore_errors=True)

    def remove_others(self) -> None:
        """Remove what earlier builds of the same store have left on this machine."""
        for entry in self._work.glob("*") if self.copies else ():
            if entry.name != self.build:
                shutil.rmtree(entry, ignore_errors=True)

    def remove_work(self) -> None:
        """Remove what this build has left on this machine."""
        if self.copies:
            shutil.rmtree(self._work, ignore_errors=True)

    def remove_partial(self) -> None:
        """Remove unfinished copies of workers that were killed; no worker is running."""
        for entry in Path(self.folder).glob(f"*{PARTIAL_SUFFIX}"):
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
