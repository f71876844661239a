"""Exact search on a GPU at the speed of a matrix product."""
