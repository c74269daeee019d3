"""Memory that a rank shares with the sampler of its node: the rank fills it, the sampler drains it into the recording."""
