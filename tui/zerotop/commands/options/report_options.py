"""The commands that pass a recording on: ``export``, ``report`` and ``check``."""

from __future__ import annotations

from zerotop.commands.options.common_options import JSON_HELP, RECORDING_HELP, AddCommand, add_force, add_price


def add_report_commands(add_command: AddCommand) -> None:
    """Add the three commands with their options."""
    _add_export(add_command)
    report = add_command(
        "report",
        "write a report to send: one HTML page, or a chart as PNG",
        "zerotop report brisk-otter -o report.html",
        "zerotop report brisk-otter --chart gpu-memory -o memory.png",
    )
    report.add_argument("recording", metavar="RECORDING|SWEEP", help=f"{RECORDING_HELP}; of a sweep, its name or folder")
    report.add_argument("-o", "--output", metavar="FILE", help="output file, - for standard output [NAME.html]")
    report.add_argument("--format", choices=("html", "png"), help="file format [by the name of the file, else html]")
    report.add_argument("--chart", metavar="NAME", help="the chart to draw as PNG [iterations]")
    add_force(report)
    add_price(report)
    check = add_command(
        "check",
        "check a recording against a budget, as in CI",
        "zerotop check brisk-otter budget.toml --junit check.xml",
        "zerotop check brisk-otter --baseline calm-heron",
    )
    check.add_argument("recording", metavar="RECORDING", help=RECORDING_HELP)
    check.add_argument("budget", nargs="?", metavar="BUDGET", help="TOML file with [limits], [findings] and [baseline]")
    check.add_argument("--baseline", metavar="RECORDING", help="compare with this recording [the budget's]")
    check.add_argument("--junit", metavar="FILE", help="write the outcome as JUnit XML, too")
    check.add_argument("--json", action="store_true", help=JSON_HELP)


def _add_export(add_command: AddCommand) -> None:
    export = add_command(
        "export",
        "export a recording's tables",
        "zerotop export brisk-otter > steps.csv",
        "zerotop export brisk-otter --table all --format parquet -o tables/",
        "zerotop export brisk-otter --format perfetto -o otter.pftrace",
    )
    export.add_argument("recording", metavar="RECORDING", help=RECORDING_HELP)
    export.add_argument("--table", metavar="NAME", help="table to export, or all [steps]")
    export.add_argument(
        "--format",
        choices=("csv", "parquet", "jsonl", "perfetto", "otlp"),
        help="file format, or a trace for ui.perfetto.dev or an OpenTelemetry collector [by the name of the file, else csv]",
    )
    export.add_argument("-o", "--output", metavar="PATH", help="file or directory [standard output]")
    add_force(export)
