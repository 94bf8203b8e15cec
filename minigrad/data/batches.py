"""The order of the examples in training."""

import numpy as np

from minigrad.check import check_count

POOL = 50           # batches whose examples are sorted by length together


class Epochs:
    """Base of batches: `per_epoch` steps are an epoch, and each epoch has an order of its own.

    A subclass writes order(epoch) -> [rows of each batch], a function of (seed, epoch), and __getitem__(step).
    """

    def __init__(self, per_epoch):
        self.per_epoch = per_epoch
        self._epoch, self._order = None, None

    def position(self, step):
        """(epoch, batch within it) of a step."""
        return divmod(step, self.per_epoch)

    def rows(self, step):
        """The examples of a step's batch."""
        epoch, n = self.position(step)
        if epoch != self._epoch:                                 # a memo of a pure function
            self._epoch, self._order = epoch, self.order(epoch)
        return self._order[n]


class Batches(Epochs):
    """Shuffled minibatches of aligned arrays; which examples step s sees is a function of (seed, s) alone.

    `batches[s]` is the tuple of the arrays' rows at step s. Every epoch has its own permutation, drawn from
    (seed, epoch); the rows left over at its end are not used in that epoch. Since there is no state, a run
    resumed at any step continues exactly.

    Raises TypeError for a bare array, ValueError for arrays of different lengths, and for a batch larger than the data.
    """

    def __init__(self, arrays, batch_size, seed):
        check_count("Batches", "batch_size", batch_size)
        if not isinstance(arrays, tuple | list):
            raise TypeError(f"Batches: arrays is a {type(arrays).__name__}; expected a tuple of arrays")
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) != 1:
            raise ValueError(f"Batches: the arrays have lengths {lengths}; expected one length")
        if batch_size > lengths[0]:
            raise ValueError(f"Batches: batch_size is {batch_size}, larger than the data ({lengths[0]} examples)")
        super().__init__(lengths[0] // batch_size)
        self.arrays, self.batch_size, self.seed = tuple(arrays), batch_size, seed

    def order(self, epoch):
        """(per_epoch, batch_size)."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.arrays[0]))
        return order[:self.per_epoch * self.batch_size].reshape(self.per_epoch, self.batch_size)

    def __getitem__(self, step):
        rows = self.rows(step)
        return tuple(array[rows] for array in self.arrays)


def order_by_length(lengths, batch_size, rng):
    """(n // batch_size, batch_size): the examples of an epoch's batches, each of similar length.

    Random order, then sorted by length within pools of POOL batches, the batches of a pool in random order. Each of the
    n examples comes once, except for a remainder smaller than a batch, which differs from draw to draw.
    """
    order, pools = rng.permutation(len(lengths))[:len(lengths) // batch_size * batch_size], []
    for start in range(0, len(order), POOL * batch_size):
        pool = order[start:start + POOL * batch_size]
        pool = pool[lengths[pool].argsort(kind="stable")].reshape(-1, batch_size)
        pools.append(pool[rng.permutation(len(pool))])
    return np.concatenate(pools)
