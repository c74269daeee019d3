"""Reports about whole recordings: summaries for lists, comparisons, memory reports and exported tables."""
