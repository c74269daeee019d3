"""The terminal program: draws what analysis says about (recording, cursor), holds no truth of its own."""
