"""Lines of the job's output, their steps, and searching them. ``recording`` reads the bytes."""
