"""One iteration folded from many: alignment, sampled signals, idle time. Drawing is in ``ui.iteration``."""
