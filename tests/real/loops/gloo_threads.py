"""Let the threads of gloo end their work before the group of ranks is destroyed."""

import time


def finish_gloo_threads():
    """Give Python's lock away for a moment.

    A thread of gloo needs that lock to free the last all-reduce of a backward pass. ``~ProcessGroupGloo`` of PyTorch 2.13
    waits for the thread with the lock held: a rank whose script ends a few milliseconds later may hang for good, with the
    probe or without.
    """
    time.sleep(0.5)
