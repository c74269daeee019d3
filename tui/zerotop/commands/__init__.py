"""The commands of ``zerotop``, one module each, with a function of the same name."""
