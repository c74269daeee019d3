"""Running a call in another process by ptrace: registers, ELF symbols, x86-64 and AArch64."""
