"""Checks of arguments. An error is one sentence: the argument, what was given, and what was expected."""

import math

import numpy as np


def check_rank_and_width(layer, name, array, rank, width):
    """`array` must hold floating-point numbers, have `rank` axes (None: one or more) and end in `width` columns."""
    expected = {None: f"(..., {width})", 2: f"(batch, {width})", 3: f"(batch, length, {width})"}[rank]
    if array.dtype.kind != "f":
        raise TypeError(f"{layer}: {name} has dtype {array.dtype}; expected floating-point numbers")
    if array.ndim != (rank or max(array.ndim, 1)) or array.shape[-1] != width:
        raise ValueError(f"{layer}: {name} has shape {array.shape}; expected {expected}")


def check_shape(layer, name, array, shape):
    """`array` must have exactly this shape, None standing for any size, and hold floating-point numbers."""
    if array.dtype.kind != "f":
        raise TypeError(f"{layer}: {name} has dtype {array.dtype}; expected floating-point numbers")
    if len(array.shape) != len(shape) or any(n not in (None, size) for n, size in zip(shape, array.shape)):
        raise ValueError(f"{layer}: {name} has shape {array.shape}; expected {_sizes(shape)}")


def _sizes(shape):
    return str(tuple(shape)).replace("None", "any")


def check_mask(layer, mask, shape, name="mask"):
    """`mask` must be boolean (True where the position is real) and of this shape."""
    if getattr(mask, "dtype", None) != np.bool_:
        came = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"{layer}: {name} has dtype {came}; expected bool, True where the position is real")
    if mask.shape != tuple(shape):
        raise ValueError(f"{layer}: {name} has shape {mask.shape}; expected {tuple(shape)}")


def check_tuple(owner, name, value, entries):
    """`value` must be a tuple (or list) with an item for each of `entries`, their names."""
    if not isinstance(value, tuple | list) or len(value) != len(entries):
        came = f"{len(value)} entries" if isinstance(value, tuple | list) else type(value).__name__
        raise ValueError(f"{owner}: {name} is {came}; expected a tuple ({', '.join(entries)})")


def check_state(layer, state, shapes, name="state"):
    """`state` must be a tuple of arrays with the given names and shapes, None in a shape standing for any size.

    In a dstate any of them may be None.
    """
    check_tuple(layer, name, state, shapes)
    for (entry, shape), array in zip(shapes.items(), state):
        if array is None and name == "dstate":
            continue
        if not hasattr(array, "dtype"):
            raise TypeError(f"{layer}: {name}'s {entry} is {array!r}; expected an array of shape {_sizes(shape)}")
        check_shape(layer, f"{name}'s {entry}", array, shape)


def check_count(owner, name, value, least=1):
    """`value` must be a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{owner}: {name} is {value!r}; expected a whole number of at least {least}")


def check_choice(owner, name, value, choices):
    """`value` must be one of `choices`."""
    if value not in choices:
        raise ValueError(f"{owner}: {name} is {value!r}; expected one of {', '.join(map(repr, choices))}")


def check_number(owner, name, value, low, high=math.inf, *, open_low=False, open_high=False):
    """`value` must be a number in the range; NaN is never in it."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    inside = number and low <= value <= high
    if not inside or (open_low and value == low) or (open_high and value == high):
        left, right = "(" if open_low else "[", ")" if open_high else "]"
        raise ValueError(f"{owner}: {name} is {value!r}; expected a number in {left}{low}, {high}{right}")
