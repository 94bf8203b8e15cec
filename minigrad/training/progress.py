"""The progress of a run: a tqdm bar on a terminal, plain lines elsewhere."""

import sys
import time

from tqdm import tqdm


def clock(seconds):
    """90 -> '01:30', 5400 -> '1:30:00'."""
    return tqdm.format_interval(seconds)


class Progress:
    """Shows step, rate, ETA and the latest figures.

    update(step, figures)    every step; figures ({name: number}) may be None for 'as before'
    line(text)               a line that stays (above the bar on a terminal)
    """

    SECONDS_BETWEEN_LINES = 10.0

    def __init__(self, start, steps, quiet=False, stream=None):
        self.stream = sys.stderr if stream is None else stream
        self.start, self.steps, self.quiet = start, steps, quiet or self.stream is None    # None: closed by the shell
        self.began = self.last_line = time.monotonic()
        self.figures = {}
        terminal = not self.quiet and self.stream.isatty()
        self.bar = tqdm(total=steps, initial=start, file=self.stream, dynamic_ncols=True, unit="step",
                        smoothing=0.05) if terminal else None

    def update(self, step, figures=None, line=False):
        """`line` asks for a plain line now (an evaluation); otherwise one comes every ten seconds."""
        self.figures.update(figures or {})
        if self.bar is not None:
            if figures:
                self.bar.set_postfix_str(_format(self.figures), refresh=False)
            self.bar.update(step - self.bar.n)
        elif not self.quiet and figures:
            now = time.monotonic()
            if line or now - self.last_line >= self.SECONDS_BETWEEN_LINES:
                self.last_line = now
                done = f"step {step}/{self.steps} ({step / self.steps:.0%})"
                self.line(f"{done}  {_format(self.figures)}  {self._pace(step)}")

    def _pace(self, step):
        done, seconds = step - self.start, time.monotonic() - self.began
        if not done or not seconds:
            return ""
        return f"{done / seconds:.1f} steps/s  ETA {clock((self.steps - step) * seconds / done)}"

    def line(self, text):
        if self.quiet:
            return
        if self.bar is not None:
            self.bar.write(text, file=self.stream)
        else:
            try:
                print(text, file=self.stream, flush=True)
            except BrokenPipeError:                              # nobody reads any more; the run goes on
                self.quiet = True

    def close(self):
        if self.bar is not None:
            self.bar.close()


def _format(figures):
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None)
