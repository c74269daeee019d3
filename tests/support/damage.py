"""Ways to damage a recording: each changes the files of a copy, chosen by a random generator with a fixed seed."""

from __future__ import annotations

import io
import json
import math
import os
import random
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from zerotop.recording.packed.packing import pack_folder, unpack_files
from zerotop.recording.storage import Directory
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.event_base import read_fields

ESCAPES = "\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[2J\u202e\x9b2J\r\n\x00end"
NUMBERS: tuple[Any, ...] = (0, -1, -2, 1 << 31, (1 << 31) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**400)
VALUES: tuple[Any, ...] = (
    None,
    True,
    *NUMBERS,
    2.5,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "7",
    ESCAPES,
    "x" * 100_000,
    [],
    [1],
    [{"a": None}],
    [[]] * 1000,
    {},
    {"a": 1},
    {ESCAPES: ESCAPES},
)
DTYPES: tuple[Any, ...] = (
    "<i4",
    "<f8",
    "<f4",
    "|O",
    "S8",
    "S2000000000",
    "<M8[ns]",
    "V16",
    "<U100",
    "(1000000,)<i8",
    "c16",
    "?",
    "",
    "x",
    ">i8",
    None,
    7,
    [],
    "<i8,<i8",
)
_DEEP = 100_000
_MEBIBYTE = 1 << 20

Damage = Callable[[Path, random.Random], None]
ON_FOLDERS: dict[str, Damage] = {}
"""Change a recording folder."""
ON_PACKS: dict[str, Damage] = {}
"""Change a packed recording."""


def _on_folders(damage: Damage) -> Damage:
    ON_FOLDERS[damage.__name__] = damage
    return damage


def _on_packs(damage: Damage) -> Damage:
    ON_PACKS[damage.__name__] = damage
    return damage


def _choose_file(folder: Path, chance: random.Random, pattern: str = "*") -> Path:
    """Return a file; of a table first, so that tables with many files are not chosen more often than others."""
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    kind = chance.choice(sorted({path.name.partition("-")[0] for path in paths}))
    return chance.choice([path for path in paths if path.name.partition("-")[0] == kind])


def _choose_table(folder: Path, chance: random.Random) -> tuple[Path, dict[str, Any], Any]:
    """Return a table's file with its header and a copy of its records."""
    path = _choose_file(folder, chance, "*.rec")
    line, _, data = path.read_bytes().partition(b"\n")
    header = json.loads(line)
    dtype = np.dtype([tuple(column) for column in header["dtype"]])
    return path, header, np.frombuffer(data, dtype, len(data) // dtype.itemsize).copy()


def _write_table(path: Path, header: Any, records: bytes) -> None:
    path.write_bytes(json.dumps(header).encode() + b"\n" + records)


def _list_places(value: Any, depth: int = 0) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON object."""
    parts = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [(key, *rest) for key, part in parts for rest in ((), *(_list_places(part, depth + 1) if depth < 3 else ()))]


def _replace_value(facts: Any, chance: random.Random) -> None:
    """Replace or remove one value of a JSON object, except for the format: a newer one is refused on purpose."""
    *way, last = chance.choice([place for place in _list_places(facts) if place[0] != "zerotop"])
    for key in way:
        facts = facts[key]
    if chance.random() < 0.1:
        del facts[last]
    else:
        facts[last] = chance.choice(VALUES)


# --- bytes of any file ---------------------------------------------------------------------------------------------------


@_on_folders
def flipped_bits(folder: Path, chance: random.Random) -> None:
    path = _choose_file(folder, chance)
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 8, 64))):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


@_on_folders
def zeroed_range(folder: Path, chance: random.Random) -> None:
    path = _choose_file(folder, chance, chance.choice(("*", "*.rec")))
    data = bytearray(path.read_bytes())
    size = chance.choice((48, 512, 4096, len(data)))
    begin = chance.randrange(len(data) + 1)
    data[begin : begin + size] = bytes(len(data[begin : begin + size]))
    path.write_bytes(data)


@_on_folders
def random_range(folder: Path, chance: random.Random) -> None:
    path = _choose_file(folder, chance, chance.choice(("*", "*.rec")))
    data = bytearray(path.read_bytes())
    begin = chance.randrange(len(data) + 1)
    size = len(data[begin : begin + chance.choice((48, 4096))])
    data[begin : begin + size] = chance.randbytes(size)
    path.write_bytes(data)


@_on_folders
def removed_range(folder: Path, chance: random.Random) -> None:
    path = _choose_file(folder, chance)
    data = bytearray(path.read_bytes())
    begin = chance.randrange(len(data) + 1)
    del data[begin : begin + chance.choice((1, 7, 48, 4096))]
    path.write_bytes(data)


@_on_folders
def repeated_range(folder: Path, chance: random.Random) -> None:
    path = _choose_file(folder, chance)
    data = bytearray(path.read_bytes())
    begin = chance.randrange(len(data) + 1)
    data[begin:begin] = data[begin : begin + chance.choice((1, 48, 4096))] * chance.choice((1, 50))
    path.write_bytes(data)


@_on_folders
def cut_short(folder: Path, chance: random.Random) -> None:
    path = _choose_file(folder, chance)
    os.truncate(path, chance.randrange(path.stat().st_size + 1))


@_on_folders
def sparse_end(folder: Path, chance: random.Random) -> None:
    """A sparse file whose size is given as terabytes."""
    os.truncate(_choose_file(folder, chance), chance.choice((1 << 30, 1 << 36, 1 << 42)))


# --- headers -------------------------------------------------------------------------------------------------------------


@_on_folders
def foreign_dtype(folder: Path, chance: random.Random) -> None:
    path, header, rows = _choose_table(folder, chance)
    columns = header["dtype"]
    place = chance.randrange(len(columns))
    match chance.randrange(6):
        case 0:
            del columns[place]
        case 1:
            columns[place] = [columns[place][0], chance.choice(DTYPES)]
        case 2:
            columns.append([chance.choice((columns[place][0], "newer", ESCAPES, "")), chance.choice(DTYPES)])
        case 3:
            columns[place] = chance.choice(VALUES)
        case 4:
            header["dtype"] = chance.choice(VALUES)
        case 5:
            columns += [[f"c{number}", "<i8"] for number in range(20_000)]
    _write_table(path, header, rows.tobytes())


@_on_folders
def wrong_header(folder: Path, chance: random.Random) -> None:
    path, header, rows = _choose_table(folder, chance)
    _replace_value(header, chance)
    _write_table(path, header, rows.tobytes())


@_on_folders
def other_table(folder: Path, chance: random.Random) -> None:
    path, header, rows = _choose_table(folder, chance)
    header["table"] = chance.choice([*tables.TABLES, "newer", ESCAPES])
    _write_table(path, header, rows.tobytes())


@_on_folders
def odd_first_line(folder: Path, chance: random.Random) -> None:
    path = _choose_file(folder, chance, chance.choice(("*.rec", "*.jsonl", "session.json")))
    whole = path.read_bytes()
    line = chance.choice((b"[" * _DEEP, b"x" * (3 * _MEBIBYTE), b'{"a":' * _DEEP, b"", b"null", b"\xff" * 90, b"1" * 9000))
    path.write_bytes(line + b"\n" + whole.partition(b"\n")[2])


@_on_folders
def foreign_writer(folder: Path, chance: random.Random) -> None:
    """Another host, rank or process in every file of one writer."""
    stem = "-".join(_choose_file(folder, chance, "*-*").stem.split("-")[1:])
    fact, value = chance.choice(
        (("host", ESCAPES), ("rank", 1 << 30), ("rank", -7), ("pid", 0), ("boot", "b"), ("role", "x"))
    )
    for path in folder.glob(f"*-{stem}.*"):
        line, _, rest = path.read_bytes().partition(b"\n")
        if path.suffix in (".rec", ".jsonl"):
            header = json.loads(line)
            header["writer"][fact] = value
            path.write_bytes(json.dumps(header).encode() + b"\n" + rest)


# --- records -------------------------------------------------------------------------------------------------------------


@_on_folders
def extreme_values(folder: Path, chance: random.Random) -> None:
    path, header, rows = _choose_table(folder, chance)
    if len(rows):
        name = chance.choice(rows.dtype.names)
        kind = rows.dtype[name]
        chosen = slice(None) if chance.random() < 0.3 else chance.sample(range(len(rows)), min(len(rows), 3))
        if kind.kind == "S":
            rows[name][chosen] = ESCAPES.encode()[: kind.itemsize]
        elif kind.kind == "f":
            rows[name][chosen] = chance.choice((math.nan, math.inf, -math.inf, -1.0, 3e38, 0.0))
        else:
            limits = np.iinfo(kind)
            rows[name][chosen] = chance.choice((limits.min, limits.max, limits.max // 2, 0, limits.max - 1))
    _write_table(path, header, rows.tobytes())


@_on_folders
def unordered_records(folder: Path, chance: random.Random) -> None:
    path, header, rows = _choose_table(folder, chance)
    order = {0: rows[::-1], 1: rows[np.random.default_rng(chance.randrange(99)).permutation(len(rows))], 2: rows.repeat(3)}
    _write_table(path, header, order[chance.randrange(3)].tobytes())


@_on_folders
def shifted_times(folder: Path, chance: random.Random) -> None:
    path, header, rows = _choose_table(folder, chance)
    time_column = tables.TABLES[header["table"]].time_column
    begin = chance.randrange(len(rows) + 1)
    rows[time_column][begin:] += np.int64(chance.choice((10**9, 10**15, 1 << 60, -(10**9), -(10**15), -(1 << 60))))
    _write_table(path, header, rows.tobytes())


@_on_folders
def different_keys(folder: Path, chance: random.Random) -> None:
    """Every record of another process, GPU, step, thread or phase."""
    path, header, rows = _choose_table(folder, chance)
    names = [name for name in ("pid", "tid", "rank", "gpu", "step", "phase", "device", "engine") if name in rows.dtype.names]
    if names and len(rows):
        rows = rows.repeat(max(1, 20_000 // len(rows)))
        name = chance.choice(names)
        kind = np.iinfo(rows.dtype[name])
        rows[name] = np.random.default_rng(1).integers(0, kind.max, len(rows), rows.dtype[name].type)
    _write_table(path, header, rows.tobytes())


# --- events and session.json ---------------------------------------------------------------------------------------------


def _change_events(folder: Path, chance: random.Random, change: Callable[[list[str]], list[str]]) -> None:
    path = _choose_file(folder, chance, "events-*.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *change(lines[1:])]) + "\n")


@_on_folders
def wrong_fact(folder: Path, chance: random.Random) -> None:
    lines = [
        (path, number, json.loads(line))
        for path in sorted(folder.glob("events-*"))
        for number, line in enumerate(path.read_text().splitlines())
    ]
    name = chance.choice(sorted({facts.get("event", "") for _, _, facts in lines}))
    path, number, facts = chance.choice([line for line in lines if line[2].get("event", "") == name])
    _replace_value(facts, chance)
    whole = path.read_text().splitlines()
    whole[number] = json.dumps(facts)
    path.write_text("\n".join(whole) + "\n")


@_on_folders
def many_events(folder: Path, chance: random.Random) -> None:
    """One event thousands of times, each time of another rank, process or host name."""

    def add_many_events(lines: list[str]) -> list[str]:
        facts = json.loads(chance.choice(lines)) if lines else {"event": "rank_found", "time_ns": 0}
        changed = [
            {**facts, "rank": n, "pid": n, "step": n, "text": f"{n}", "why": f"{n}", "name": f"{n}"} for n in range(5000)
        ]
        return [*lines, *map(json.dumps, changed)]

    _change_events(folder, chance, add_many_events)


@_on_folders
def odd_event_line(folder: Path, chance: random.Random) -> None:
    odd = chance.choice(
        (
            "[" * _DEEP,
            '{"event":"node","time_ns":1,"a":' + '{"a":' * _DEEP + "1" + "}" * _DEEP + "}",
            '{"event":"node","time_ns":1,"a":' + "[" * 900 + "]" * 900 + "}",
            "x" * (8 * _MEBIBYTE),
            json.dumps({"event": "attached", "time_ns": 1, "text": "y" * (8 * _MEBIBYTE)}),
            json.dumps({"event": ESCAPES, "time_ns": 1, ESCAPES: ESCAPES}),
            '{"event":"node","time_ns":NaN}',
            '{"event":"total_steps","time_ns":1,"steps":' + "9" * 5000 + "}",
            '{"event":"engine","time_ns":1,"config":{"a":' + "1" * 5000 + "}}",
            '{"event":"engine","time_ns":1e400,"micro_batch":Infinity}',
            "\x00" * 5000,
        )
    )
    _change_events(folder, chance, lambda lines: [*lines[:2], odd, *lines[2:]])


@_on_folders
def moved_events(folder: Path, chance: random.Random) -> None:
    def shift_times(lines: list[str]) -> list[str]:
        shift = chance.choice((10**18, -(10**18), 1 << 61, -(10**10)))
        moved = [json.dumps(facts | {"time_ns": facts["time_ns"] + shift}) for facts in map(json.loads, lines)]
        return moved if chance.random() < 0.5 else moved[: len(moved) // 2] + lines[len(moved) // 2 :]

    _change_events(folder, chance, shift_times)


@_on_folders
def any_events(folder: Path, chance: random.Random) -> None:
    """Every declared event, with random values of the declared and of other types."""

    def add_random_events(lines: list[str]) -> list[str]:
        time_ns = json.loads(lines[-1])["time_ns"] if lines else 1
        fresh = []
        for name, event in events.EVENTS.items():
            fields = read_fields(event).values()
            facts = {key: chance.choice(VALUES) for key, _, _ in fields if chance.random() < 0.8}
            fresh.append(json.dumps({"time_ns": time_ns, "event": name, **facts}))
        return [*lines, *fresh]

    _change_events(folder, chance, add_random_events)


@_on_folders
def extreme_numbers(folder: Path, chance: random.Random) -> None:
    """The same extreme number in all facts of one event that are numbers: of the declared type, but absurd."""
    number = chance.choice((0, -5, (1 << 31) - 1, 1 << 40, 1 << 62, 1e308))

    def replace_numbers(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: replace_numbers(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [replace_numbers(inner) for inner in value]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number if is_number and key not in ("time_ns", "pid") else value

    def replace_numbers_of_kind(lines: list[str]) -> list[str]:
        facts = [json.loads(line) for line in lines]
        name = chance.choice(sorted({fact["event"] for fact in facts} or {""}))
        return [json.dumps(replace_numbers(fact) if fact["event"] == name else fact) for fact in facts]

    _change_events(folder, chance, replace_numbers_of_kind)


@_on_folders
def escapes_everywhere(folder: Path, chance: random.Random) -> None:
    """Control sequences in every text of the events and of session.json."""

    def insert_escapes(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: insert_escapes(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [insert_escapes(inner) for inner in value]
        return f"{ESCAPES}{value}" if isinstance(value, str) and key not in ("event", "boot", "host") else value

    for path in (*folder.glob("events-*"), folder / "session.json"):
        whole = path.suffix == ".json"
        texts = [path.read_text()] if whole else path.read_text().splitlines()
        path.write_text("\n".join(json.dumps(insert_escapes(json.loads(text))) for text in texts) + "\n")


@_on_folders
def wrong_recording_file(folder: Path, chance: random.Random) -> None:
    path = folder / "session.json"
    facts = json.loads(path.read_text())
    _replace_value(facts, chance)
    path.write_text(json.dumps(facts))


# --- files of other kinds ------------------------------------------------------------------------------------------------


@_on_folders
def no_plain_file(folder: Path, chance: random.Random) -> None:
    """A pipe, a device, a socket, a folder or a link in place of a file, or beside it."""
    path = _choose_file(folder, chance)
    if chance.random() < 0.7:
        path.unlink()
    else:
        path = path.with_name(path.stem + ".1" + path.suffix)
    match chance.randrange(7):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to("/dev/zero")
        case 3:
            path.symlink_to(path)
        case 4:
            path.symlink_to(folder)
        case 5:
            path.symlink_to("/proc/kmsg")
        case 6:
            with socket.socket(socket.AF_UNIX) as listener:
                here = os.getcwd()
                os.chdir(folder)  # a socket's path is limited to 108 bytes
                listener.bind(path.name[:90] + path.suffix)
                os.chdir(here)


@_on_folders
def many_files(folder: Path, chance: random.Random) -> None:
    whole = _choose_file(folder, chance, chance.choice(("*.rec", "*.jsonl"))).read_bytes()[:2048]
    suffix = chance.choice((".rec", ".jsonl", ".log"))
    for number in range(3000):
        (folder / f"events-rank{number}-x-{number}{suffix}").write_bytes(whole if number % 2 else b"")


@_on_folders
def odd_names(folder: Path, chance: random.Random) -> None:
    for path in list(folder.glob("*.rec"))[:6]:
        table = path.name.partition("-")[0]
        for name in ("\x1b[2J\n", "x" * 240, f"rank{'9' * 200}-x-1", os.fsdecode(b"\xff\xfe")):
            (folder / f"{table}-{name}.rec"[-255:]).write_bytes(path.read_bytes())


# --- packed recordings ---------------------------------------------------------------------------------------------------


@_on_packs
def flipped_pack(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 8, 64))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


@_on_packs
def flipped_directory(path: Path, chance: random.Random) -> None:
    """The names, sizes and flags at the end of the archive."""
    data = bytearray(path.read_bytes())
    begin = data.rfind(b"PK\x01\x02", 0, len(data) - 400)
    for _ in range(chance.choice((1, 4))):
        data[chance.randrange(max(0, begin), len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


@_on_packs
def cut_pack(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _rewrite_pack(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


@_on_packs
def wrong_contents(path: Path, chance: random.Random) -> None:
    def replace_content_value(members: dict[str, bytes]) -> None:
        contents = json.loads(members["packed.json"])
        _replace_value(contents, chance)
        members["packed.json"] = json.dumps(contents).encode()

    _rewrite_pack(path, replace_content_value)


@_on_packs
def swapped_tables(path: Path, chance: random.Random) -> None:
    def swap_members(members: dict[str, bytes]) -> None:
        names = chance.sample(sorted(members), 2)
        members[names[0]], members[names[1]] = members[names[1]], members[names[0]]

    _rewrite_pack(path, swap_members)


@_on_packs
def odd_members(path: Path, chance: random.Random) -> None:
    names = ("../../escaped", "/tmp/escaped.rec", "spans-../../x.rec", "events-\x1b[2J.jsonl", "a" * 60000, "events-.jsonl")
    _rewrite_pack(path, lambda members: members.update(dict.fromkeys(names, b"{}\n" * 10)))


@_on_packs
def many_members(path: Path, chance: random.Random) -> None:
    kind = chance.choice(("events-rank{}-x-1.jsonl", "spans-rank{}-x-1.rec", "{}", "session.json"))
    with zipfile.ZipFile(path, "a") as archive:
        # The records of the central directory alone: 200,000 names in a few megabytes.
        whole = archive.infolist()[-1]
        for number in range(200_000):
            info = zipfile.ZipInfo(kind.format(number))
            info.header_offset, info.CRC, info.file_size = whole.header_offset, whole.CRC, whole.file_size
            archive.filelist.append(info)
        archive._didModify = True  # type: ignore[attr-defined]


@_on_packs
def huge_member(path: Path, chance: random.Random) -> None:
    """Some megabytes that unpack to gigabytes."""
    name = chance.choice(
        ("events-rank0-x-1.jsonl", "session.json", "packed.json", "output-node-x-1.log", "spans-rank0-x-1.rec")
    )

    def remove_member(members: dict[str, bytes]) -> None:
        members.pop(name, None)

    _rewrite_pack(path, remove_member)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        _append_zeros(archive, name, chance.choice((1 << 30, 3 << 30)))


_COMPRESSED: dict[int, bytes] = {}


def _append_zeros(archive: zipfile.ZipFile, name: str, size: int) -> None:
    """Append a deflated member of zeros without compressing all of them."""
    if not _COMPRESSED:
        packer = zlib.compressobj(1, zlib.DEFLATED, -15)
        _COMPRESSED[0] = packer.compress(bytes(1 << 26)) + packer.flush(zlib.Z_FULL_FLUSH)
    data = _COMPRESSED[0] * (size >> 26) + zlib.compressobj(1, zlib.DEFLATED, -15).flush()
    info = zipfile.ZipInfo(name)
    archive.writestr(info, data)
    info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, size
    stream: Any = archive.fp
    stream.seek(info.header_offset)
    stream.write(info.FileHeader(zip64=False))


@_on_packs
def huge_table(path: Path, chance: random.Random) -> None:
    """A Parquet file of some kilobytes with hundreds of millions of rows."""
    import polars

    def inflate_table(members: dict[str, bytes]) -> None:
        contents = json.loads(members["packed.json"])
        table = chance.choice(contents["tables"])
        frame = polars.read_parquet(members[table["parquet"]]).head(1)
        buffer = io.BytesIO()
        rows = 30_000_000
        polars.concat([frame] * 1).select(polars.all().repeat_by(rows).explode()).write_parquet(buffer, compression="zstd")
        members[table["parquet"]] = buffer.getvalue()
        if chance.random() < 0.7:
            table["files"] = table["files"][:1]
            table["files"][0]["records"] = rows
        members["packed.json"] = json.dumps(contents).encode()

    _rewrite_pack(path, inflate_table)


@_on_packs
def lying_sizes(path: Path, chance: random.Random) -> None:
    """Sizes in the archive's directory that are not those of the members."""
    data = bytearray(path.read_bytes())
    begin = data.rfind(b"PK\x05\x06")
    offset = struct.unpack_from("<I", data, begin + 16)[0]
    while data[offset : offset + 4] == b"PK\x01\x02":
        if chance.random() < 0.5:
            struct.pack_into("<I", data, offset + 24, chance.choice((0, 1, 0xFFFFFFF0, 1 << 30)))
        offset += 46 + sum(struct.unpack_from("<HHH", data, offset + 28))
    path.write_bytes(data)


@_on_packs
def deep_contents(path: Path, chance: random.Random) -> None:
    name = chance.choice(("packed.json", "session.json"))
    _rewrite_pack(path, lambda members: members.update({name: b'{"a":' * _DEEP}))


@_on_packs
def damaged_inside(path: Path, chance: random.Random) -> None:
    """A damaged folder, packed."""
    folder = path.with_suffix(".folder")
    folder.mkdir()
    for name, content in unpack_files(path).items():
        (folder / name).write_bytes(content)
    kinds = [
        extreme_values,
        unordered_records,
        shifted_times,
        different_keys,
        wrong_fact,
        foreign_writer,
        escapes_everywhere,
        wrong_recording_file,
        any_events,
    ]
    chance.choice(kinds)(folder, chance)
    with path.open("wb") as stream:
        pack_folder(Directory(folder), stream)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


# --- files that change while they are shown ------------------------------------------------------------------------------


def shrink_files(folder: Path, chance: random.Random) -> None:
    """Truncate, empty, replace or remove files of a recording that somebody looks at."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    for path in chance.sample(paths, max(1, len(paths) // 2)):
        match chance.randrange(5):
            case 0:
                os.truncate(path, 0)
            case 1:
                os.truncate(path, path.stat().st_size // 2)
            case 2:
                path.unlink()
            case 3:
                fresh = path.with_suffix(".fresh")
                fresh.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
                fresh.replace(path)
            case 4:
                path.write_bytes(chance.randbytes(200_000))
