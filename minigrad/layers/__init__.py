"""The layers. One file a family; in each, the equations first, then forward with backward directly under it."""

from minigrad.layers.dropout import Dropout
from minigrad.layers.linear import Linear
from minigrad.layers.lstm import LSTM
from minigrad.layers.recurrent import Stack
from minigrad.layers.rra import RRALSTM

__all__ = ["LSTM", "RRALSTM", "Dropout", "Linear", "Stack"]
