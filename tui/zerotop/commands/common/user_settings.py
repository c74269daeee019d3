"""Where the user's habits are kept between runs."""

from __future__ import annotations

from zerotop.session import catalog
from zerotop.ui.app.settings import Habits


def kept_habits() -> Habits:
    """What the user has set, in the state directory."""
    return Habits(catalog.usual_place().with_name("habits.json"))
