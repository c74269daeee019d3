"""Jobs that stand still: the stacks of their ranks, what each rank waits for, and which rank the others wait for."""
