"""The speed of redacting output, and the number of harmless words taken for secrets in the recordings of the tests.

Speeds are ratios to compressing the same bytes with zlib (level 1) in the same run.

python benchmarks/redaction.py
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

_BYTES = 10_000_000
_READ_BYTES = 1 << 16
_LINES = {
    "without hints": b"step 10: loss 2.31 lr 1e-4 grad 0.5 time 3.2 s\n",
    "with numbers of tokens": b"step 10: loss 2.31, 4096 tokens/s, tokens: 1000000, lr=1e-4\n",
    "with secrets": b'export HF_TOKEN=abcdefghijk; curl -H "Authorization: Bearer abc" https://u:p@x/\n',
}


def measure_s(work: Callable[[bytes], object], data: bytes) -> float:
    """Return the processor time of feeding ``data`` in pieces."""
    begin_s = time.process_time()
    for begin in range(0, len(data), _READ_BYTES):
        work(data[begin : begin + _READ_BYTES])
    return time.process_time() - begin_s


def main() -> None:
    import recordings
    from zerotop.recording.packed.packing import unpack_files
    from zerotop_probe.recording.redact import StreamRedactor, redact_command, redact_text

    output, commands = b"", set[tuple[str, ...]]()
    for name in recordings.list_recordings():
        recording = recordings.open_recording(name)
        output += b"".join(
            data for file, data in unpack_files(recordings.find_packed_file(name)).items() if file.endswith(".log")
        )
        commands.add(tuple(recording.info["command"]))
        facts = [event.facts for event in recording.events]
        commands |= {tuple(fact[key]) for fact in facts for key in ("command", "arguments") if fact.get(key)}
    for title, piece in {"of the recordings": output, **_LINES}.items():
        data = (piece * (_BYTES // len(piece) + 1))[:_BYTES]
        redacting_s, packing_s = measure_s(StreamRedactor().feed, data), measure_s(lambda part: zlib.compress(part, 1), data)
        print(f"output {title}: {len(data) / redacting_s / 1e6:.0f} MB/s, {redacting_s / packing_s:.1f} x zlib")
    lines = output.decode(errors="replace").splitlines()
    print(f"lines of output changed: {sum(redact_text(line) != line for line in lines)} of {len(lines)}")
    print(f"command lines changed: {sum(redact_command(words) != list(words) for words in commands)} of {len(commands)}")


if __name__ == "__main__":
    main()
