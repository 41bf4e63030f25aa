"""What long prompts do to running streams: `python -m benchmarks.serving.long_prompts CONTENDERS.toml [--rounds 3]`.

Eight clients stream, then two long prompts arrive at once. The table has the streams' inter-token latencies before the
long prompts arrive, until both have their first token, and after that, and the times to these first tokens. `--svg`
draws the longest gap between two tokens of a stream over the time of the first round.

Contenders are those of `compare.py`; instead of `run` they have the key `url`, the address of their server, and
optionally `model`. Elapsed times, so nothing else should run on the machine. Ratios are those to the first contender.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.serving.contenders import (
    Contender,
    ContenderError,
    Figures,
    Memory,
    Outcome,
    in_turn,
    medians,
    ratios,
    server,
)
from fastgen.api_client.http import RemoteError, RemoteServer
from fastgen.bench.results import percentile
from fastgen.bench.workload import Workload

COMPLETIONS: Final = "/v1/completions"
FIGURES: Final = (
    *("before p50 ms", "before p99 ms", "during p50 ms", "during p99 ms", "during max ms", "after p99 ms"),
    *("during tok/s each", "first long prompt s", "last long prompt s"),
)
MEMORY: Final = "memory MiB"
# Seconds for which the plot has one value.
_BIN: Final = 0.25


@dataclass(frozen=True)
class Measurement:
    """What one server did.

    Attributes:
        figures: by their names in `FIGURES`.
        gaps: of all streams: seconds from the arrival of the long prompts to the later token, and the gap in ms.
        computed: seconds from the arrival until both long prompts had their first token.
    """

    figures: dict[str, float]
    gaps: list[tuple[float, float]]
    computed: float


@dataclass(frozen=True)
class Load:
    """The streams, and the long prompts that arrive after `seconds`; the streams are watched as long afterwards."""

    streams: int
    prompts: int
    words: int
    seconds: float

    def texts(self, seed: int) -> tuple[list[str], list[str]]:
        """Return the prompts of the streams, of 16 words, and the long ones. No two have a prefix in common."""
        short = Workload(self.streams, 1, 16, 1, 0, seed).asks()
        long = Workload(self.prompts, 1, self.words, 1, 0, seed + 1).asks()
        draw = random.Random(seed)
        return [f"{draw.random()} {ask.text}" for ask in short], [f"{draw.random()} {ask.text}" for ask in long]


class Stream(threading.Thread):
    """A client that reads a stream of tokens until it is told to stop.

    Attributes:
        arrivals: the time of each token.
        failure: what ended the stream too early.
    """

    def __init__(self, remote: RemoteServer, body: dict[str, Any], stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.arrivals: list[float] = []
        self.failure: str | None = None
        self._remote, self._body, self._stop_reading = remote, body, stop
        self.start()

    def run(self) -> None:
        """Read until the event is set."""
        try:
            for event in self._remote.stream(COMPLETIONS, self._body):
                if event["choices"]:
                    self.arrivals.append(time.perf_counter())
                if self._stop_reading.is_set():
                    return
            self.failure = "the stream ended before the measurement: the longest request of the server is too short"
        except Exception as error:  # reported by the thread that measures
            self.failure = str(error)


def measure(url: str, model: str | None, load: Load, seed: int) -> Measurement:
    """Measure one server.

    Raises:
        RuntimeError: a stream failed or ended too early.
        RemoteError: a long prompt failed.
    """
    remote = RemoteServer(url)
    name = model if model is not None else remote.model_names()[0]
    common = {"model": name, "temperature": 0, "ignore_eos": True, "stream": True}
    short, long = load.texts(seed)
    stop = threading.Event()
    streams = [Stream(remote, {**common, "prompt": text, "max_tokens": 2048}, stop) for text in short]

    def wait(condition: Any) -> None:
        while not condition():
            if failed := next((each.failure for each in streams if each.failure), None):
                raise RuntimeError(f"{url}: {failed}")
            time.sleep(0.01)

    def first_token(text: str) -> float:
        sent = time.perf_counter()
        events = remote.stream(COMPLETIONS, {**common, "prompt": text, "max_tokens": 2})
        next(event for event in events if event["choices"])
        return time.perf_counter() - sent

    try:
        wait(lambda: all(len(each.arrivals) > 8 for each in streams))
        begin = time.perf_counter()
        wait(lambda: time.perf_counter() > begin + load.seconds)
        with ThreadPoolExecutor(load.prompts) as pool:
            arrived = time.perf_counter()
            firsts = [pool.submit(first_token, text) for text in long]
            wait(lambda: all(each.done() for each in firsts))
            computed = time.perf_counter()
            first_tokens = sorted(each.result() for each in firsts)
        wait(lambda: time.perf_counter() > computed + load.seconds)
    finally:
        stop.set()
    gaps = [(later, later - earlier) for each in streams for earlier, later in pairwise(each.arrivals)]
    before = _sorted_ms(gaps, begin, arrived)
    during = _sorted_ms(gaps, arrived, computed)
    after = _sorted_ms(gaps, computed, computed + load.seconds)
    values = (
        *(percentile(before, 0.5), percentile(before, 0.99)),
        *(percentile(during, 0.5), percentile(during, 0.99), during[-1], percentile(after, 0.99)),
        *(len(during) / load.streams / (computed - arrived), first_tokens[0], first_tokens[-1]),
    )
    figures = dict(zip(FIGURES, values, strict=True))
    return Measurement(figures, [(at - arrived, gap * 1000) for at, gap in gaps if at > begin], computed - arrived)


def _sorted_ms(gaps: Sequence[tuple[float, float]], begin: float, end: float) -> list[float]:
    """Return the gaps that end in an interval, in milliseconds, ascending."""
    return sorted(gap * 1000 for at, gap in gaps if begin < at <= end)


def measure_contender(contender: Contender, load: Load, seed: int) -> Measurement:
    """Start a contender's server and measure it.

    Raises:
        ContenderError: it is not present, or a request failed.
    """
    with server(contender) as session:
        assert session is not None, "the contender needs the key server"
        memory = Memory(session)
        try:
            # The first steps of a process are slow.
            measure(contender["url"], contender.get("model"), Load(2, 1, 256, 1), -1 - seed)
            found = measure(contender["url"], contender.get("model"), load, seed)
        except (RuntimeError, RemoteError) as error:
            raise ContenderError(str(error)) from error
        found.figures[MEMORY] = round(memory.stop() / (1 << 20))
    return found


def measure_all(
    contenders: dict[str, Contender], load: Load, rounds: int
) -> tuple[dict[str, Outcome], dict[str, Measurement]]:
    """Measure contenders in turn; return their outcomes, and what was measured in the first round."""
    first: dict[str, Measurement] = {}

    def figures(name: str, contender: Contender, number: int) -> Figures:
        found = measure_contender(contender, load, number)
        first.setdefault(name, found)
        return found.figures

    outcomes = in_turn(contenders, rounds, figures)
    return outcomes, {name: first[name] for name in contenders if name in first}


def draw(found: dict[str, Measurement], load: Load, file: Path) -> None:
    """Draw the longest gap in each quarter of a second, a panel for each contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "long prompts"  # the same file for the same figures
    figure, cells = pyplot.subplots(
        len(found), 1, figsize=(9, 1.7 * len(found)), sharex=True, sharey=True, squeeze=False
    )
    for (axis,), (name, measured) in zip(cells, found.items(), strict=True):
        longest: dict[float, float] = {}
        for at, gap in measured.gaps:
            # A gap is drawn for as long as it lasted.
            for number in range(round((at - gap / 1000) / _BIN), round(at / _BIN) + 1):
                longest[number * _BIN] = max(gap, longest.get(number * _BIN, 0.0))
        times = [time for time in sorted(longest) if -load.seconds / 2 <= time <= measured.computed + load.seconds / 2]
        axis.axvspan(0, measured.computed, color="#ddd", linewidth=0)
        axis.step(times, [longest[time] for time in times], where="mid", color="#0b6e99", linewidth=1.3)
        axis.set_title(name, fontsize=9, loc="left")
        axis.grid(alpha=0.3)
    cells[0, 0].set_ylim(bottom=0)  # of all, once all are drawn: it ends the automatic limits
    figure.supxlabel(
        f"seconds since {load.prompts} prompts of {load.words:,} words arrived; grey: until both have a token"
    )
    figure.supylabel("longest gap between tokens, ms", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Measure the contenders in turn, in alternating order, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="running streams (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=2, help="long prompts (default: %(default)s)")
    parser.add_argument("--words", type=int, default=6000, help="words of a long prompt (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="seconds before and after (default: %(default)s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the first round")
    given = parser.parse_args()
    load = Load(given.streams, given.prompts, given.words, given.seconds)
    contenders = tomllib.loads(given.contenders.read_text())
    outcomes, found = measure_all(contenders, load, given.rounds)
    if given.svg is not None:
        draw(found, load, given.svg)
    first, *others = contenders
    print(
        medians(outcomes, (*FIGURES, MEMORY)), ratios(outcomes, [(each, first) for each in others], FIGURES), sep="\n\n"
    )


if __name__ == "__main__":
    main()
