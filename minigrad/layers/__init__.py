"""The layers. One file per family; in each, the equations first, then forward with backward directly below."""

from minigrad.layers.attention import MultiHeadAttention
from minigrad.layers.containers import Bidirectional, Stack
from minigrad.layers.dropout import Dropout
from minigrad.layers.embedding import Embedding, LearnedPositions, SinusoidalPositions
from minigrad.layers.gru import GRU
from minigrad.layers.linear import Linear
from minigrad.layers.lstm import LSTM
from minigrad.layers.norm import LayerNorm
from minigrad.layers.rnn import IRNN, RNN
from minigrad.layers.rra import RRALSTM
from minigrad.layers.rwa import RWA
from minigrad.layers.sru import SRU
from minigrad.layers.srupp import SRUpp
from minigrad.layers.transformer import FeedForward, TransformerDecoderLayer, TransformerEncoderLayer
from minigrad.layers.urnn import URNN

__all__ = [
    "GRU", "IRNN", "LSTM", "RNN", "RRALSTM", "RWA", "SRU", "URNN", "Bidirectional", "Dropout", "Embedding",
    "FeedForward", "LayerNorm", "LearnedPositions", "Linear", "MultiHeadAttention", "SRUpp", "SinusoidalPositions",
    "Stack", "TransformerDecoderLayer", "TransformerEncoderLayer",
]
