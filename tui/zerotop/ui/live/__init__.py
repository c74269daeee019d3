"""The Live screen: memory, iteration times, CPU and GPU, output at a glance."""
