"""``zerotop doctor --measure``: what this machine does and needs, measured in a process of its own, kept for estimates."""
