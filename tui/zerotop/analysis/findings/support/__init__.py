"""Code that detectors share: findings, evidence and thresholds. Contains no detector."""
