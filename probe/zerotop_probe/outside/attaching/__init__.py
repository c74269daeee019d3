"""Finding jobs that zerotop did not start, and entering their ranks while they run."""
