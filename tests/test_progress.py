"""The progress bar: on a terminal, on work that takes a while, and nowhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ringrt.cli import progress


@pytest.fixture
def shown(monkeypatch):
    """Make a bar on a pretended terminal; what it has written."""

    def shown(hidden=False, terminal=True, patience=0.0):
        text = io.StringIO()
        console = Console(file=text, force_terminal=terminal, width=60)
        monkeypatch.setattr(progress, "Console", lambda **options: console)
        monkeypatch.setattr(progress, "_PATIENCE_S", patience)
        with progress.LiveProgress(hidden) as bar:
            for step in range(1, 5):
                bar("forward", step, 4)
            bar("verify", 1, 2)
        return text.getvalue()

    return shown


def test_it_names_the_phase_and_how_far_it_is(shown):
    text = shown()
    assert "forward" in text
    assert "4/4" in text
    assert "verify" in text


@pytest.mark.parametrize("how", [{"hidden": True}, {"terminal": False}, {"patience": 60.0}])
def test_it_is_silent_where_it_would_disturb(shown, how):
    assert shown(**how) == ""
