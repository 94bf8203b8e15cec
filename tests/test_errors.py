"""What is handed in wrongly is refused with one sentence: the checks themselves, and every layer's inputs."""

import re

import numpy as np
import pytest
from cases import TABLE
from helpers import run_forward

from minigrad.check import (
    check_choice,
    check_count,
    check_mask,
    check_number,
    check_rank_and_width,
    check_shape,
    check_state,
    check_tuple,
)

HC = {"h": (2, 3), "c": (2, None)}
H, X = np.zeros((2, 3)), np.zeros((2, 3, 4))
NOT_FLOAT = "; expected floating-point numbers"
REFUSED = [
    (lambda: check_rank_and_width("F", "x", X[0], 3, 4), ValueError,
     "F: x has shape (3, 4); expected (batch, length, 4)"),
    (lambda: check_rank_and_width("F", "x", X, 3, 5), ValueError,
     "F: x has shape (2, 3, 4); expected (batch, length, 5)"),
    (lambda: check_rank_and_width("F", "x", X[0], 2, 3), ValueError, "F: x has shape (3, 4); expected (batch, 3)"),
    (lambda: check_rank_and_width("F", "x", X, 2, 4), ValueError, "F: x has shape (2, 3, 4); expected (batch, 4)"),
    (lambda: check_rank_and_width("F", "x", np.zeros(()), None, 4), ValueError,
     "F: x has shape (); expected (..., 4)"),
    (lambda: check_rank_and_width("F", "x", X.astype(int), 3, 4), TypeError, f"F: x has dtype int64{NOT_FLOAT}"),
    (lambda: check_shape("F", "x", H, (3, 2)), ValueError, "F: x has shape (2, 3); expected (3, 2)"),
    (lambda: check_shape("F", "x", H, (2, 3, 1)), ValueError, "F: x has shape (2, 3); expected (2, 3, 1)"),
    (lambda: check_shape("F", "x", H, (None, 2)), ValueError, "F: x has shape (2, 3); expected (any, 2)"),
    (lambda: check_shape("F", "x", H > 0, (2, 3)), TypeError, f"F: x has dtype bool{NOT_FLOAT}"),
    (lambda: check_mask("F", H > 0, (3, 2)), ValueError, "F: mask has shape (2, 3); expected (3, 2)"),
    (lambda: check_mask("F", H > 0, (2,), "memory_mask"), ValueError, "F: memory_mask has shape (2, 3); expected (2,)"),
    (lambda: check_mask("F", H, (2, 3)), TypeError,
     "F: mask has dtype float64; expected bool, True where the position is real"),
    (lambda: check_mask("F", [[True]], (1, 1)), TypeError,
     "F: mask has dtype list; expected bool, True where the position is real"),
    (lambda: check_tuple("F", "state", H, HC), ValueError, "F: state is ndarray; expected a tuple (h, c)"),
    (lambda: check_state("F", (H,), HC), ValueError, "F: state is 1 entries; expected a tuple (h, c)"),
    (lambda: check_state("F", (H, H[0]), HC), ValueError, "F: state's c has shape (3,); expected (2, any)"),
    (lambda: check_state("F", (H, None), HC), TypeError, "F: state's c is None; expected an array of shape (2, any)"),
    (lambda: check_state("F", (H, H[:1]), HC, "dstate"), ValueError,
     "F: dstate's c has shape (1, 3); expected (2, any)"),
    (lambda: check_state("F", (H > 0, H), HC), TypeError, f"F: state's h has dtype bool{NOT_FLOAT}"),
    (lambda: check_choice("F", "mode", "c", ("a", "b")), ValueError, "F: mode is 'c'; expected one of 'a', 'b'"),
    (lambda: check_count("F", "n", -1, least=0), ValueError, "F: n is -1; expected a whole number of at least 0"),
    *[(lambda n=n: check_count("F", "n", n), ValueError, f"F: n is {n!r}; expected a whole number of at least 1")
      for n in (0, 1.0, True, "1", None, np.nan)],
    *[(lambda p=p, settings=settings: check_number("F", "p", p, 0, **settings), ValueError,
       f"F: p is {p!r}; expected a number in {interval}")
      for p, settings, interval in [
          (-1e-9, {}, "[0, inf]"), (np.nan, {}, "[0, inf]"), ("1", {}, "[0, inf]"), (None, {}, "[0, inf]"),
          (True, {}, "[0, inf]"), (1j, {}, "[0, inf]"), (np.complex128(1), {}, "[0, inf]"),
          (np.inf, {"open_high": True}, "[0, inf)"), (0, {"open_low": True}, "(0, inf]"),
          (1.0, {"high": 1, "open_high": True}, "[0, 1)"), (2, {"high": 1}, "[0, 1]")]],
]


@pytest.mark.parametrize(("call", "error", "sentence"), REFUSED, ids=[row[2] for row in REFUSED])
def test_the_checks_refuse(call, error, sentence):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == sentence


def test_the_checks_accept():
    check_rank_and_width("F", "x", X, 3, 4)
    check_rank_and_width("F", "x", np.zeros(4), None, 4)
    check_shape("F", "x", H, [2, None])
    check_mask("F", H > 0, (2, 3))
    check_state("F", (H, np.zeros((2, 7))), HC)
    check_state("F", [None, H], HC, "dstate")
    check_choice("F", "mode", "a", ("a", "b"))
    for n in (1, np.int32(3), np.uint8(2)):
        check_count("F", "n", n)
    for p in (0, 0.5, 1, np.float32(0.5), np.int64(1), np.float64(0)):
        check_number("F", "p", p, 0, 1)
    check_number("F", "p", np.inf, 0)


# ---- every layer -----------------------------------------------------------------------------------------


def wrong_calls(case):
    """(error, x, keywords, the argument's name) of calls that a layer must refuse."""
    x, keywords = case.x(), case.keywords()
    if case.ids:
        yield TypeError, x * 1.0, keywords, "ids|noisy"
        yield ValueError, x + case.ids, keywords, "ids"
    else:
        yield TypeError, x.astype(int), keywords, "x|query"
        if case.layer().parameters():                                        # of these each knows its input's width
            yield ValueError, x[..., :-1], keywords, "x|query"
    if case.masks:
        mask = keywords[case.mask_name]
        for error, wrong in ((ValueError, mask[:, :-1]), (ValueError, mask[:1]), (TypeError, mask * 1.0),
                             (TypeError, mask.tolist())):
            yield error, x, {**keywords, case.mask_name: wrong}, "mask"
    if case.state:
        state = keywords["state"]
        for wrong in (state[:-1], (*state, state[0]), np.zeros(3), case.state(len(x) + 1)):
            yield ValueError, x, {**keywords, "state": wrong}, "state"


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_every_layer_names_what_was_wrong(case):
    for error, x, keywords, argument in wrong_calls(case):
        with pytest.raises(error) as caught:
            run_forward(case.layer(), x, keywords)
        sentence = str(caught.value)
        assert re.match(rf"(\w+: )?.*({argument}).* (has|is|run) .*; expected ", sentence), sentence
