"""The terminal program: draws the results of the analysis for (recording, cursor), and stores no facts of its own."""
