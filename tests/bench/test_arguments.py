"""Bad input to a bench is refused before the work, in one sentence with the place."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = ("calibrate", "capacity", "collapse", "forecast", "plant", "predict", "tick")


@pytest.mark.parametrize("bench", BENCHES)
def test_a_result_that_can_not_be_written_is_refused_before_the_work(bench: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"bench.{bench}", "--json", str(tmp_path / "none" / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert f"there is no folder {tmp_path / 'none'}; make it" in done.stderr
    assert "Traceback" not in done.stderr
