"""Parameters of a torch module from a safetensors file, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from photon_ext.errors import ModelError, describe


def load_module(module: nn.Module, path: str | Path, prefix: str) -> None:
    """Fills the module with the tensors whose names begin with `prefix`.

    Raises ModelError: the file cannot be read, or its tensors are not those of the module,
    or not of floats.
    """
    from safetensors import safe_open  # of the extra engine

    try:
        with safe_open(path, framework="pt") as file:
            found: Mapping[str, Tensor] = {
                name.removeprefix(prefix): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 - no mapping
                if name.startswith(prefix)
            }
        for name, value in found.items():
            if not value.is_floating_point():  # torch would convert it
                raise TypeError(f"{prefix}{name} is of {value.dtype}, expected float")
        module.load_state_dict(found)
    except Exception as error:  # safetensors' own, or torch's list of names and shapes
        kind = type(module).__name__
        raise ModelError(
            f"{path}: it does not hold the {kind} ({describe(error)}); expected tensors "
            f"{prefix}... of its config"
        ) from error
