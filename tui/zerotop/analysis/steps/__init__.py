"""The table of finished steps of each rank, from spans or folded. Steps of all ranks together: ``views.iterations``."""
