"""CLAP training and throughput on the DeepSpeed engine."""

__version__ = "0.1.0"
