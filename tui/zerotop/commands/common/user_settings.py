"""The user's settings, kept between runs."""

from __future__ import annotations

from zerotop.recording import catalog
from zerotop.ui.app.settings import UserSettings


def load_settings() -> UserSettings:
    """Load the settings from the state directory."""
    return UserSettings(catalog.find_default_folder().with_name("settings.json"))
