"""A minute of the soak, which `python test/integration/soak.py` runs for longer."""

from pathlib import Path

import pytest
import soak

pytestmark = pytest.mark.server

SECONDS = 60


def test_a_minute_of_everything(tmp_path: Path) -> None:
    report = soak.run(SECONDS, seed=7, folder=tmp_path)
    assert report["problems"] == [], report
    done = report["done"]
    for what in ("right answers", "load", "replace", "unload", "refused loads", "pause"):
        assert done[what] > 0, report
    assert done["right answers"] > 50, report
    assert report["right_answers_per_s"]["end"] > 0, report
