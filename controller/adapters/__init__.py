"""The only place that imports network, cluster or disk clients. One adapter, one file; see controller.ports."""
