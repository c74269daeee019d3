"""The Iteration screen: one iteration folded from many. The folding is in ``analysis.waveform``."""
