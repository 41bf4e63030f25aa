"""Measure the engine on one GPU, in less than nine minutes: a Markdown table, and gpu.json.

Models have the shapes of Llama-3.1-8B, Qwen3-0.6B and a third of Qwen3-30B-A3B, and random weights. Each section runs
in a process of its own, so that an error on the device ends that section only. Shares are of the peaks measured in the
same run, and of the bytes and operations counted from tensor shapes (`--count-only`). The floor is the time that these
take at the peaks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu import standins

standins.install()

import torch  # noqa: E402  (the engine is imported with stand-ins for missing packages)

from benchmarks.gpu.aims import DATA_SHEETS  # noqa: E402
from benchmarks.gpu.aims import table as aims_table  # noqa: E402
from benchmarks.gpu.counts import step_work  # noqa: E402
from benchmarks.gpu.launches import SAMPLING, Launches, count_launches  # noqa: E402
from benchmarks.gpu.prediction import GPUS, predicted_seconds  # noqa: E402
from benchmarks.gpu.prediction import table as prediction_table  # noqa: E402
from benchmarks.gpu.results import HEADER, RULE, Peaks, Row  # noqa: E402
from benchmarks.gpu.sections import SECTIONS, Bench  # noqa: E402
from benchmarks.gpu.sizes import FULL, TINY, Sizes  # noqa: E402

# Of the whole run.
_SECONDS = 530.0


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the program on a CPU")
    parser.add_argument("--seconds", type=float, default=110.0, help="most time for one section (default: 110)")
    parser.add_argument("--only", help=f"sections to run, with commas between them, of {', '.join(SECTIONS)}")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for gpu.json (default: the current one)")
    parser.add_argument(
        "--count-only", action="store_true", help="print bytes, operations, launches and predictions; needs no GPU"
    )
    parser.add_argument(
        "--cuda-graphs",
        choices=["auto", "off"],
        default="auto",
        help="auto captures steps as the engine does, and also times decodes and prefills without (default: auto)",
    )
    given = parser.parse_args()
    sizes = TINY if given.tiny else FULL
    if given.count_only:
        tables = aims_table(sizes), _count_table(sizes), prediction_table(sizes), _launch_table(_launches())
        print("\n\n".join("\n".join(lines) for lines in tables))
        return
    only = set(given.only.split(",")) if given.only else set(SECTIONS)
    if unknown := only - SECTIONS.keys():
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(SECTIONS)}")
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    device = torch.device("cuda:0" if given.device == "cuda" else "cpu")
    bench = Bench(sizes, device, dtype, graphs=given.cuda_graphs == "auto")

    end = time.monotonic() + _SECONDS
    report: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **_versions(given.device)}
    for key, value in report.items():
        print(f"{key}: {value}  ")
    print(f"\n{HEADER}\n{RULE}", flush=True)
    rows: list[Row] = []
    peaks = None
    given.output.mkdir(parents=True, exist_ok=True)

    def write(**more: Any) -> None:
        """Write what was measured so far: a time limit may end the program in the next section."""
        measured = {"peaks": None if peaks is None else asdict(peaks), "rows": [row.as_json(peaks) for row in rows]}
        (given.output / "gpu.json").write_text(json.dumps(report | measured | more, indent=1) + "\n")

    for name in SECTIONS:
        if name not in only | {"peaks"}:
            continue
        for row in _isolated(name, bench, min(given.seconds, end - time.monotonic())):
            rows.append(row)
            print(row.markdown(peaks), flush=True)
        if name == "peaks":
            peaks = _peaks(rows)
        write()
    print("", *_launch_table(launches := _launches()), sep="\n")
    write(launches={sampling: asdict(counted) for sampling, counted in launches.items()})


def _isolated(name: str, bench: Bench, seconds: float) -> Iterator[Row]:
    """Run a section in a process of its own. Yield its rows and, if it fails, one with the reason.

    The process is forked, because importing torch again takes longer than some sections. So this process must not use
    the device.
    """
    if seconds <= 0:
        yield Row(f"section {name}", note=f"not run: the {_SECONDS:.0f} s of the whole run are over")
        return
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_section, args=(name, bench, sender))
    process.start()
    sender.close()
    end = time.monotonic() + seconds
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            row = receiver.recv()
            if row is None:
                return
            yield row
        yield Row(f"section {name}", note=f"stopped after {seconds:.0f} s")
    except EOFError:
        process.join()
        yield Row(f"section {name}", note=f"the process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _run_section(name: str, bench: Bench, sender: Connection) -> None:
    """Send the rows of a section, then None."""
    try:
        with torch.inference_mode():
            for row in SECTIONS[name](bench):
                sender.send(row)
    except Exception as error:  # whatever it is, the other sections run
        lines = str(error).strip().splitlines() or [""]
        sender.send(Row(f"section {name}", note=f"{type(error).__name__}: {lines[0]}"))
    sender.send(None)


def _peaks(rows: list[Row]) -> Peaks | None:
    """Return the peaks, if both were measured."""
    measured = [(row.work, row.seconds) for row in rows if row.work is not None and row.seconds is not None]
    if len(measured) != 2:
        return None
    (copy, copy_seconds), (product, product_seconds) = measured
    return Peaks(copy.num_bytes / copy_seconds, product.operations / product_seconds)


def _versions(device: str) -> dict[str, str]:
    """Return the GPU, its driver and the versions of what runs on it, without initialising the device."""
    gpu = driver = "none"
    if device == "cuda":
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
            gpu, _, driver = found.strip().partition(", ")
        except (OSError, subprocess.SubprocessError):
            gpu = driver = "unknown: nvidia-smi does not run"
    return {
        "gpu": gpu,
        "driver": driver,
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _launches() -> dict[str, Launches]:
    sizes = {"": TINY.small, "mixture of experts, ": TINY.mixture}
    with torch.inference_mode():
        return {
            model + name: count_launches(sampling, size)
            for model, size in sizes.items()
            for name, sampling in SAMPLING.items()
        }


def _launch_table(launches: dict[str, Launches]) -> list[str]:
    lines = [
        "| launches of a step | per layer | outside the layers | replayed, in all | operations that wait |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, of in launches.items():
        lines.append(f"| {name} | {of.per_layer:.0f} | {of.outside:.0f} | {of.replayed} | {of.waits} |")
    return lines


def _count_table(sizes: Sizes) -> list[str]:
    """Return the counts of the steps that are measured, their floors and their predicted times."""
    one, many = [(1, sizes.decode_context)], [(1, sizes.batch_context)] * sizes.batch
    largest = max(sizes.token_counts)
    steps = [
        (sizes.large, f"1 decode at {sizes.decode_context} tokens", one),
        (sizes.large, f"prefill of {sizes.prefill} tokens", [(sizes.prefill, sizes.prefill)]),
        (sizes.large, f"{sizes.batch} decodes at {sizes.batch_context} tokens", many),
        (sizes.large, f"step of {largest} tokens in one sequence", [(largest, largest + sizes.group_context)]),
        (sizes.small, f"1 decode at {sizes.decode_context} tokens", one),
        (sizes.mixture, f"1 decode at {sizes.decode_context} tokens", one),
        (sizes.mixture, f"{sizes.batch} decodes at {sizes.batch_context} tokens", many),
    ]
    heads = ["weights MB", "KV read MB", "other MB", "total MB", "GFLOP"]
    heads += [*(f"floor {gpu}, ms" for gpu in DATA_SHEETS), *(f"predicted {gpu}, ms" for gpu in GPUS)]
    lines = [f"| step, bfloat16 | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    for model, name, shape in steps:
        work = step_work(model.architecture, shape)
        amounts = [n / 1e6 for n in (work.weights, work.cache, work.activations, work.num_bytes)]
        floors = [work.floor_seconds(*peaks) * 1e3 for peaks in DATA_SHEETS.values()]
        cells = [*(f"{n:,.1f}" for n in amounts), f"{work.operations / 1e9:,.1f}", *(f"{n:.3f}" for n in floors)]
        cells += [f"{predicted_seconds(gpu, model.architecture, shape) * 1e3:.2f}" for gpu in GPUS.values()]
        lines.append(f"| {model.label}, {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
