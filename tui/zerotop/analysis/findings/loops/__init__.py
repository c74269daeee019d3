"""Findings about PyTorch's memory in loops without DeepSpeed: logits, gathered parameters, gradient buckets."""
