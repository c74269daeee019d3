"""Calling a function in another process with ptrace: registers, ELF symbols, x86-64 and AArch64."""
