"""The tables of a catalog, by what a memory needs. Knows nothing about who reads them."""

BUILT = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE segments (
    id INTEGER PRIMARY KEY,
    first_row INTEGER NOT NULL,
    rows INTEGER NOT NULL,
    scale REAL NOT NULL,
    keys_sha256 TEXT NOT NULL,
    values_sha256 TEXT NOT NULL
);
CREATE TABLE documents (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    source TEXT NOT NULL,
    segment INTEGER NOT NULL REFERENCES segments(id),
    first_row INTEGER NOT NULL,
    rows INTEGER NOT NULL,
    sha256 TEXT NOT NULL
);
CREATE INDEX documents_by_row ON documents(first_row);
CREATE INDEX documents_by_hash ON documents(sha256);
CREATE TABLE indexes (
    id INTEGER PRIMARY KEY,
    spec TEXT NOT NULL,
    metric TEXT NOT NULL,
    rows INTEGER NOT NULL,
    sha256 TEXT NOT NULL
);
"""
DERIVED = """
ALTER TABLE segments ADD COLUMN kept INTEGER;
ALTER TABLE segments ADD COLUMN kept_sha256 TEXT;
ALTER TABLE segments ADD COLUMN counts_sha256 TEXT;
"""
LIVING = """
CREATE TABLE removed (
    number INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL,
    first_row INTEGER NOT NULL,
    rows INTEGER NOT NULL
)
"""
