"""Models: composition of minigrad's layers only."""
