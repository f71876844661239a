"""Read documents with a model and write them to a store."""
