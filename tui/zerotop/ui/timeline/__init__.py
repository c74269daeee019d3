"""The Timeline screen: lanes over time. The columns are from ``analysis.timeline``."""
