"""A recording in a notebook or a script: what was known at a moment, its tables as data frames, and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.reports.recording_report import read_recording_report
from zerotop.recording import catalog
from zerotop.recording.moments.at import At
from zerotop.recording.reader import Recording
from zerotop.report.elements import element
from zerotop.report.recording_page import write_recording_page

if TYPE_CHECKING:
    import polars

_HEIGHT = "760px"


class OpenRecording:
    """One recording. As the last expression of a cell it shows its report; a running job's as it is then."""

    def __init__(self, name: str, price_per_hour: str | float | None = None) -> None:
        """Raises RecordingError if there is no such recording, ValueError for an invalid price."""
        self.recording = Recording.open(catalog.find_recording(name))
        self._price = HourlyPrice.parse(str(price_per_hour)) if price_per_hour is not None else None

    def __repr__(self) -> str:
        return f"<zerotop recording {self.recording.name!r}>"

    def _repr_html_(self) -> str:
        """Return the report in a frame of its own: its styles and scripts cannot reach the notebook."""
        self.recording.refresh()
        page = write_recording_page(read_recording_report(self.recording, self._price))
        frame = element(
            "iframe",
            srcdoc=page,
            sandbox="allow-scripts",
            title=f"zerotop report of {self.recording.name}",
            style=f"width:100%;height:{_HEIGHT};border:0",
        )
        return ElementTree.tostring(frame, encoding="unicode", method="html")

    @property
    def begin_ns(self) -> int:
        """When it begins, in unix nanoseconds."""
        return self.recording.begin_ns

    @property
    def end_ns(self) -> int:
        """When it ends, or its last record so far."""
        self.recording.refresh()
        return self.recording.end_ns

    def at(self, cursor_ns: int | None = None) -> At:
        """Return the recording at a moment in unix nanoseconds, or at its end as it is now."""
        self.recording.refresh()
        return self.recording.at(cursor_ns)

    def table(self, name: str = "steps") -> polars.DataFrame:
        """Return a table as ``zerotop export`` writes it. Raises ValueError for a name that it does not know."""
        import polars

        from zerotop.analysis.reports.export_tables import TABLES, build_frames

        if name not in TABLES:
            raise ValueError(f"Unknown table {name!r}. Choose one of: {', '.join(TABLES)}.")
        self.recording.refresh()
        return polars.concat(list(build_frames(self.recording, name, str)))
