"""Reports to send: one self-contained HTML page, or a chart as PNG. Facts and sentences come from ``analysis.reports``."""

OTHER_FORMATS = (".pdf", ".svg", ".jpg", ".jpeg", ".md", ".csv", ".json")
"""Suffixes of files under which no program would open a report as what it is."""
