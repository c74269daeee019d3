"""What else runs in the rank's interpreter and costs it time: garbage collections, compilations, the probe. How it exits."""
