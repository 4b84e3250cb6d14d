"""The mathematics of Trimtab: pure functions of values, without clock, files, network or logging."""
