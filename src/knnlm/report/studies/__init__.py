"""The studies of a report."""
