"""Masks as a reordering of the real steps: pack, unpack, the states at each sample's last real step."""

import numpy as np
import pytest
from cases import B, L, mask_kinds
from helpers import assert_close, assert_identical

from minigrad.packing import Packing, last_states, pack, states_upstream, unpack


@pytest.mark.parametrize("mask", mask_kinds().values(), ids=mask_kinds())
def test_packed_rows_are_the_real_steps(mask):
    x, packing = np.random.default_rng(0).standard_normal((B, L, 4)), Packing.of(mask)
    packed = np.zeros_like(x)
    for b in range(B):
        steps = np.flatnonzero(mask[b])
        packed[b, :len(steps)] = x[b, steps]
    moved = np.array([[*np.flatnonzero(row), *np.flatnonzero(~row)] for row in mask])
    whole = Packing(moved, np.argsort(moved, axis=1), mask.sum(axis=1), mask)             # as on a GPU
    dirty = np.where(mask[:, :, None], x, np.nan)
    for one in (packing, whole):
        assert_identical(pack(dirty, one), packed)
        assert_identical(unpack(pack(dirty, one), one), np.where(mask[:, :, None], x, 0))
        assert_identical(one.lengths, mask.sum(axis=1))
    nothing_to_move = all(sorted(row, reverse=True) == row for row in mask.tolist())
    assert (packing.order is None) == (packing.inverse is None) == nothing_to_move


def test_without_a_mask_nothing_is_moved():
    x = np.ones((B, L, 4))
    assert Packing.of(None) is None
    assert pack(x, None) is x
    assert unpack(x, None) is x


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("mask", [None, *mask_kinds().values()], ids=[None, *mask_kinds()])
def test_the_last_states_and_their_gradient(mask, P):
    """Of each sample the P states up to its last real step, which may reach back to those from before the sequence."""
    rng, packing = np.random.default_rng(0), Packing.of(mask)
    hs = rng.standard_normal((P + L, B, 2))
    lengths = np.full(B, L) if mask is None else mask.sum(axis=1)
    last = last_states(hs, P, packing)
    assert_identical(last, np.stack([hs[n:n + P, b] for b, n in enumerate(lengths)]))
    assert not np.shares_memory(last, hs)
    dy, dpast = rng.standard_normal((B, L, 2)), rng.standard_normal((B, P, 2))
    expected = np.zeros_like(hs)
    expected[P:] = pack(dy, packing).transpose(1, 0, 2)
    assert_identical(states_upstream(dy, None, hs, P, packing), expected)
    for b, n in enumerate(lengths):
        expected[n:n + P, b] += dpast[b]
    assert_close(states_upstream(dy, dpast, hs, P, packing), expected)
    assert_close(states_upstream(None, dpast, hs, P, packing) + states_upstream(dy, None, hs, P, packing), expected)
