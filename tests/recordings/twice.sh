#!/bin/bash
# Starts a command, and when it has failed once more, as schedulers do.
"$@" || STAGED_AGAIN=1 exec "$@"
