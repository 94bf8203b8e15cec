"""Data: synthetic problems and the order in which examples are met."""

from minigrad.data.batches import Batches
from minigrad.data.synthetic import adding_problem

__all__ = ["Batches", "adding_problem"]
