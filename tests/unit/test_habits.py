"""What a user has set is found again, and nothing depends on that."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotop.ui.app.settings import UserSettings


def test_a_word_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "state" / "habits.json"
    UserSettings(path).set("theme", "light")
    assert UserSettings(path).get("theme", "dark") == "light"
    assert UserSettings(path).get("order", "newest") == "newest"
    assert path.stat().st_mode & 0o077 == 0
    assert [found.name for found in path.parent.iterdir()] == ["habits.json"]


def test_two_runs_keep_what_each_has_set(tmp_path: Path) -> None:
    path = tmp_path / "habits.json"
    one, other = UserSettings(path), UserSettings(path)
    one.set("theme", "light")
    other.set("order", "slowest")
    assert (UserSettings(path).get("theme", ""), UserSettings(path).get("order", "")) == ("light", "slowest")


_LONG = b'{"theme": "' + b"x" * 99_999


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b'{"theme": 5}', b"[" * 100_000, _LONG])
def test_what_cannot_be_read_is_as_if_nothing_was_set(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "habits.json"
    path.write_bytes(content)
    habits = UserSettings(path)
    assert habits.get("theme", "dark") == "dark"
    habits.set("theme", "light")
    assert UserSettings(path).get("theme", "dark") == "light"


def test_what_cannot_be_written_holds_for_this_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    habits = UserSettings(tmp_path / "file" / "habits.json")
    habits.set("theme", "light")
    assert habits.get("theme", "dark") == "light"
    nowhere = UserSettings()
    nowhere.set("theme", "light")
    assert nowhere.get("theme", "dark") == "light"
