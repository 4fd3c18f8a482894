"""What each script does before anything else: `from launch import entry` and `entry.prepare()`.

A newcomer's first mistakes (another Python, an environment without torch) become a sentence instead of a traceback, and
a console that cannot take a character, or that nobody reads any more, never ends the work. Runs on any Python 3.
"""

import importlib.util
import io
import os
import signal
import sys

PYTHON = (3, 11)
PACKAGES = ("torch", "numpy", "safetensors")  # the others are imported only where a setting asks for them


def prepare(lost=""):
    """Python and packages, or exit code 71; then standard streams that hold. `lost` is said on stderr when stdout is."""
    problem = ", ".join(p for p in PACKAGES if importlib.util.find_spec(p) is None)
    if problem:
        problem += f" not installed for {sys.executable}: run .venv/bin/python (or `source .venv/bin/activate` first); "
        problem += "no .venv yet? The README's first command makes it"
    if sys.version_info < PYTHON:
        problem = f"Nova needs Python {PYTHON[0]}.{PYTHON[1]} or newer; this is {sys.version.split()[0]}"
    if problem:
        sys.stderr.write(f"[nova] {problem}\n")
        sys.exit(71)
    signal.signal(signal.SIGINT, interrupt)
    sys.excepthook = last_word
    for fd in (0, 1, 2):  # closed ones: another file would get the number, and with it what is printed
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = Console(1, sys.stdout, lost)
    sys.stderr = Console(2, sys.stderr, "")


def interrupt(number, frame):
    """Ctrl-C, until the watchdog takes it over. Inside an import it ends the process here: some libraries swallow the
    exception there, or make another of it."""
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    if frame:
        last_word(KeyboardInterrupt, None, None)
    raise KeyboardInterrupt


def last_word(kind, error, trace):
    """sys.excepthook: a line for Ctrl-C, whose traceback helps nobody; Python's own for the rest."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.write("[nova] interrupted\n")
    os._exit(130)


class Console(io.TextIOWrapper):
    """A standard stream. Characters outside its encoding become "?"; when it breaks (`| head`, a full disk, a closed
    terminal) what follows goes nowhere: files of the run hold every number."""

    def __init__(self, fd, before, lost):
        encoding = before.encoding if before else "utf-8"
        super().__init__(open(fd, "wb", closefd=False), encoding, errors="replace", line_buffering=True)
        self.lost = lost

    def write(self, text):
        try:
            return super().write(text)
        except OSError as e:
            self.give_up(e)
            return len(text)

    def flush(self):
        try:
            super().flush()
        except OSError as e:
            self.give_up(e)

    def give_up(self, error):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())  # what is still in the buffer goes there too
        os.close(null)
        if self.lost:
            sys.stderr.write(f"[nova] standard output: {error.strerror}; {self.lost}\n")
