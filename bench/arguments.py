"""What the benches' command lines share."""

from __future__ import annotations

import argparse
from pathlib import Path


def writable(text: str) -> Path:
    """The path of a file to be written: its folder is there. For `argparse`, before the work and not after it."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.absolute().parent}; make it")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file in it")
    return path
