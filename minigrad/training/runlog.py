"""log.csv of a run: one row a log interval, written at once, cut back when a run is resumed from an earlier step."""

import csv
import io
from pathlib import Path

from minigrad.tensors import CheckpointError, write_atomically


class RunLog:
    """Rows of numbers under fixed columns, the first of them "step". Missing values are None, and empty in the file.

    rows    list of {column: number or None}
    """

    def __init__(self, path):
        self.path = Path(path)
        self.columns, self.rows = [], []

    def start(self, columns):
        """A new file with this header."""
        self.columns, self.rows = list(columns), []
        write_atomically(self.path, self._line(self.columns))

    def append(self, row):
        """Write a row ({column: number}) and flush it."""
        unknown = set(row) - set(self.columns)
        if unknown:
            raise ValueError(f"{self.path}: {sorted(unknown)[0]} is not a column; the columns are {self.columns}")
        row = {column: _plain(row.get(column)) for column in self.columns}
        with self.path.open("ab") as file:
            file.write(self._row(row))
        self.rows.append(row)

    def read(self, step):
        """Take the file's rows up to `step`. Raises CheckpointError for a file that is missing or no log."""
        try:
            self.columns, rows = read_log(self.path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"log {self.path}: missing or damaged ({error})") from error
        self.rows = [row for row in rows if row["step"] <= step]

    def write(self):
        """Write the rows, atomically, in place of the file."""
        write_atomically(self.path, self._line(self.columns) + b"".join(map(self._row, self.rows)))

    def column(self, name):
        """[(step, value)] of the rows that have a value in this column."""
        return [(row["step"], row[name]) for row in self.rows if row[name] is not None]

    def _row(self, row):
        return self._line("" if row[column] is None else repr(row[column]) for column in self.columns)

    @staticmethod
    def _line(cells):
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerow(cells)
        return buffer.getvalue().encode("utf-8")


def read_log(path):
    """(columns, rows) of a log.csv; a last line that was cut off in writing is left out.

    Raises ValueError for a file without a header, and for a whole line that is no row, naming it.
    """
    text = Path(path).read_text(encoding="utf-8")
    whole = text[:text.rfind("\n") + 1]
    lines = list(csv.reader(io.StringIO(whole)))
    if not lines or lines[0][:1] != ["step"]:
        raise ValueError(f"{path}: not a run's log: its header does not start with 'step'")
    columns = lines[0]
    rows = []
    for n, line in enumerate(lines[1:], 2):
        try:
            row = {column: _number(cell) for column, cell in zip(columns, line, strict=True)}
        except ValueError as error:
            raise ValueError(f"{path}, line {n}: not a row of {len(columns)} numbers ({error})") from error
        if type(row["step"]) is not int:
            raise ValueError(f"{path}, line {n}: step is {row['step']!r}; expected a whole number")
        rows.append(row)
    return columns, rows


def _plain(number):
    """A Python number: the repr of a NumPy scalar names its type and could not be read back."""
    return number.item() if hasattr(number, "item") else number


def _number(text):
    if text == "":
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)
