"""Training: the loop, the run's state, checkpoints, the log and the progress line."""
