"""Functions for a process of their own, without torch; most of them misbehave."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def scales(values, factor):
    sys.stdout.write("scaling\n")
    return {"values": values * factor, "total": float(values.sum()), "folder": str(Path.cwd())}


def accuracy(predicted, labels):
    return np.mean(predicted == labels)


def returns_text():
    return "0.5"


def returns_an_object():
    return {"model": object()}


def raises():
    sys.stdout.write("before it went wrong\n")
    sys.stdout.flush()
    return {}["head"]


def needs_a_package():
    import a_package_that_is_nowhere

    return a_package_that_is_nowhere


def loops():
    while True:
        pass


def sleeps_in_a_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path("child.pid").write_text(str(child.pid))
    time.sleep(600)


def ends_the_process():
    os._exit(3)


def exits():
    sys.exit("no model today")


def crashes():
    ctypes.string_at(0)


def writes_everywhere():
    for descriptor in range(3, 30):
        try:
            os.write(descriptor, b"hello\n")
        except OSError:
            continue


def reads_standard_input():
    return input()


def is_asked(question):
    return f"{question}!"


not_a_function = 3
