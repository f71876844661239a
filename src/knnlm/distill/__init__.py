"""Training of memories that are matrices rather than lists of contexts."""
