"""The plan of a new sweep, from the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.sweeps import settings as names
from zerotop.analysis.sweeps.settings import OFFLOAD_DEVICES, SETTINGS
from zerotop.commands.common.deepspeed_file import read_deepspeed_config
from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.model_config import find_longest_sequence, read_model_config
from zerotop.commands.job.launching import find_likely_command
from zerotop.commands.job.training_machine import check_packages, count_usable_gpus
from zerotop.commands.sweeping.placeholders import check_placeholders
from zerotop.recording.sweeps import Plan, Value, is_reserved
from zerotop_probe.outside.job.agent import CommandError, check_command

_STAGES = ["0", "1", "2", "3"]
DEFAULT_MODEL = "tiny"
_NVME_FOLDER = "/local_nvme"  # of the ready configurations


def build_plan(options: argparse.Namespace) -> Plan:
    """Return the plan. Raises Problem for values that make no sense."""
    settings = _read_settings(options)
    model = "" if options.command else options.model or DEFAULT_MODEL
    check_model(model)
    if not settings:
        raise Problem("Nothing varies: give values, for example --stage 2,3 --seq-length 128:2048:128", USAGE)
    config = read_deepspeed_config(options.config) if options.config else {}
    if options.warmup >= options.steps - 1:
        raise Problem(
            f"--steps {options.steps} leaves no interval to measure after {options.warmup} steps of warm-up", USAGE
        )
    if options.command:
        _check_command(options.command, settings)
    _check_nvme(options, settings)
    plan = Plan(
        settings=settings,
        command=tuple(options.command),
        model=model,
        config=config,
        dtype=options.dtype,
        steps=options.steps,
        warmup=options.warmup,
        retries=options.retries,
        hang_after_s=options.hang_after,
        nvme_path=options.nvme_path or "",
        working_directory=os.getcwd(),
    )
    return plan if options.price_per_hour is None else set_price(plan, options.price_per_hour)


def check_model(model: str) -> None:
    """Raise Problem if there is no such model; one with an owner may be downloaded when training begins."""
    if model and "/" not in model:
        read_model_config(model)


def _check_command(command: Sequence[str], settings: Mapping[str, Sequence[Value]]) -> None:
    try:
        check_placeholders(command, settings)
        if "{" not in command[0]:
            check_command(command)
    except ValueError as error:
        raise Problem(f"Not started: {error}", USAGE) from error
    except CommandError as error:
        likely = find_likely_command(command)
        meant = f". Did you mean: {' '.join(likely)}?" if likely else ""
        raise Problem(f"Not started: {error}{meant}") from error


def _check_nvme(options: argparse.Namespace, settings: Mapping[str, Sequence[Value]]) -> None:
    """Raise Problem if there is no folder to offload to; other machines may have their own."""
    folder = options.nvme_path or ("" if options.config else _NVME_FOLDER)
    is_offloaded = any("nvme" in str(mode) for mode in settings.get(names.OFFLOAD, ()))
    if is_offloaded and not os.path.isdir(folder) and getattr(options, "executor", "local") == "local":
        missing = f"There is no folder {folder}" if folder else "No folder is given"
        raise Problem(f"{missing} to offload to: choose one on a fast local disk with --nvme-path DIR", USAGE)


def has_settings(options: argparse.Namespace) -> bool:
    """Return whether the command line gives values of settings."""
    return bool(options.set) or any(getattr(options, name) is not None for name in SETTINGS)


def set_price(plan: Plan, price: HourlyPrice) -> Plan:
    return replace(plan, price_per_hour=price.amount, currency=(price.before, price.after))


def find_limits(plan: Plan) -> dict[str, int]:
    """Return the highest possible values on this machine and for the model; on a CPU there may be any number of ranks."""
    if plan.command:
        return {}
    check_packages("The training script")
    gpus = count_usable_gpus()
    longest = find_longest_sequence(plan.model)
    return ({names.GPUS: gpus} if gpus else {}) | ({names.SEQ_LENGTH: longest} if longest else {})


def _read_settings(options: argparse.Namespace) -> dict[str, list[Value]]:
    parsers: dict[str, Callable[[str], list[Any]]] = {
        names.STAGE: lambda text: [int(word) for word in names.parse_words(text, _STAGES)],
        names.OFFLOAD: lambda text: names.parse_words(text, list(OFFLOAD_DEVICES)),
        names.CHECKPOINTING: lambda text: names.parse_words(text, ["off", "on"]),
    }
    settings: dict[str, list[Value]] = {}
    for name in SETTINGS:
        given = getattr(options, name)
        if given is None:
            continue
        if name == names.ALLOCATOR:
            settings[name] = list(dict.fromkeys(given))
            continue
        option = f"--{name.replace('_', '-')}"
        settings[name] = _parse(option, given, parsers.get(name, names.parse_numbers))
    for text in options.set or ():
        name, _, values = text.partition("=")
        if not name.isidentifier() or name in SETTINGS or is_reserved(name):
            raise Problem(f"--set {text}: {name!r} cannot be the name of a setting", USAGE)
        if name in settings:
            raise Problem(f"--set {name} is given twice: write all its values as --set {name}=VALUE,VALUE", USAGE)
        settings[name] = _parse(f"--set {name}", values, names.parse_any)
    if options.set and not options.command:
        raise Problem(
            f"--set needs a command of your own with its {{placeholder}}: zerotop {options.name} --set ... -- COMMAND", USAGE
        )
    return settings


def _parse(option: str, text: str, parse: Callable[[str], list[Any]]) -> list[Value]:
    try:
        return parse(text)
    except ValueError as error:
        raise Problem(f"{option}: {error}", USAGE) from error
