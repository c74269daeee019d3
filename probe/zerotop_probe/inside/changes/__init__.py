"""Changes in the training itself: how it is set, which tensors exist. Looks when time or memory shifts."""
