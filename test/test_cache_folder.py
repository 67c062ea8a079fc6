# SPDX-License-Identifier: Apache-2.0
"""Where files are cached."""

from __future__ import annotations

from edgellm_ros import cache_folder


def test_the_cache_is_in_the_user_s_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder.cache_folder("cuda") == tmp_path / "edgellm_ros" / "cuda"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder.cache_folder("cuda") == tmp_path / ".cache" / "edgellm_ros" / "cuda"


def test_without_a_home_the_cache_is_in_the_temporary_folder(monkeypatch, tmp_path):
    """As in a container with a user id that has no account."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache_folder.os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(cache_folder.tempfile, "gettempdir", lambda: str(tmp_path))
    assert cache_folder.cache_folder("cuda") == tmp_path / "edgellm_ros" / "cuda"
