"""What detectors share: the annotation, the evidence they read, thresholds. No detector lives here."""
