"""A transformers model that mixes in memories at every step."""
