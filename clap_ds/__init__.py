"""CLAP training and throughput on the DeepSpeed engine."""

from clap_ds.config.places import VERSION as __version__  # noqa: F401, N811
