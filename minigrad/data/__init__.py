"""Data: synthetic problems, texts, official files, and the order of the examples."""

from minigrad.data.batches import Batches
from minigrad.data.files import DataError, data_folder
from minigrad.data.synthetic import adding_problem
from minigrad.data.text import Streams, Vocabulary, find_enwik8, open_text, read_text, split_90_5_5

__all__ = ["Batches", "DataError", "Streams", "Vocabulary", "adding_problem", "data_folder", "find_enwik8",
           "open_text", "read_text", "split_90_5_5"]
