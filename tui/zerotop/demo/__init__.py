"""What make demo runs: a real user's training script. The script imports nothing of zerotop."""
