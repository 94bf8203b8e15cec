"""The layers. One file a family; in each, the equations first, then forward with backward directly under it."""

from minigrad.layers.attention import MultiHeadAttention
from minigrad.layers.dropout import Dropout
from minigrad.layers.embedding import Embedding, LearnedPositions, SinusoidalPositions
from minigrad.layers.linear import Linear
from minigrad.layers.lstm import LSTM
from minigrad.layers.norm import LayerNorm
from minigrad.layers.recurrent import Bidirectional, Stack
from minigrad.layers.rra import RRALSTM
from minigrad.layers.sru import SRU
from minigrad.layers.srupp import SRUpp
from minigrad.layers.transformer import FeedForward, TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "LSTM", "RRALSTM", "SRU", "Bidirectional", "Dropout", "Embedding", "FeedForward", "LayerNorm", "LearnedPositions",
    "Linear", "MultiHeadAttention", "SRUpp", "SinusoidalPositions", "Stack", "TransformerDecoderLayer",
    "TransformerEncoderLayer",
]
