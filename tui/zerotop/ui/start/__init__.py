"""The start screen: the list of recordings and running jobs."""
