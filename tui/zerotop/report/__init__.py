"""Reports to send: one self-contained HTML page, or a chart as PNG. Facts and sentences come from ``analysis.reports``."""
