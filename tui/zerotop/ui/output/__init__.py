"""The Output screen: the lines that the job printed, with search."""
