"""Running a sweep: its plan from the command line, the job of each point, and the order in which they run."""
