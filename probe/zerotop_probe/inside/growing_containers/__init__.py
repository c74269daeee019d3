"""Find the variable that makes host memory grow, by looking at all lists and dicts twice. Standard library only."""
