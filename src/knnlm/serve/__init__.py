"""Serve a model and its memory over HTTP: an OpenAI-style API that says where every word comes from."""
