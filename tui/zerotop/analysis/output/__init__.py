"""Lines of the job's output, their steps, and searching them. ``session`` reads the bytes."""
