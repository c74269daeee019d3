"""The Compare screen: recordings side by side. The figures are from ``analysis.reports.comparison``."""
