"""Training of memories with parameters: output matrices, key maps and decoders."""
