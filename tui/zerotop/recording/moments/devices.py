"""Maps a process's device ordinals to the GPUs of its node.

A process numbers the devices in ``CUDA_VISIBLE_DEVICES``, in that order. NVML numbers all GPUs of a node, and the sampler
adds the instances of GPUs divided by MIG. UUIDs match them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zerotop.recording.keys import GpuKey, RankProcess, identify_process
from zerotop.recording.moments.moment import Moment, at_cursor, at_event
from zerotop.recording.table_files import Source
from zerotop_probe.recording.events import Engine, EngineDevice, EngineFacts, Hello, Node, NodeGpu, OutOfMemory

FASTEST_LINK = 1e12
"""Bytes per second. No link is faster; counters jump when a GPU is reset."""
_LIMITED_SHARE = 0.97  # CUDA's capacity is a little less than NVML's


class Devices:
    """The GPUs of all nodes by the sampler's numbers, and the devices of processes."""

    def __init__(self, nodes: Iterable[Node], engines: Iterable[Engine], hellos: Iterable[Hello] = ()) -> None:
        self._visible = {
            (hello.writer.host, hello.writer.pid): (hello.environment or {}).get("CUDA_VISIBLE_DEVICES", "").split(",")
            for hello in hellos
        }
        self._numbers_by_uuid: dict[str, dict[str, int]] = {}
        self._mig_instances: dict[tuple[str, str], list[NodeGpu]] = {}
        self._numbers_by_ordinal: dict[tuple[str, int, int], int] = {}
        self.unified: set[GpuKey] = set()
        """The GPUs whose memory is the host's, as NVML or CUDA says."""
        for node in nodes:
            for gpu in node.gpus or []:
                self._numbers_by_uuid.setdefault(node.writer.host, {})[_strip_uuid(gpu.uuid)] = gpu.index
                self.unified |= {(node.writer.host, gpu.index)} if gpu.unified else set()
                if gpu.mig_of:
                    self._mig_instances.setdefault((node.writer.host, _strip_uuid(gpu.mig_of)), []).append(gpu)
        # In order of the engines, so that assigned numbers stay.
        for engine in engines:
            for device in engine.devices or []:
                host, pid, ordinal = engine.writer.host, engine.writer.pid, device.ordinal or 0
                number = self._numbers_by_ordinal[host, pid, ordinal] = self._find_number(host, ordinal, device)
                self.unified |= {(host, number)} if device.unified else set()

    def find_gpu(self, host: str, pid: int, ordinal: int) -> GpuKey:
        """Return the key of a process's device. A GPU that the sampler does not list gets an unused number."""
        number = self._numbers_by_ordinal.get((host, pid, ordinal))
        if number is None:  # its engine names no device, as of a model that has no memory
            visible = self._visible.get((host, pid), [])
            name = visible[ordinal].strip() if ordinal < len(visible) else ""
            number = int(name) if name.isdigit() else ordinal
        return host, number

    def _find_number(self, host: str, ordinal: int, device: EngineDevice) -> int:
        uuid, known = _strip_uuid(device.uuid), self._numbers_by_uuid.setdefault(host, {})
        if not uuid:
            # Some PyTorch versions report no UUID: CUDA_VISIBLE_DEVICES may have NVML's number.
            visible = device.visible or ""
            return int(visible) if visible.isdigit() else ordinal
        number = known.get(uuid, self._find_instance(host, uuid, device))
        if number is None:  # CUDA_VISIBLE_DEVICES may have the first part of a UUID
            matches = [index for other, index in known.items() if other.startswith(uuid)]
            number = matches[0] if len(matches) == 1 else None
        if number is None:
            taken = set(known.values())
            number = known[uuid] = ordinal if ordinal not in taken else max(taken) + 1
        return number

    def _find_instance(self, host: str, uuid: str, device: EngineDevice) -> int | None:
        """Find a MIG instance by its size: CUDA may report the UUID of the whole GPU for it."""
        size = device.total_bytes or 0
        instances = self._mig_instances.get((host, uuid), [])
        matches = [gpu for gpu in instances if abs((gpu.total_bytes or 0) - size) <= 0.05 * size]
        return matches[0].index if len(matches) == 1 else None


def _strip_uuid(uuid: str | None) -> str:
    """Return the part of a UUID that PyTorch reports: NVML's has the prefix ``GPU-`` or ``MIG-``."""
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-").lower()


@at_event()
def read_devices(at: Moment) -> Devices:
    """Return the devices of all processes."""
    return Devices(at.events_of(Node), at.events_of(Engine), at.events_of(Hello))


def find_limit(total_bytes: int, engine: EngineFacts | None, failures: Sequence[OutOfMemory]) -> int | None:
    """Return what PyTorch may reserve in a process limited to a fraction of its device; None without such a limit."""
    sizes = [failure.limit_bytes for failure in reversed(failures)]
    sizes += [device.limit_bytes for device in (engine.devices if engine is not None else None) or []]
    return next((size for size in sizes if size is not None and 0 < size < _LIMITED_SHARE * total_bytes), None)


@at_event()
def _name_gpus(at: Moment) -> dict[GpuKey, str]:
    return {(node.writer.host, gpu.index): gpu.name for node in at.events_of(Node) for gpu in node.gpus or ()}


def find_gpu_name(at: Moment, key: GpuKey | None) -> str | None:
    """Return the product name of a GPU; None where unknown."""
    return _name_gpus(at.whole).get(key) if key is not None else None


def name_memory(at: Moment, key: GpuKey) -> str:
    """Return the name of a GPU, and that its memory is the host's where that is so."""
    name = find_gpu_name(at, key) or "GPU"
    return f"{name}, unified memory" if key in read_devices(at).unified else name


@at_cursor
def locate_allocators(at: Moment) -> dict[Source, GpuKey]:
    """Return the GPU of each allocator's table: that of its last record."""
    return _locate(at, sum(len(source.array) > 0 for source in at.sources["allocator"]))[0]


@at_cursor
def locate_processes(at: Moment) -> dict[RankProcess, GpuKey]:
    """Return the GPU on which each rank's process allocates."""
    return _locate(at, sum(len(source.array) > 0 for source in at.sources["allocator"]))[1]


@at_event()
def _locate(at: Moment, _begun: int) -> tuple[dict[Source, GpuKey], dict[RankProcess, GpuKey]]:
    """``_begun``: how many of the tables have a record, and so name their GPU."""
    devices, tables = read_devices(at), [source for source in at.sources["allocator"] if len(source.array)]
    located = {one: devices.find_gpu(one.host, one.pid, int(one.array["device"][-1])) for one in tables}
    return located, {identify_process(source): key for source, key in located.items()}
