"""Perplexity, recorded traces, tuning and explanations."""
