"""The table of finished steps of each rank, from its spans. Steps of all ranks together are in ``views.iterations``."""
