"""Hooks into loops that train without DeepSpeed: PyTorch's own optimizers, and libraries that step them."""
