"""Ray: building and searching on several machines; the only package that imports ray."""
