"""The job's output: its lines as a terminal shows them, and its missing parts."""
