"""The page and what it needs, read once when the server starts. No path from a request is ever opened."""

from __future__ import annotations

from importlib.resources import files

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

FIRST = "index.html"


def load_page() -> dict[str, tuple[bytes, str]]:
    """Give the files of the page with their types, by name; none where there is no page."""
    folder = files("knnlm.server").joinpath("static")
    if not folder.is_dir():
        return {}
    found = {}
    for file in folder.iterdir():
        ending = "." + file.name.rpartition(".")[2]
        if file.is_file() and ending in _TYPES:
            found[file.name] = (file.read_bytes(), _TYPES[ending])
    return found
