"""Watch, explain, replay and export DeepSpeed and PyTorch training from the terminal."""
