"""Columns of the Timeline screen: phases, metrics and steps over a time window. Folding iterations is in ``waveform``."""
