"""Read recordings: open, tail, pack and find them. This package knows files and columns, not their meaning."""

import os

# This package is the first to import NumPy. Its OpenBLAS would start a thread for each core, and those busy-wait for each
# other: on a host whose cores train, small matrices would take twenty times as long and slow the job. OpenBLAS reads the
# variable when it is loaded; jobs that zerotop starts must not inherit it.
_THREADS = "OPENBLAS_NUM_THREADS"
if _THREADS not in os.environ:
    os.environ[_THREADS] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[_THREADS]
