"""What the scan of collapses calls decided by retries."""

from bench.collapse import Cell, Run, decided_by_retries

WELL = Run(1.0, 0.9, 1.0, 0.0)
DOWN = Run(1.0, 0.9, 0.5, 100.0)


def cells(load: float, *down: int) -> list[Cell]:
    """One cell for 0, 2 and 4 retries, of two seeds of which so many stay down."""
    return [
        Cell(load, retries, (DOWN,) * count + (WELL,) * (2 - count), (WELL, WELL))
        for retries, count in zip((0, 2, 4), down, strict=True)
    ]


def test_retries_decide_only_where_no_seed_stays_down_without_them() -> None:
    scanned = [*cells(2.5, 0, 0, 0), *cells(2.6, 0, 1, 0), *cells(2.7, 1, 2, 2), *cells(2.8, 0, 0, 2)]
    assert decided_by_retries(scanned) == [2.6, 2.8]
