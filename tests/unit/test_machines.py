"""What is known of processors to enter a thread: where registers lie, what is called with, and which machine is which."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from zerotop_probe.outside.attaching.ptrace.arch import Machine, Registers, RegisterSet, Rescue
from zerotop_probe.outside.attaching.python_process import MACHINES, REMOTE_EXEC_VERSION, CannotEnter, examine_process
from zerotop_probe.outside.procfs import ProcessHandle

STATE, CODE, TEXT = 0, 64, 128
FAR, RUN, STACK, BACK = 0x7F12_3456_0000, 0x1122_3344_5566_7788, 0x7F00_0000_0000, 0x7F00_0000_0010
# The words of the kernel's user_regs_struct and user_pt_regs, by their index.
WORDS = {
    "x86_64": {"rbp": 4, "r10": 7, "r8": 9, "rax": 10, "rdx": 12, "rsi": 13, "rdi": 14, "orig_rax": 15, "rip": 16,
               "eflags": 18, "rsp": 19, "gs": 26},
    "aarch64": {"x0": 0, "x1": 1, "x2": 2, "x4": 4, "x8": 8, "x29": 29, "x30": 30, "sp": 31, "pc": 32, "pstate": 33},
}  # fmt: skip
# As a disassembler reads it: push rbx; mov rbx, FAR; mov qword [rbx], 1; mov rdi, FAR + 128; mov rax, RUN; call rax;
# mov qword [rbx], 2; xor eax, eax; pop rbx; ret.
# And: stp x19, x30, [sp, #-16]!; adr x19, FAR; mov x9, 1; str x9, [x19]; adr x0, FAR + 128; ldr x9, RUN; blr x9; mov x9, 2;
# str x9, [x19]; mov w0, 0; ldp x19, x30, [sp], #16; ret.
PROGRAMS = {
    "x86_64": "5348bb00005634127f000048c7030100000048bf80005634127f000048b88877665544332211ffd048c7030200000031c05bc3",
    "aarch64": "f37bbfa9f3fdff10290080d2690200f980010010e900005820013fd6"
    "490080d2690200f900008052f37bc1a8c0035fd68877665544332211",
}


@pytest.fixture(params=sorted(MACHINES))
def each_machine(request: pytest.FixtureRequest) -> Machine:
    return MACHINES[request.param]


def filled_registers(machine: Machine) -> Registers:
    """Registers that each hold something of their own, every flag set."""
    count = ctypes.sizeof(machine.register_type) // 8
    words = [0xF000_0000_0000_0000 + index for index in range(count)]
    for flags in ("eflags", "pstate"):
        if flags in WORDS[machine.name]:
            words[WORDS[machine.name][flags]] = 0xFFFF_FFFF
    return machine.register_type.from_buffer_copy(struct.pack(f"<{count}Q", *words))


def list_changes(machine: Machine, before: Registers, after: Registers) -> dict[str, int]:
    """By name, the words that are others now; all of them have to be known ones."""
    count = ctypes.sizeof(before) // 8
    names = {index: name for name, index in WORDS[machine.name].items()}
    old, new = (struct.unpack(f"<{count}Q", bytes(registers)) for registers in (before, after))
    return {names.get(index, f"word {index}"): new[index] for index in range(count) if old[index] != new[index]}


def test_the_kernel_s_layout(each_machine: Machine) -> None:
    assert ctypes.sizeof(each_machine.register_type) == {"x86_64": 27 * 8, "aarch64": 34 * 8}[each_machine.name]
    registers = filled_registers(each_machine)
    words = struct.unpack(f"<{ctypes.sizeof(registers) // 8}Q", bytes(registers))
    for name, index in WORDS[each_machine.name].items():
        assert getattr(registers, name) == words[index], name


VECTORS = {
    "x86_64": RegisterSet(0x202, bytes(464) + struct.pack("<QQ", 7, 0) + bytes(32) + struct.pack("<Q", 7) + bytes(312)),
    "aarch64": RegisterSet(2, bytes(range(256)) * 2 + struct.pack("<IIQ", 3, 4, 0)),
}


@pytest.fixture
def rescue(each_machine: Machine) -> Rescue:
    before = filled_registers(each_machine)
    return each_machine.build_rescue(before, VECTORS[each_machine.name], mask=0xABCD, restorer=RUN)


def test_the_frame_of_a_signal_handler(each_machine: Machine, rescue: Rescue) -> None:
    """At the places that the kernel's struct rt_sigframe has."""
    before = filled_registers(each_machine)
    changes = list_changes(each_machine, before, rescue.registers)
    if each_machine.name == "x86_64":
        assert changes == {"rip": RUN, "rsp": rescue.address + 8, "orig_rax": 2**64 - 1}
        assert rescue.address + len(rescue.frame) <= before.rsp - 128
        words = {"r8": 6, "rax": 19, "rsp": 21, "rip": 22}
        assert all(read_word(rescue, index) == getattr(before, name) for name, index in words.items())
        assert read_word(rescue, 38) == 0xABCD  # uc_sigmask
        vectors = read_word(rescue, 29) - rescue.address
        assert (rescue.address + vectors) % 64 == 0
        assert struct.unpack_from("<IIQI", rescue.frame, vectors + 464) == (0x46505853, 836, 7, 832)
        assert rescue.frame[vectors + 832 :] == b"EXPF"
    else:
        assert changes == {"pc": RUN, "sp": rescue.address, "x30": RUN, "pstate": 0xFFFF_F3FF}
        assert rescue.address % 16 == 0
        assert rescue.address + len(rescue.frame) <= before.sp
        assert rescue.frame[312 : 312 + ctypes.sizeof(before)] == bytes(before)
        assert read_word(rescue, 21) == 0xABCD
        assert struct.unpack_from("<4I", rescue.frame, 592) == (0x46508001, 528, 3, 4)
        assert rescue.frame[608 : 608 + 512] == bytes(range(256)) * 2
        assert rescue.frame[1120:] == bytes(16)


def read_word(rescue: Rescue, index: int) -> int:
    (word,) = struct.unpack_from("<Q", rescue.frame, 8 * index)
    return int(word)


@pytest.mark.parametrize(("result", "is_restarted"), [(-512, True), (-516, True), (-4, False), (0, False)])
def test_an_interrupted_call_is_made_again(result: int, is_restarted: bool) -> None:
    machine = MACHINES["x86_64"]
    before = filled_registers(machine).with_values(orig_rax=7, rax=result)
    rescue = machine.build_rescue(before, None, mask=0, restorer=RUN)
    expected = (7, before.rip - 2) if is_restarted else (before.rax, before.rip)
    assert (read_word(rescue, 19), read_word(rescue, 22)) == expected


@pytest.mark.parametrize(("used", "size"), [(7, 2816), (7 | 1 << 18, 11008)])
def test_tiles_that_a_thread_does_not_use_are_left_out(used: int, size: int) -> None:
    content = bytes(464) + struct.pack("<Q", 0x602E7) + bytes(40) + struct.pack("<Q", used) + bytes(11008 - 520)
    machine = MACHINES["x86_64"]
    rescue = machine.build_rescue(filled_registers(machine), RegisterSet(0x202, content), mask=0, restorer=RUN)
    vectors = read_word(rescue, 29) - rescue.address
    assert struct.unpack_from("<IIQI", rescue.frame, vectors + 464) == (0x46505853, size + 4, 0x602E7, size)
    assert len(rescue.frame) == vectors + size + 4


def test_the_wide_vectors_of_arm_follow_their_reference() -> None:
    length, used = 32, 32 * 32 + 17 * 4
    body = bytes(number % 251 for number in range(used)) + bytes(-used % 16)
    content = struct.pack("<IIHHHH", 16 + len(body) + 16, 9999, length, 64, 1, 0) + body + struct.pack("<IIQ", 3, 4, 0)
    machine = MACHINES["aarch64"]
    rescue = machine.build_rescue(filled_registers(machine), RegisterSet(0x405, content), mask=0, restorer=RUN)
    magic, size, place, extra = struct.unpack_from("<IIQI", rescue.frame, 592 + 528)
    at = place - rescue.address
    assert (magic, size, at, extra) == (0x45585401, 32, 592 + 528 + 48, 16 + len(body) + 16)
    assert struct.unpack_from("<IIH", rescue.frame, at) == (0x53564501, 16 + len(body), length)
    assert rescue.frame[at + 16 : at + 16 + used] == body[:used]
    assert rescue.frame[608:624] == body[:16]
    assert rescue.frame[624:640] == body[32:48]


def test_asking_for_memory_sets_the_call_s_registers_and_no_others(each_machine: Machine, rescue: Rescue) -> None:
    asked = list_changes(each_machine, rescue.registers, each_machine.prepare_mapping(rescue, at=BACK, size=8192))
    nothing = 2**64 - 1
    if each_machine.name == "x86_64":
        # r9, the offset, is word 8. It returns to the restorer, whose address the frame begins with.
        assert asked == {"rip": BACK, "rax": 9, "rdi": 0, "rsi": 8192, "rdx": 7, "r10": 0x22, "r8": nothing, "word 8": 0} | {
            "rsp": rescue.address
        }
        assert read_word(rescue, 0) == RUN
    else:
        assert asked == {"pc": BACK, "x8": 222, "x0": 0, "x1": 8192, "x2": 7, "word 3": 0x22, "x4": nothing, "word 5": 0}
        assert rescue.registers.x30 == RUN


def test_a_call_begins_as_its_convention_wants(each_machine: Machine, rescue: Rescue) -> None:
    called = list_changes(
        each_machine, rescue.registers, each_machine.prepare_call(rescue, FAR, RUN, stack=STACK, back=BACK)
    )
    if each_machine.name == "x86_64":
        # Behind the return address the stack is a multiple of 16.
        assert called == {"rip": FAR, "rdi": RUN, "rsi": 0, "rax": 0, "rbp": 0, "rsp": STACK - 8, "eflags": 0xFFFF_FBFF}
        assert each_machine.build_frame(BACK) == struct.pack("<Q", BACK)
    else:
        assert called == {"pc": FAR, "x0": RUN, "x1": 0, "x29": 0, "x30": BACK, "sp": STACK}
        assert each_machine.build_frame(BACK) == b""


def test_the_end_is_what_an_assembler_makes(each_machine: Machine, rescue: Rescue) -> None:
    """mov rdi, rax; mov rsp, STACK; mov eax, 15; syscall. And: ldr x9, STACK; mov sp, x9; mov x8, 139; svc #0."""
    stack = each_machine.read_stack(rescue.registers).to_bytes(8, "little").hex()
    endings = {
        "x86_64": f"4889c748bc{stack}b80f0000000f05",
        "aarch64": f"c90000583f010091681180d2010000d4{bytes(8).hex()}{stack}",
    }
    assert each_machine.build_ending(rescue).hex() == endings[each_machine.name]


def test_registers_have_position_stack_and_result_after_a_call(each_machine: Machine) -> None:
    position, stack, call, argument, result = {
        "x86_64": ("rip", "rsp", "orig_rax", "rdi", "rax"), "aarch64": ("pc", "sp", "x8", "x0", "x0"),
    }[each_machine.name]  # fmt: skip
    after = filled_registers(each_machine)
    assert each_machine.read_position(after) == getattr(after, position)
    assert each_machine.read_stack(after) == getattr(after, stack)
    assert each_machine.read_call(after) == getattr(after, call)
    assert each_machine.read_argument(after) == getattr(after, argument)
    assert each_machine.read_result(after) == getattr(after, result)


def test_the_program_is_what_an_assembler_makes(each_machine: Machine) -> None:
    code = each_machine.build_program(FAR + CODE, state=FAR + STATE, states=(1, 2), text=FAR + TEXT, run=RUN)
    assert code.hex() == PROGRAMS[each_machine.name]
    assert len(code) <= TEXT - CODE


@pytest.fixture
def executable_page() -> Iterator[tuple[mmap.mmap, int]]:
    """Memory that can be executed, and where it lies."""
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    view = ctypes.c_char.from_buffer(memory)
    yield memory, ctypes.addressof(view)
    del view
    memory.close()


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="no machine of ours")
def test_the_program_runs_here(executable_page: tuple[mmap.mmap, int]) -> None:
    memory, address = executable_page
    seen = []

    def run_text(text: bytes) -> int:
        seen.append((text, memory[STATE]))
        return -1  # an error in the text is none of the program's

    called = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(run_text)
    place = ctypes.cast(called, ctypes.c_void_p).value
    assert place is not None
    code = MACHINES[platform.machine()].build_program(
        address + CODE, state=address + STATE, states=(1, 2), text=address + TEXT, run=place
    )
    memory[TEXT : TEXT + 5] = b"text\0"
    memory[CODE : CODE + len(code)] = code
    program = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address + CODE)
    assert [program(None), program(None)] == [0, 0]
    assert seen == [(b"text", 1), (b"text", 1)]
    assert memory[STATE] == 2


@pytest.fixture
def waiting_child() -> Iterator[ProcessHandle]:
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        target = ProcessHandle.from_pid(process.pid)
        assert target is not None
        yield target
        process.kill()


old = pytest.mark.skipif(sys.version_info >= REMOTE_EXEC_VERSION, reason="this Python is asked itself, on every machine")


@old
@pytest.mark.skipif(platform.machine() not in MACHINES, reason="no machine of ours")
def test_the_machine_is_the_one_that_it_is(waiting_child: ProcessHandle) -> None:
    entrance = examine_process(waiting_child).entry_points
    assert entrance is not None
    assert entrance.machine.name == platform.machine()
    with open(f"/proc/{waiting_child.pid}/mem", "rb", buffering=0) as memory:
        for place, codes in (
            (entrance.gate, entrance.machine.gate_codes), (entrance.restorer, entrance.machine.restorer_codes),
        ):  # fmt: skip
            memory.seek(place)
            assert memory.read(16).startswith(codes)
            assert place % entrance.machine.alignment == 0


@old
@pytest.mark.parametrize("name", ["riscv64", "ppc64le", "s390x"])
def test_a_machine_without_samples(waiting_child: ProcessHandle, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: name)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    sentence = (
        f"Python {version} can be entered on x86_64 and aarch64 only, and this machine is {name}. Start the job with "
        "zerotop run, or use Python 3.14, which can be entered everywhere."
    )
    with pytest.raises(CannotEnter, match=f"^{re.escape(sentence)}$"):
        examine_process(waiting_child)


@old
@pytest.mark.skipif(platform.machine() not in MACHINES, reason="no machine of ours")
def test_a_python_of_another_machine_is_not_entered(waiting_child: ProcessHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under an emulator, whose own registers those of the thread are."""
    (other,) = MACHINES.keys() - {platform.machine()}
    built_for = platform.machine()
    monkeypatch.setattr(platform, "machine", lambda: other)
    with pytest.raises(CannotEnter, match=f"a Python for {built_for}, emulated on this {other}\\. Start the job"):
        examine_process(waiting_child)
