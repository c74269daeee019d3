"""Settings survive between runs, and a damaged file changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotop.ui.app.settings import UserSettings


def test_a_setting_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "state" / "settings.json"
    UserSettings(path).set("theme", "light")
    assert UserSettings(path).get("theme", "dark") == "light"
    assert UserSettings(path).get("order", "newest") == "newest"
    assert path.stat().st_mode & 0o077 == 0
    assert [file.name for file in path.parent.iterdir()] == ["settings.json"]


def test_two_runs_keep_each_others_settings(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    one, other = UserSettings(path), UserSettings(path)
    one.set("theme", "light")
    other.set("order", "slowest")
    assert (UserSettings(path).get("theme", ""), UserSettings(path).get("order", "")) == ("light", "slowest")


_LONG = b'{"theme": "' + b"x" * 99_999


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b'{"theme": 5}', b"[" * 100_000, _LONG])
def test_an_unreadable_file_gives_the_defaults(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(content)
    settings = UserSettings(path)
    assert settings.get("theme", "dark") == "dark"
    settings.set("theme", "light")
    assert UserSettings(path).get("theme", "dark") == "light"


def test_settings_that_cannot_be_written_hold_for_this_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = UserSettings(tmp_path / "file" / "settings.json")
    settings.set("theme", "light")
    assert settings.get("theme", "dark") == "light"
    nowhere = UserSettings()
    nowhere.set("theme", "light")
    assert nowhere.get("theme", "dark") == "light"
