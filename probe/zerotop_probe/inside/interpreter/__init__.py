"""Other costs in the rank's interpreter: garbage collections, compilations, the probe. Also how it exits."""
