"""GPUs: the speeds of their types, and faults: what an Xid means, which ranks use a GPU, which fault explains an end."""
