"""The report: one self-contained HTML page and tables in Markdown, CSV and LaTeX, from saved prediction tables."""

from __future__ import annotations

from .write import write_report

__all__ = ["write_report"]
