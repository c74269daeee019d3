"""An output log in which apparent secrets are replaced. The output on the user's terminal or pipe is unchanged."""

from __future__ import annotations

import os
import threading
import time

from zerotop_probe.outside.job.output_log import OutputLog
from zerotop_probe.recording.redact import StreamRedactor

# An unfinished line, such as a prompt or a progress bar, is recorded after this many seconds without more of it.
_SILENCE_S = 0.2


class RedactedLog(OutputLog):
    """Records whole lines, redacted. If the holder is killed, the unfinished line of each stream is lost."""

    def __init__(self, folder: str, stem: str, header: bytes, limit: int, state: memoryview[int]) -> None:
        super().__init__(folder, stem, header, limit, state)
        self._redaction_lock = threading.Lock()
        self._redactors: dict[int, StreamRedactor] = {}
        self._times: dict[int, float] = {}  # of the last output of each stream
        threading.Thread(target=self._flush_silent_streams, daemon=True).start()

    def append(self, stream: int, data: bytes) -> None:
        """Record ``data``, the next bytes of a stream (index into STREAMS), as far as its lines are finished."""
        with self._redaction_lock:
            redactor = self._redactors.setdefault(stream, StreamRedactor())
            self._times[stream] = time.monotonic()
            super().append(stream, redactor.feed(data))

    def append_from(self, stream: int, pipe: int, size: int) -> None:
        """Record the next ``size`` bytes of a stream, which are in a pipe."""
        self.append(stream, os.read(pipe, size))

    def flush(self) -> None:
        """Record unfinished lines."""
        with self._redaction_lock:
            for stream, redactor in self._redactors.items():
                super().append(stream, redactor.flush())

    def _flush_silent_streams(self) -> None:
        while True:
            time.sleep(_SILENCE_S / 2)
            with self._redaction_lock:
                silent_since = time.monotonic() - _SILENCE_S
                for stream, redactor in self._redactors.items():
                    if self._times[stream] <= silent_since:
                        super().append(stream, redactor.flush())
