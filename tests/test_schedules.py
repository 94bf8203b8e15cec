"""Learning-rate schedules: against the formula written by hand, their ends, bad input."""

import math

import numpy as np
import pytest

from minigrad.schedules import Constant, WarmupCosine


def test_warmup_cosine_equals_the_formula():
    lr, warmup, steps, final = 3e-4, 16, 100, 1e-5
    schedule = WarmupCosine(lr, warmup, steps, final)
    for step in range(130):
        if step < warmup:
            expected = lr * (step + 1) / warmup
        elif step < steps:
            k = (1 + math.cos(math.pi * ((step - warmup) / (steps - warmup)))) / 2
            expected = k * lr + (1 - k) * final
        else:
            expected = final
        assert schedule(step) == expected


def test_the_ends_are_exact():
    for lr, warmup, steps, final in [(0.3, 7, 31, 0.1), (1e-3, 0, 10, 0.0), (0.1, 9, 10, 0.1), (0.7, 3, 1000, 1 / 3)]:
        schedule = WarmupCosine(lr, warmup, steps, final)
        assert (schedule(warmup), schedule(steps), schedule(steps + 1), schedule(10**9)) == (lr, final, final, final)
        if warmup:
            assert schedule(warmup - 1) == pytest.approx(lr, rel=1e-15)
    halfway = WarmupCosine(1.0, 20, 100, 0.5)(60)
    assert halfway == pytest.approx(0.75, rel=1e-15)


def test_it_rises_and_falls():
    values = [WarmupCosine(0.1, 10, 50)(step) for step in range(50)]
    assert values[0] == 0.1 / 10
    assert values[:10] == sorted(values[:10])
    assert values[10:] == sorted(values[10:], reverse=True)
    assert 0 < values[-1] < 1e-3


def test_without_warmup_it_begins_at_lr():
    assert WarmupCosine(0.1, 0, 10)(0) == 0.1
    assert Constant(0.1)(0) == 0.1


def test_a_warmup_that_takes_all_steps_has_no_cosine():
    schedule = WarmupCosine(0.1, 5, 5, 0.01)
    assert [schedule(step) for step in range(7)] == [0.1 * n / 5 for n in range(1, 6)] + [0.01, 0.01]


def test_one_step():
    assert [WarmupCosine(0.1, 0, 1)(step) for step in range(3)] == [0.1, 0, 0]
    assert [WarmupCosine(0.1, 1, 1)(step) for step in range(3)] == [0.1, 0, 0]


def test_constant():
    assert [Constant(0.1)(step) for step in (0, 1, 10**9)] == [0.1] * 3
    assert [Constant(0.1, warmup=4)(step) for step in range(6)] == [0.1 * n / 4 for n in (1, 2, 3, 4)] + [0.1, 0.1]


@pytest.mark.parametrize("number", [int, np.int64])
def test_values_are_plain_floats(number):
    """Whatever the settings are: a NumPy float64 would widen a float32 step."""
    for schedule in (WarmupCosine(np.float64(1), number(2), number(4), np.float64(0)), WarmupCosine(1, 2, 4, 0),
                     Constant(np.float64(1), number(2)), Constant(1)):
        assert {type(schedule(number(step))) for step in range(6)} == {float}


def test_a_schedule_shows_its_settings():
    assert repr(WarmupCosine(0.1, 5, 50)) == "WarmupCosine(lr=0.1, warmup=5, steps=50, final=0.0)"
    assert repr(Constant(0.1)) == "Constant(lr=0.1, warmup=0)"


@pytest.mark.parametrize(("argument", "value", "expected"), [
    ("lr", -0.1, "a number"), ("lr", math.nan, "a number"), ("lr", math.inf, "a number"), ("lr", None, "a number"),
    ("warmup", -1, "a whole number of at least 0"), ("warmup", 2.0, "a whole number of at least 0"),
    ("warmup", True, "a whole number"), ("steps", 9, "a whole number of at least 10"),
    ("steps", 99.0, "a whole number"), ("steps", None, "a whole number"), ("final", -1e-9, "a number"),
    ("final", 0.2, "a number in [0, 0.1]"),
    ("final", math.nan, "a number")])
def test_bad_settings_are_named(argument, value, expected):
    settings = {"lr": 0.1, "warmup": 10, "steps": 100, "final": 0.0, argument: value}
    with pytest.raises(ValueError) as error:
        WarmupCosine(**settings)
    assert str(error.value).startswith(f"WarmupCosine: {argument} is {value!r}; expected {expected}")
    if argument in ("lr", "warmup"):
        with pytest.raises(ValueError, match=f"^Constant: {argument} is "):
            Constant(settings["lr"], settings["warmup"])


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="WarmupCosine: steps is 0; expected a whole number of at least 1"):
        WarmupCosine(0.1, 0, 0)
