"""For jobs of the tests: start each Python a second sooner, without a change to the job's work.

An interpreter that ends would go through all objects, which takes a second with Transformers. One that starts does it again
and again: imports make objects that stay. With Python's own threshold that is a quarter of the time that torch and the
Trainer take to import. The compiler is imported by jobs that compile, unless EARLY_COMPILER is set or the job may use a GPU.
There PyTorch imports it to name the lines of allocations, for seconds within a step whose time is measured.
"""

import atexit
import gc
import os

import late_compiler  # type: ignore[import-not-found]  # beside this file

gc.set_threshold(10_000, *gc.get_threshold()[1:])
atexit.register(gc.freeze)
# DeepSpeed's launcher numbers GPUs for its ranks where there are none, too.
without_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not os.path.exists("/dev/nvidiactl")
if without_gpu and not os.environ.get("EARLY_COMPILER"):
    late_compiler.install_finder()
