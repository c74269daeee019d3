"""The job's output: its lines as a terminal shows them, and what is missing from it."""
