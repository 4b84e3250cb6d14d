"""Every scenario reads as it did. `pytest tests/scenarios --rewrite` writes what is decided now: read what changed."""

from pathlib import Path

import pytest
from scenarios.script import Player

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario_is_decided_as_written(file: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    player = Player(tmp_path)
    written = file.read_text()
    happened = player.play(written)
    ids = [move.id for record in player.story.records for move in record.decision.moves]
    assert len(ids) == len(set(ids))
    player.assert_replayed()
    if request.config.getoption("--rewrite"):
        file.write_text(happened)
    else:
        assert happened == written


def test_every_scenario_says_what_it_proves() -> None:
    assert len(FILES) >= 8
    for file in FILES:
        assert file.read_text().startswith("# "), file.name


@pytest.mark.parametrize("line", ["tick sometimes", "chat 3 elephants", "fleet 8 cpus", "source sleeps", "chat r1 ill"])
def test_a_line_that_can_not_be_read_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2: "):
        Player(tmp_path).play(f"chat  1 replicas\n{line}\n")
