"""Hardware faults of GPUs: what an Xid means, which ranks use a GPU, and which fault explains an end or a silence."""
