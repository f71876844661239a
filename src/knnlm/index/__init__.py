"""Nearest neighbours over stored vectors. Import from its modules: most of them load torch."""
