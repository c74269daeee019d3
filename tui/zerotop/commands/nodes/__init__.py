"""Recordings of several nodes made into one over the network; nothing here is imported for a job on one machine."""
