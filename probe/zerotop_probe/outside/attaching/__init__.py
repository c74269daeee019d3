"""Finding jobs that somebody else started, and entering their ranks while they run."""
