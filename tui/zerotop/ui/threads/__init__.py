"""The Threads screen: the threads of one rank over time."""
