"""The papers' studies on a user's own memory and text, as one page."""

from knnlm.report.running import STUDIES, Report, report

__all__ = ["STUDIES", "Report", "report"]
