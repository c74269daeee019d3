"""For jobs of the tests: an interpreter that ends would go through all objects, which takes a second with Transformers.

One that starts does it again and again: imports make objects that stay. With Python's own threshold that is a quarter of the
time that torch and the Trainer take to import.
"""

import atexit
import gc

gc.set_threshold(10_000, *gc.get_threshold()[1:])
atexit.register(gc.freeze)
