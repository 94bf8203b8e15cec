"""Everything that measures: `python tasks/bench` or `python -m tasks.bench`."""
