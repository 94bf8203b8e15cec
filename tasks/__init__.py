"""Tasks: one runnable script per experiment, `python tasks/NAME.py --help`."""
