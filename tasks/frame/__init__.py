"""What the tasks share: a task says what is its own in a `Task`, `run(TASK)` does the rest (docs/adding_a_task.md)."""

from tasks.frame.figures import Curve
from tasks.frame.flags import OneLineParser, make_optimizer, number, whole
from tasks.frame.run import Command, Run, Shown, Task, blas_threads, device_of, exit_status, run, say, tell
from tasks.frame.run_folder import UsageError

__all__ = ["Command", "Curve", "OneLineParser", "Run", "Shown", "Task", "UsageError", "blas_threads", "device_of",
           "exit_status", "make_optimizer", "number", "run", "say", "tell", "whole"]
