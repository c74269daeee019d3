"""Columns of the Timeline screen: phases, metrics and steps over a window of time. Folding iterations is in ``waveform``."""
