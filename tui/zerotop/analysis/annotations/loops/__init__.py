"""Findings about what PyTorch keeps in loops without DeepSpeed: logits, gathered parameters, gradient buckets."""
