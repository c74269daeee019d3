"""The table of finished optimizer steps of each rank, summed from its spans."""
