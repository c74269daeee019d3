"""The Sweep screen: a table that fills in, and charts of the measurements of its points."""
