"""A file system in memory that stalls while its process is stopped, as a network file system does whose server is gone.

    python stalling_files.py FOLDER

mounts it at FOLDER until the process ends. It speaks the kernel's FUSE protocol (include/uapi/linux/fuse.h) and needs
/dev/fuse and the right to mount.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
import time
from collections.abc import Callable

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_MAX_WRITE = 1 << 17
_DETACH = 2  # MNT_DETACH
_NO_REPLY = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET


class _Node:
    def __init__(self, number: int, mode: int) -> None:
        self.number = number
        self.mode = mode
        self.content = bytearray()
        self.children: dict[bytes, _Node] = {}
        self.time_ns = time.time_ns()

    def pack_attributes(self) -> bytes:
        seconds, nanoseconds = divmod(self.time_ns, 10**9)
        size = len(self.content)
        times = (seconds,) * 3, (nanoseconds,) * 3
        owner = os.getuid(), os.getgid()
        return _ATTRIBUTES.pack(self.number, size, -(-size // 512), *times[0], *times[1], self.mode, 1, *owner, 0, 4096, 0)

    def pack_entry(self) -> bytes:
        return struct.pack("<QQQQII", self.number, 0, 0, 0, 0, 0) + self.pack_attributes()


class Files:
    """The files of the mounted folder; each method answers one request of the kernel."""

    def __init__(self) -> None:
        # The kernel's first request is about no file.
        self.nodes = {number: _Node(number, stat.S_IFDIR | 0o700) for number in (0, 1)}
        self.answers: dict[int, Callable[[_Node, bytes], bytes]] = {
            1: lambda node, data: self._find_child(node, data).pack_entry(),
            3: lambda node, data: struct.pack("<QII", 0, 0, 0) + node.pack_attributes(),
            4: self._set_attributes,
            9: lambda node, data: self._make_child(node, stat.S_IFDIR, data[:4], data[8:]).pack_entry(),
            10: self._remove_child,
            11: self._remove_child,
            12: lambda node, data: self._rename_child(node, data[:8], data[8:]),
            14: lambda node, data: struct.pack("<QII", 0, 2, 0),  # FOPEN_KEEP_CACHE
            15: self._read_file,
            16: self._write_file,
            17: lambda node, data: struct.pack(
                "<QQQQQIIII24x", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, 255, 4096, 0
            ),
            18: lambda node, data: b"",
            20: lambda node, data: b"",
            25: lambda node, data: b"",
            26: lambda node, data: struct.pack("<IIIIHHIIHH32x", 7, 31, 1 << 17, 0, 16, 12, _MAX_WRITE, 1, 32, 0),
            27: lambda node, data: bytes(16),
            28: self._list_folder,
            29: lambda node, data: b"",
            35: lambda node, data: (
                self._make_child(node, stat.S_IFREG, data[4:8], data[16:]).pack_entry() + struct.pack("<QII", 0, 2, 0)
            ),
            45: lambda node, data: self._rename_child(node, data[:8], data[16:]),
        }

    def _find_child(self, node: _Node, name: bytes) -> _Node:
        try:
            return node.children[name.rstrip(b"\0")]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "") from None

    def _make_child(self, folder: _Node, kind: int, mode: bytes, name: bytes) -> _Node:
        number = max(self.nodes) + 1
        node = self.nodes[number] = _Node(number, kind | int.from_bytes(mode, "little") & 0o777)
        folder.children[name.rstrip(b"\0")] = node
        return node

    def _remove_child(self, folder: _Node, name: bytes) -> bytes:
        self._find_child(folder, name)
        del folder.children[name.rstrip(b"\0")]
        return b""

    def _rename_child(self, folder: _Node, target: bytes, names: bytes) -> bytes:
        old, new = names.rstrip(b"\0").split(b"\0")
        self.nodes[int.from_bytes(target, "little")].children[new] = self._find_child(folder, old)
        del folder.children[old]
        return b""

    def _set_attributes(self, node: _Node, data: bytes) -> bytes:
        (valid,), (size,) = struct.unpack_from("<I", data), struct.unpack_from("<Q", data, 16)
        if valid & 8:
            node.content = node.content[:size].ljust(size, b"\0")
        return struct.pack("<QII", 0, 0, 0) + node.pack_attributes()

    def _read_file(self, node: _Node, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        return bytes(node.content[offset : offset + size])

    def _write_file(self, node: _Node, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        node.content = node.content.ljust(offset, b"\0")
        node.content[offset : offset + size] = data[40 : 40 + size]
        node.time_ns = time.time_ns()
        return struct.pack("<II", size, 0)

    def _list_folder(self, node: _Node, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        listed = b""
        for place, (name, child) in list(enumerate(node.children.items(), 1))[offset:]:
            entry = struct.pack("<QQII", child.number, place, len(name), child.mode >> 12) + name
            entry = entry.ljust(-(-len(entry) // 8) * 8, b"\0")
            if len(listed) + len(entry) > size:
                break
            listed += entry
        return listed


def serve_folder(folder: str) -> None:
    """Mount at the folder, say so, and answer until the end."""
    device = os.open("/dev/fuse", os.O_RDWR)
    library = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},default_permissions".encode()
    if library.mount(b"stalling", os.fsencode(folder), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "it cannot be mounted")
    print("ready", flush=True)
    files = Files()
    while True:
        try:
            request = os.read(device, _MAX_WRITE + 4096)
        except OSError as error:
            if error.errno == errno.ENODEV:  # it was unmounted
                return
            continue
        _, operation, unique, number, *_ = _IN.unpack_from(request)
        if operation in _NO_REPLY:
            continue
        try:
            reply, code = files.answers[operation](files.nodes[number], request[_IN.size :]), 0
        except KeyError:
            reply, code = b"", -errno.ENOSYS
        except OSError as error:
            reply, code = b"", -(error.errno or errno.EIO)
        os.write(device, _OUT.pack(_OUT.size + len(reply), code, unique) + reply)


def unmount_folder(folder: str) -> None:
    """Unmount it, even while files are open."""
    ctypes.CDLL(None).umount2(os.fsencode(folder), _DETACH)


if __name__ == "__main__":
    serve_folder(sys.argv[1])
