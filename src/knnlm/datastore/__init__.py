"""Context vectors and the tokens that followed them, on disk."""
