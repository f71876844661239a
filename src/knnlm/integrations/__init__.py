"""Adapters to other packages; each module is the only one that imports its package."""
