"""A recording in a notebook or a script: what was known at a moment, its tables as data frames, and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.reports.session_report import read_session_report
from zerotop.report.elements import element
from zerotop.report.session_page import write_session_page
from zerotop.session import catalog
from zerotop.session.moments.at import At
from zerotop.session.reader import Session

if TYPE_CHECKING:
    import polars

_HEIGHT = "760px"


class OpenRecording:
    """One recording. As the last expression of a cell it shows its report; a running job's as it is then."""

    def __init__(self, name: str, price_per_hour: str | float | None = None) -> None:
        """Raises SessionError if there is no such recording, ValueError for an invalid price."""
        self.session = Session.open(catalog.find_session(name))
        self._price = HourlyPrice.parse(str(price_per_hour)) if price_per_hour is not None else None

    def __repr__(self) -> str:
        return f"<zerotop session {self.session.name!r}>"

    def _repr_html_(self) -> str:
        """Return the report in a frame of its own: its styles and scripts cannot reach the notebook."""
        self.session.refresh()
        page = write_session_page(read_session_report(self.session, self._price))
        frame = element(
            "iframe",
            srcdoc=page,
            sandbox="allow-scripts",
            title=f"zerotop report of {self.session.name}",
            style=f"width:100%;height:{_HEIGHT};border:0",
        )
        return ElementTree.tostring(frame, encoding="unicode", method="html")

    def at(self, cursor_ns: int | None = None) -> At:
        """Return the recording at a moment in unix nanoseconds, or at its end as it is now."""
        self.session.refresh()
        return self.session.at(cursor_ns)

    def table(self, name: str = "steps") -> polars.DataFrame:
        """Return a table as ``zerotop export`` writes it. Raises ValueError for a name that it does not know."""
        import polars

        from zerotop.analysis.reports.export_tables import TABLES, build_frames

        if name not in TABLES:
            raise ValueError(f"Unknown table {name!r}. Choose one of: {', '.join(TABLES)}.")
        self.session.refresh()
        return polars.concat(list(build_frames(self.session, name, str)))
