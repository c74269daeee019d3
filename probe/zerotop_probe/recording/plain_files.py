"""Opening files in a folder where another user may have planted links, pipes or devices."""

from __future__ import annotations

import errno
import os
import stat


def open_plain_file(path: str) -> int:
    """Open a regular file for reading and return its descriptor.

    Never follows a link as the last part of the path, and never waits for a pipe. Raise OSError, also for a file of another
    kind.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor


def is_trusted_owner(owner: int, folder: str) -> bool:
    """Whether this process may follow a request from a user, made by a file in a recording's folder.

    Trusted are the user of this process, root, and the owner of the folder.
    """
    try:
        return owner in (os.geteuid(), 0, os.stat(folder).st_uid)
    except OSError:
        return False
