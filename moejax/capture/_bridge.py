"""Arrays from torch to JAX and back, without a copy where both sit on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax._typing import Array
from moejax.capture._versions import require_torch


def to_jax(tensor: Any) -> Array:
    """A JAX array over the memory of `tensor` where JAX has its device, otherwise a copy.

    The tensor must not be written to while the array lives.
    """
    tensor = tensor.detach().contiguous()
    platform = {"cpu": "cpu", "cuda": "gpu"}.get(tensor.device.type)
    if platform == jax.default_backend() and tensor.numel():
        return jnp.from_dlpack(tensor)
    return jnp.asarray(tensor.cpu().numpy())


def to_torch(array: Array, device: Any) -> Any:
    """A tensor on `device` over the memory of `array` where it is there, otherwise a copy."""
    torch = require_torch()
    held = next(iter(array.devices())).platform
    if {"cpu": "cpu", "gpu": "cuda"}.get(held) == device.type:
        return torch.from_dlpack(array)
    return torch.from_numpy(np.array(array)).to(device)
