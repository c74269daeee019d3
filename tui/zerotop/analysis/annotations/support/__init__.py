"""Shared by detectors: findings, evidence, shared thresholds. Contains no detector."""
