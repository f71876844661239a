"""Verify, repair, merge, import and export stores."""
