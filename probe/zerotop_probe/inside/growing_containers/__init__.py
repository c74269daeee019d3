"""Which variable keeps what makes host memory grow: a look at all lists and dicts, twice. Standard library only."""
