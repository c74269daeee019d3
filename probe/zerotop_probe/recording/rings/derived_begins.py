"""The begins of phases that a rank does not record itself.

In a short step a rank only notes the begin of a phase in its ring's header, and writes the records of all spans when the
step ends. There is still a begin for each span: those of phases in progress come from the header, the others from the
spans.
"""

from __future__ import annotations

from zerotop_probe.recording.tables import BEGINS, SPANS

_TIME_BYTES = 8
_UNPACK_SPAN = SPANS.record_struct.unpack
_PACK_BEGIN = BEGINS.record_struct.pack


def derive_begins(begins: list[bytes], spans: list[bytes], phases: list[bytes], newest_ns: int) -> list[bytes]:
    """Return the missing records of BEGINS, of phases that began after ``newest_ns``, the last begin in the recording.

    ``begins`` and ``spans`` are new records of the two tables, ``phases`` those of the ring's header, which must have been
    read before. Phases within others either have a record of their begin or need none.
    """
    known = {get_time(record) for record in begins}
    missing = {get_time(record): record for record in phases}
    for span in spans:
        begin_ns, _, _, step, micro_step, _, _, phase, _, depth, engine, _ = _UNPACK_SPAN(span)
        if not depth:
            missing[begin_ns] = _PACK_BEGIN(begin_ns, step, micro_step, phase, depth, engine, 0)
    return [record for time_ns, record in missing.items() if time_ns > newest_ns and time_ns not in known]


def get_time(record: bytes) -> int:
    return int.from_bytes(record[:_TIME_BYTES], "little", signed=True)
