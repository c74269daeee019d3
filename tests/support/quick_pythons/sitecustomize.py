"""For jobs of the tests: an interpreter that ends would go through all objects, which takes a second with Transformers."""

import atexit
import gc

atexit.register(gc.freeze)
