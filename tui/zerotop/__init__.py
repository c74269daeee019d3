"""Watch, explain, replay and export DeepSpeed and PyTorch training from the terminal."""

# No module of the standard library is imported here, see ``own_python``.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerotop.report.notebook import NotebookSession

__all__ = ["open_session"]


def open_session(name: str, price_per_hour: "str | float | None" = None) -> "NotebookSession":
    """Open a recording in a notebook or a script, by its name, the start of its name, or its path.

    In a notebook it displays its report; ``open_session("brisk-otter").table("steps")`` is a data frame. Raises SessionError
    if there is no such recording, ValueError for an invalid price.
    """
    from zerotop.report.notebook import NotebookSession

    return NotebookSession(name, price_per_hour)
