"""How long `trtforge --help` takes, beside `polygraphy --help` and Python alone.

    python scripts/bench/cli_start.py

Median of 20 fresh processes each, taken in turns so that other load on the machine hits all of them.
"""

from __future__ import annotations

import statistics

from programs import POLYGRAPHY, PYTHON, TRTFORGE, print_table, timed

NUM_RUNS = 20
COMMANDS = {
    "python -c pass": (*PYTHON, "pass"),
    "trtforge --help": (*TRTFORGE, "--help"),
    "polygraphy --help": (*POLYGRAPHY, "--help"),
}


def main() -> None:
    """Measures and prints."""
    for command in COMMANDS.values():
        timed(command)  # fills the file cache and writes the bytecode
    rounds = [{name: timed(command) for name, command in COMMANDS.items()} for _ in range(NUM_RUNS)]
    seconds = {name: sorted(found[name] for found in rounds) for name in COMMANDS}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        [
            name,
            f"{median * 1000:.0f}",
            f"{seconds[name][0] * 1000:.0f}",
            f"{seconds[name][-1] * 1000:.0f}",
            f"{median / medians['polygraphy --help']:.2f}",
        ]
        for name, median in medians.items()
    ]
    print_table(["command", "median ms", "min ms", "max ms", "of polygraphy"], rows)


if __name__ == "__main__":
    main()
