"""Which GPU of a node a process means by an ordinal of its own.

A process numbers what ``CUDA_VISIBLE_DEVICES`` shows it, in that order; NVML numbers all GPUs of a node, and the sampler the
instances of those that MIG has divided, after them. They are the same where their UUIDs are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zerotop.analysis.keys import GpuKey
from zerotop.session.reader import Event


class Devices:
    """The GPUs of all nodes, as the sampler numbers them, and those that processes have told of."""

    def __init__(self, nodes: Iterable[Event], engines: Iterable[Event]) -> None:
        self._numbers_by_uuid: dict[str, dict[str, int]] = {}
        self._mig_instances: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._numbers_by_ordinal: dict[tuple[str, int, int], int] = {}
        for node in nodes:
            for gpu in node.facts.get("gpus") or []:
                self._numbers_by_uuid.setdefault(node.host, {})[_strip_uuid(gpu.get("uuid"))] = int(gpu["index"])
                if gpu.get("mig_of"):
                    self._mig_instances.setdefault((node.host, _strip_uuid(gpu["mig_of"])), []).append(gpu)
        # In the order in which engines were made, so that a number that was given stays.
        for engine in engines:
            for device in engine.facts.get("devices") or []:
                ordinal = int(device.get("ordinal") or 0)
                self._numbers_by_ordinal[engine.host, engine.pid, ordinal] = self._find_number(engine.host, ordinal, device)

    def find_gpu(self, host: str, pid: int, ordinal: int) -> GpuKey:
        """The host and the sampler's number. Of a GPU that the sampler does not show, a number that no other has."""
        return host, self._numbers_by_ordinal.get((host, pid, ordinal), ordinal)

    def _find_number(self, host: str, ordinal: int, device: dict[str, Any]) -> int:
        uuid, known = _strip_uuid(device.get("uuid")), self._numbers_by_uuid.setdefault(host, {})
        if not uuid:
            # A PyTorch that does not tell it: what was made visible may be NVML's number.
            visible = str(device.get("visible") or "")
            return int(visible) if visible.isdigit() else ordinal
        found = known.get(uuid, self._find_instance(host, uuid, device))
        # Whoever makes a GPU visible need not write its UUID out.
        named = [index for other, index in known.items() if other.startswith(uuid)] if found is None else []
        if found is None and len(named) == 1:
            found = named[0]
        if found is None:
            taken = set(known.values())
            found = known[uuid] = ordinal if ordinal not in taken else max(taken) + 1
        return found

    def _find_instance(self, host: str, uuid: str, device: dict[str, Any]) -> int | None:
        """Of a MIG instance CUDA may tell the UUID of the whole GPU: then its size tells which of the instances it is."""
        size = device.get("total_bytes") or 0
        parts = self._mig_instances.get((host, uuid), [])
        close = [part for part in parts if abs(int(part.get("total_bytes") or 0) - size) <= 0.05 * size]
        return int(close[0]["index"]) if len(close) == 1 else None


def _strip_uuid(uuid: Any) -> str:
    """NVML writes ``GPU-1a2b...`` or ``MIG-1a2b...``, PyTorch only the rest."""
    return str(uuid or "").removeprefix("GPU-").removeprefix("MIG-").lower()
