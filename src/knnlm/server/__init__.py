"""An OpenAI-compatible HTTP server that reports the sources of every token."""
