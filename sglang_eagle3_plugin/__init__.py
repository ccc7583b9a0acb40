"""EAGLE-3 on SGLang: delegation, wiring and evidence. Importing this package imports nothing else."""

__version__ = "0.1.0"
