"""Reading recordings: opening, tailing, packing, finding. Knows files and columns, not their meaning."""

import os

# NumPy comes first with this package or one above it. Its OpenBLAS would start a thread for each core and let them wait for
# one another actively: on a host whose cores train, our small matrices would take twenty times as long, and cores from the
# job. The variable is read when NumPy is loaded, and must not be seen by jobs that we start.
_THREADS = "OPENBLAS_NUM_THREADS"
if _THREADS not in os.environ:
    os.environ[_THREADS] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[_THREADS]
