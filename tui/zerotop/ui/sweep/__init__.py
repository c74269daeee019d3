"""The Sweep screen: a table that fills in, and charts of what its points measured."""
