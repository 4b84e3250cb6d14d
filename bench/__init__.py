"""Benchmarks: each is a command that prints a table and takes `--json FILE` and `--quick`."""
