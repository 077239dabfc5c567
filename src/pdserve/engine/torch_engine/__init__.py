"""The engine that runs a real model on torch. Importing it without torch says how to install it."""

from pdserve.errors import MissingDependencyError

try:
    import safetensors  # noqa: F401
    import torch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        f"--engine torch needs {error.name or 'torch'}: pip install torch==2.13.0 safetensors"
    ) from error
