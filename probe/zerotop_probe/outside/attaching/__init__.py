"""Find jobs that zerotop did not start, and enter their ranks while they run."""
