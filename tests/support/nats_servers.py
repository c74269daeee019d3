"""A real NATS server, which tests kill and start again."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from free_ports import find_free_port
from patience import lengthen

SERVER = shutil.which("nats-server", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin") or ""
TOKEN = "a-token-of-these-tests"
_START_S = 20.0


class NatsServer:
    """A server on this machine; with ``token`` empty anybody may connect. ``tls``: its certificate and key."""

    def __init__(
        self, folder: Path, *, token: str = TOKEN, monitored: bool = False, tls: tuple[Path, Path] | None = None
    ) -> None:
        self.port, self.monitor_port = find_free_port(), find_free_port()
        self.address = address = "127.0.0.1"
        self.url = f"{'nats' if tls is None else 'tls'}://{address}:{self.port}"
        self._config = folder / f"nats-{self.port}.conf"
        lines = [f"listen: {address}:{self.port}"]
        lines += ["authorization { token: $ZEROTOP_TOKEN }"] if token else []
        lines += [] if tls is None else [f'tls {{ cert_file: "{tls[0]}", key_file: "{tls[1]}" }}']
        lines += [f"http: {address}:{self.monitor_port}"] if monitored else []
        self._config.write_text("\n".join(lines) + "\n")
        self._environment = os.environ | {"ZEROTOP_TOKEN": token}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> NatsServer:
        """Start it and wait until it listens."""
        self.process = subprocess.Popen(
            [SERVER, "-c", str(self._config)], env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + lengthen(_START_S)
        while True:
            try:
                socket.create_connection((self.address, self.port), 1).close()
            except OSError:
                assert time.monotonic() < deadline
                assert self.process.poll() is None
                time.sleep(0.05)
            else:
                return self

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> NatsServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def make_certificate(folder: Path, name: str, *, authority: tuple[Path, Path] | None = None) -> tuple[Path, Path]:
    """Return a new certificate for this machine, of an authority or of itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
    if authority is not None:
        command += ["-CA", str(authority[0]), "-CAkey", str(authority[1]), "-addext", "basicConstraints=critical,CA:FALSE"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
