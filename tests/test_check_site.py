"""The link checker of the site finds what is broken, and nothing else."""

from __future__ import annotations

from pathlib import Path

from scripts.check_site import broken


def test_it_finds_missing_files_and_anchors(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text('<h1 id="top">b</h1>', encoding="utf-8")
    (tmp_path / "style.css").touch()
    good = ("b/", "b/#top", "/b/", "#here", "style.css", "https://example.org/nowhere")
    bad = ("c/", "b/#bottom", "/no.png", "#nowhere")
    links = "".join(f'<a id="here" href="{link}">x</a>' for link in good + bad)
    (tmp_path / "index.html").write_text(links, encoding="utf-8")
    assert broken(tmp_path) == [f"index.html: {link}" for link in bad]
