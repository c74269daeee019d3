"""A simulation of PyTorch's caching allocator: the segments that a sequence of allocations and frees reserves.

From PyTorch's ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/CachingHostAllocator.h`` (2.4 to 2.9): ``round_size``,
``get_allocation_size``, ``get_free_block``, ``should_split``, ``alloc_found_block``, ``free_block``,
``release_available_cached_blocks``, ``garbage_collect_cached_blocks``, ``release_cached_blocks`` and
``map_block``. It has one device. A block that another stream uses is free at once, as with all work of a step in order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 1 << 20
MIN_BLOCK, SMALL_SIZE, SMALL_BUFFER = 512, MIB, 2 * MIB
LARGE_BUFFER, MIN_LARGE_ALLOC, ROUND_LARGE = 20 * MIB, 10 * MIB, 2 * MIB

_SPACE = 1 << 50  # between the addresses of two expandable segments


class OutOfMemoryError(Exception):
    """The device has no segment of the size that a block needs, and nothing is left to free."""


@dataclass(frozen=True, slots=True)
class AllocatorRules:
    """The part of ``PYTORCH_CUDA_ALLOC_CONF`` that decides which blocks a request gets."""

    max_split_size: int | None = None  # bytes
    roundup_power2_divisions: int = 0
    expandable_segments: bool = False
    garbage_collection_threshold: float = 0.0  # of the device's limit


DEFAULT_RULES = AllocatorRules()


@dataclass(slots=True, eq=False)
class Block:
    """A free or allocated part of a segment."""

    address: int
    size: int
    pool: _Pool
    is_free: bool = False
    is_mapped: bool = True
    before: Block | None = None
    after: Block | None = None
    requested: int = 0
    born: int = 0  # searches of the pool before it was freed

    @property
    def is_split(self) -> bool:
        return self.before is not None or self.after is not None


class _Pool:
    """Free blocks of one stream, small or large, by size and then address."""

    def __init__(self, *, is_small: bool, stream: int) -> None:
        self.is_small = is_small
        self.stream = stream
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}  # by address
        self.searches = 0
        self.tail: Block | None = None  # the unmapped rest of the expandable segment

    def add(self, block: Block) -> None:
        block.is_free, block.born = True, self.searches
        insort(self.keys, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        block.is_free = False
        del self.keys[bisect_left(self.keys, (block.size, block.address))]
        del self.blocks[block.address]

    def list_free(self) -> list[Block]:
        return [self.blocks[address] for _, address in self.keys]


class CachingAllocator:
    """The allocator of one device. Sizes are bytes."""

    def __init__(self, settings: AllocatorRules | None = None, *, limit: int | None = None) -> None:
        """``limit``: what all segments may have together, where the device is not endless."""
        self._settings = settings or DEFAULT_RULES
        self._limit = limit
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = _SPACE
        self.allocated = self.allocated_peak = 0
        self.requested = 0
        self.reserved = self.reserved_peak = 0
        self.segments = 0
        self.retries = 0

    def allocate(self, size: int, *, stream: int = 0) -> Block:
        """Return a block for a request. Raises OutOfMemoryError."""
        rounded = self._round(size)
        is_small = rounded <= SMALL_SIZE
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = _Pool(is_small=is_small, stream=stream)
        block = self._take(pool, rounded) or self._reserve(pool, rounded)
        self._split(block, rounded)
        block.requested = size
        self.requested += size
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache, together with its free neighbours."""
        self.requested -= block.requested
        self.allocated -= block.size
        pool = block.pool
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free and neighbour.is_mapped:
                pool.remove(neighbour)
                _merge(block, neighbour)
        pool.add(block)

    def empty_cache(self) -> None:
        """Give back all segments without a block in use, and of expandable ones their free pages."""
        for pool in self._pools.values():
            for block in pool.list_free():
                if pool.tail is not None and self._settings.expandable_segments:
                    self._unmap(pool, block)
                elif not block.is_split:
                    self._release(block)

    def reset_peaks(self) -> None:
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    # --- finding a block -------------------------------------------------------------------------------------------------

    def _round(self, size: int) -> int:
        divisions = self._settings.roundup_power2_divisions
        if divisions > 1 and size > MIN_BLOCK * divisions:
            floor = 1 << (size.bit_length() - 1)
            part = floor >> (divisions.bit_length() - 1)
            return -(-size // part) * part if part else 2 * floor
        return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)

    def _take(self, pool: _Pool, size: int) -> Block | None:
        """Return the smallest free block that is large enough, the first by address of equal ones."""
        pool.searches += 1
        index = bisect_left(pool.keys, (size, 0))
        if index == len(pool.keys):
            return None
        block = pool.blocks[pool.keys[index][1]]
        if self._settings.expandable_segments:
            # The last block counts with what its segment can grow by.
            following = index + 1
            while following < len(pool.keys):
                other = pool.blocks[pool.keys[following][1]]
                if _find_room(other) >= _find_room(block):
                    break
                block, following = other, following + 1
        most = self._settings.max_split_size
        if most is not None and ((size < most <= block.size) or (size >= most and block.size >= size + LARGE_BUFFER)):
            return None
        pool.remove(block)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        most = self._settings.max_split_size
        if block.pool.is_small or self._settings.expandable_segments:
            is_split = rest >= MIN_BLOCK
        else:
            is_split = rest > SMALL_SIZE and (most is None or size < most)
        if not is_split:
            return
        remaining = Block(block.address + size, rest, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = remaining
        block.after, block.size = remaining, size
        block.pool.add(remaining)

    # --- segments --------------------------------------------------------------------------------------------------------

    def _reserve(self, pool: _Pool, size: int) -> Block:
        if self._settings.garbage_collection_threshold and self._limit is not None:
            self._collect(int(self._settings.garbage_collection_threshold * self._limit))
        block = self._grow(pool, size)
        if block is None and self._release_oversized(pool, size):
            self.retries += 1
            block = self._grow(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, size)
        if block is None:
            raise OutOfMemoryError(f"no segment for {size} bytes beside {self.reserved} reserved ones")
        return block

    def _grow(self, pool: _Pool, size: int) -> Block | None:
        """Return a block from the device; None if that has too little."""
        if self._settings.expandable_segments:
            return self._map(pool, size)
        segment = SMALL_BUFFER if size <= SMALL_SIZE else LARGE_BUFFER if size < MIN_LARGE_ALLOC else _round_large(size)
        if not self._has_room(segment):
            return None
        self._count(segment)
        self.segments += 1
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _map(self, pool: _Pool, size: int) -> Block | None:
        """Return the free end of the pool's expandable segment, with pages added to it."""
        if pool.tail is None:
            self._next_address += _SPACE
            pool.tail = Block(self._next_address, _SPACE, pool, is_free=True, is_mapped=False)
            self.segments += 1
        # A gap that was unmapped earlier is filled first: the lowest address with enough room.
        tail = pool.tail
        last = tail.before if tail.before is not None and tail.before.is_free else None
        page = SMALL_BUFFER if pool.is_small else LARGE_BUFFER
        missing = size - (last.size if last is not None else 0)
        grown = -(-missing // page) * page
        if not self._has_room(grown):
            return None
        self._count(grown)
        if last is not None:
            pool.remove(last)
            last.size += grown
        else:
            last = Block(tail.address, grown, pool, before=tail.before, after=tail)
            if tail.before is not None:
                tail.before.after = last
            tail.before = last
        tail.address += grown
        return last

    def _unmap(self, pool: _Pool, block: Block) -> None:
        """Give back the whole pages of the free end; gaps between blocks stay, which real ones do not."""
        if block.after is not pool.tail or block.after is None:
            return
        page = SMALL_BUFFER if pool.is_small else LARGE_BUFFER
        given = block.size // page * page
        if given == 0:
            return
        pool.remove(block)
        block.size -= given
        block.after.address -= given
        self._count(-given)
        if block.size:
            pool.add(block)
            return
        block.after.before = block.before
        if block.before is not None:
            block.before.after = block.after

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self._count(-block.size)
        self.segments -= 1

    def _release_oversized(self, pool: _Pool, size: int) -> bool:
        """Give back unsplit blocks beyond ``max_split_size``, from the largest on, until the size is there."""
        most = self._settings.max_split_size
        if most is None:
            return False
        wanted, given = max(size, most), 0
        index = bisect_left(pool.keys, (wanted, 0))
        if index < len(pool.keys):
            self._release(pool.blocks[pool.keys[index][1]])
            return True
        while given < wanted and pool.keys and pool.keys[-1][0] >= most:
            given += pool.keys[-1][0]
            self._release(pool.blocks[pool.keys[-1][1]])
        return given >= wanted

    def _collect(self, threshold: int) -> None:
        """Give back cached segments that were not used for longer than the average, beyond a threshold of reserved bytes."""
        for pool in [pool for pool in self._pools.values() if not pool.is_small]:
            while self.reserved > threshold:
                blocks = [block for block in pool.blocks.values() if not block.is_split]
                if not blocks:
                    break
                ages = [pool.searches - block.born for block in blocks]
                least = sum(ages) / len(ages)
                for block, age in zip(blocks, ages, strict=True):
                    if age >= least:
                        self._release(block)

    def _has_room(self, size: int) -> bool:
        return self._limit is None or self.reserved + size <= self._limit

    def _count(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)


def _round_large(size: int) -> int:
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def _find_room(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


def _merge(block: Block, neighbour: Block) -> None:
    """Make a neighbour part of a block."""
    if neighbour is block.before:
        block.address = neighbour.address
        block.before = neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block
    block.size += neighbour.size
