"""Running a task in the test's own process."""

from tasks import frame

# The cheapest run of a task: adding.
SMALL = ["-S", "8", "-K", "3", "--hidden", "6", "--train-size", "60", "--test-size", "20", "--batch-size", "7",
         "--eval-every", "10"]


def ran(capsys, task, *argv):
    """(exit status, stdout, stderr) of a task."""
    try:
        status = frame.run(task, [str(word) for word in argv])
    except SystemExit as end:                                    # --help
        status = end.code
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, sentence, task, *argv):
    """A run that ends with exit status 2 and one line, in which `sentence` stands."""
    status, _, err = ran(capsys, task, *argv)
    assert (status, len(err.splitlines())) == (2, 1), err
    assert sentence in err
