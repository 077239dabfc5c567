"""Prefill/Decode-disaggregated LLM serving, written as Trio structured concurrency."""

__version__ = "0.1.0"
