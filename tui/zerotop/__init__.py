"""Watch, explain, replay and export DeepSpeed training from the terminal."""
