"""A recording at a moment: what had been written, the ranks and nodes that were there, and results that are kept."""
