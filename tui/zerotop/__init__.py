"""Watch, explain, replay and export DeepSpeed and PyTorch training from the terminal."""

# No module of the standard library is imported here, see ``own_python``.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerotop.report.notebook import OpenRecording

__all__ = ["open_recording"]


def find_version() -> str:
    """Return the installed version; a note where zerotop runs from its source, which tells none."""
    from importlib import metadata

    try:
        return metadata.version("zerotop")
    except metadata.PackageNotFoundError:
        return "(not installed as a package, so its version is unknown)"


def open_recording(name: str, price_per_hour: "str | float | None" = None) -> "OpenRecording":
    """Open a recording in a notebook or a script, by its name, the start of its name, or its path.

    In a notebook it displays its report. ``at()`` gives what was known at a moment, see ``zerotop.recording.moments.at``;
    ``table("steps")`` is a data frame of all of it. Raises RecordingError if there is no such recording, ValueError
    for an invalid price.
    """
    from zerotop.report.notebook import OpenRecording

    return OpenRecording(name, price_per_hour)
