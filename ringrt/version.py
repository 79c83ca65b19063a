"""The version, which ranks compare before they work together."""

__version__ = "0.1.0"
