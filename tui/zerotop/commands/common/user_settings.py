"""Where the user's habits are kept between runs."""

from __future__ import annotations

from zerotop.session import catalog
from zerotop.ui.app.settings import UserSettings


def load_settings() -> UserSettings:
    """What the user has set, in the state directory."""
    return UserSettings(catalog.find_default_folder().with_name("habits.json"))
