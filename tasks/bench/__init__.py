"""Everything that measures speed: `python tasks/bench` or `python -m tasks.bench`."""
