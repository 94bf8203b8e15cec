"""Training: the loop, the run's state, checkpoints, the log and the progress line."""

from minigrad.training.checkpoint import load_model, model_tensors
from minigrad.training.progress import Progress
from minigrad.training.run_state import FREE_SETTINGS
from minigrad.training.runlog import RunLog, read_log
from minigrad.training.trainer import Interrupted, NonFiniteError, Trainer

__all__ = ["FREE_SETTINGS", "Interrupted", "NonFiniteError", "Progress", "RunLog", "Trainer", "load_model",
           "model_tensors", "read_log"]
