"""Text drawing: rows of styled spans, glyphs, number formats, theme. Charts are in ``ui.charts``."""
