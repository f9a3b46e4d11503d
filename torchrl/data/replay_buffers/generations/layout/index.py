"""Integers as users give them: ints, sequences, arrays and tensors of any integer dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_INTEGERS = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


def integer_tensor(value: Any, name: str) -> torch.Tensor:
    """Returns ``value`` as an int64 tensor of the same shape, on its own device.

    Args:
        value: int, sequence of ints, NumPy array or tensor of an integer dtype. An empty one counts
            as integer whatever its dtype.
        name (str): what the value is called in an error, such as ``"advance(): index"``.

    Raises:
        TypeError: for booleans, floats and anything else that is no integer.
        ValueError: for an integer that does not fit into an int64.
    """
    if isinstance(value, torch.Tensor):
        tensor = value
    else:
        if _holds_bool(value):
            raise TypeError(f"{name} must be integer: got a bool in {value!r}.")
        try:
            tensor = torch.as_tensor(native_array(value), device="cpu")
        except OverflowError as err:
            raise ValueError(f"{name} must fit into an int64: got {value!r}.") from err
        except (TypeError, ValueError, RuntimeError) as err:
            if "verflow" in str(err):
                raise ValueError(f"{name} must fit into an int64: got {value!r}.") from err
            raise TypeError(f"{name} must be integer: got {value!r}.") from err
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor: got layout {tensor.layout}.")
    if tensor.dtype is torch.int64:
        return tensor
    if tensor.dtype in _INTEGERS or (tensor.numel() == 0 and tensor.dtype is not torch.bool):
        return tensor.to(torch.int64)
    raise TypeError(f"{name} must be integer: got dtype {tensor.dtype}.")


def native_array(value: Any) -> Any:
    """A copy of an array that torch takes; anything else as it is.

    Torch refuses negative strides and foreign byte orders, and warns about read-only memory.
    """
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="))
    return value


def _holds_bool(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_bool, value))
    return isinstance(value, (bool, np.bool_))


def slot_index(index: Any, name: str) -> torch.Tensor:
    """Returns the dim-0 slots that ``index`` names, as an int64 tensor.

    Args:
        index: whatever :func:`integer_tensor` takes, or the tuple of per-dimension tensors that a
            sampler returns, here of length 1.
        name (str): see :func:`integer_tensor`.

    Raises:
        TypeError: see :func:`integer_tensor`.
        ValueError: for a tuple that names more dimensions than the storage has.
    """
    if isinstance(index, tuple) and any(
        isinstance(part, (torch.Tensor, np.ndarray)) and part.ndim for part in index
    ):
        if len(index) != 1:
            raise ValueError(
                f"{name} must hold one tensor per storage dimension: got a tuple of {len(index)} "
                "for a one-dimensional storage."
            )
        index = index[0]
    return integer_tensor(index, name)
