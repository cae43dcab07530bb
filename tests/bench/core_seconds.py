"""Where the seconds of all cores go while we train: by process, and by what each of them does.

    uv venv SPY && uv pip install --python SPY/bin/python py-spy
    PYTHONPATH=. uv run python -m tests.bench.core_seconds --py-spy SPY/bin/py-spy [--steps 40]

Runs `launch bench` (our side alone) and looks at its processes between its third step and its last but one.
How long each computed is the kernel's word. What it computed is by py-spy, which looks at every thread
`--rate` times a second: a process's seconds are shared out by how often a thread of it was seen at each kind
of work, those left out that wait in a known place. py-spy stops a process while it looks and computes itself:
it is a line of the table, and `--rate 0` is the same run without it, and without kinds of work.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from launcher.base.home import Home
from launcher.bench.cpu_seconds import ALL, CpuSeconds

_Found = TypeVar("_Found")

# Where a thread stands that only waits.
_WAITS = re.compile(
    r"Condition\.wait|Condition\.__enter__|Poller\.poll|\.select \(|^_worker \(concurrent|WorkerThread\.run|"
    r"SyncStream\.read|ThreadLock\.__enter__|Queue\.get|^Runner\.run|^run \(uvloop|monitor_engine|"
    r"Popen\._wait|NextStep\._poll"
)
# By what a process is called by `launch bench`: its name here, and its kinds of work, each by a frame that is
# on the stack. The first that fits counts.
_KINDS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "runtime.recipes.tune": (
        "trainer",
        [
            ("old logprobs", r"^old_logprobs \("),
            ("backward", r"^Tensor\.backward"),
            ("forward and loss", r"^_pack_loss"),
            ("optimizer", r"^optimizer_step"),
            ("probe of the version", r"^compute_probe_logprobs"),
            ("adapter, checkpoint, fsync", r"\._commit \("),
            ("looking for the next step", r"^NextStep"),
            ("reading, packing", r"^gradients|^select|\._read_batch \("),
        ],
    ),
    "VLLM::EngineCore": (
        "engine core",
        [
            ("adapters loaded, compared", r"add_lora|remove_lora|pin_lora|adapter_check|check_adapter"),
            ("logprobs of prompts (proofs)", r"prompt_logprobs"),
            ("sampling", r"sample_tokens|Sampler\.|_sample \("),
            ("model, decode and prefill", r"_model_forward"),
            ("batch made ready", r"execute_model"),
            ("scheduling, outputs", r"EngineCore\.step|_process_engine_step|schedule"),
        ],
    ),
    "runtime.engine.server": (
        "engine's server",
        [
            ("adapters and proofs", r"lora_adapter|load_lora|verify_adapter|create_completion \("),
            ("answers of rollouts", r"create_chat_completion|chat_completion"),
            ("tokens from the core", r"output_handler|process_outputs"),
            ("HTTP", r"uvicorn|httptools|asgi"),
        ],
    ),
    "slipway_program.py": (
        "program",
        [
            ("steps: groups, bodies, waiting for them", r"Training\.|build_groups|_judged|Session\."),
            ("requests of rollouts", r"Wire\.send|PolicyEngine"),
            ("DSPy and metric", r"rollouts\.py"),
        ],
    ),
    "runtime.gateway.gateway": (
        "gateway",
        [
            ("looking for a commit", r"until_committed"),
            ("publishing, proving", r"Publisher\.|AdapterVerifier\.|LogprobProbe"),
            (
                "steps: taken in, handed over",
                r"StepQueue\.|Handover\.|RolloutLog\.|^build \(|^select \(|write_batch",
            ),
            ("requests", r"Completions|Flight|proxy\.py|uvicorn|httptools|SampleStore|Journal"),
        ],
    ),
    "launcher.cli.main": (
        "launch: relay, and watching the run",
        [
            ("relay", r"relay|aiohttp|web_protocol"),
            ("results home", r"results/|results_copy|background_copy"),
            ("watching", r"runtime_monitor|work\.py"),
        ],
    ),
    "runtime": ("supervisor", []),
    "runtime.keeper": ("keeper", []),
}


def main() -> None:
    """One run, its table on stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--py-spy", default="py-spy")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--rate", type=int, default=20)
    parser.add_argument("--raw", type=Path, help="a folder to keep what py-spy wrote in")
    said = parser.parse_args()
    before = set(_logs())
    bench = [sys.executable, "-m", "launcher.cli.main", "bench", "--json"]
    bench += ["--steps", str(said.steps), "--staleness", str(said.staleness)]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        run = subprocess.Popen(bench, stdout=subprocess.DEVNULL)
        stack.callback(_end, run)
        log = _when(lambda: next(iter(set(_logs()) - before), None), run)
        _until_step(3, log, run)
        cpu = CpuSeconds()
        cpu.sample(run.pid)
        began = time.time()  # from that look on: before the first one nothing is known
        with _spied(run.pid, said.py_spy, said.rate, Path(folder)) as spies:
            _until_step(said.steps - 1, log, run)
            cpu.sample(run.pid)
            ended, spied = time.time(), sum(map(_cpu, spies))
        if said.raw is not None:
            shutil.copytree(folder, said.raw, dirs_exist_ok=True)
        seen = {path.stem: _kinds_seen(path) for path in Path(folder).glob("*.txt")}
        print(_table(cpu.between(began, ended), ended - began, spied, seen))
        run.wait()


def _logs() -> Iterator[Path]:
    return (Home.find().data / "bench").glob("*/ours-0/stderr.log")


def _until_step(step: int, log: Path, run: subprocess.Popen[bytes]) -> None:
    _when(lambda: f"grpo: step {step}/" in log.read_text(errors="replace"), run)


def _when(look: Callable[[], _Found | None], run: subprocess.Popen[bytes]) -> _Found:
    """What it finds, once it does."""
    while not (found := look()):
        if run.poll() is not None:
            raise SystemExit("launch bench has ended too soon")
        time.sleep(0.2)
    return found


def _end(run: subprocess.Popen[bytes]) -> None:
    if run.poll() is None:
        run.send_signal(signal.SIGINT)
        run.wait()


@contextmanager
def _spied(pid: int, py_spy: str, rate: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """What each process's threads are seen at, as `folder/NAME.txt`."""
    spies = []
    for process in psutil.Process(pid).children(recursive=True) if rate else []:
        words = " ".join(process.cmdline())
        name = next((it for it in sorted(_KINDS, key=len, reverse=True) if it in words), None)
        # What looks after others has their command lines in its own, and waits; "runtime" is in every path.
        if name is None or name.startswith("runtime.keeper") or "tether" in words or not _KINDS[name][1]:
            continue
        if "launcher.teardown" in words:
            continue
        out = folder / f"{name}.txt"
        command = [py_spy, "record", "-p", str(process.pid), "-r", str(rate), "-d", "3600", "-f", "raw"]
        spies.append(
            subprocess.Popen([*command, "-o", str(out)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        )
    try:
        yield spies
    finally:
        for spy in spies:
            spy.send_signal(signal.SIGINT)
        for spy in spies:
            spy.wait()


def _cpu(spy: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(spy.pid).cpu_times()
    return times.user + times.system


def _kinds_seen(path: Path) -> Counter[str]:
    """How often a thread was seen at each kind of work."""
    kinds = _KINDS[path.stem][1]
    seen = Counter[str]()
    for line in path.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [re.sub(r":\d+\)", ")", it) for it in stack.split(";")]
        if _WAITS.search(frames[-1]):
            continue
        kind = next((what for what, word in kinds if any(re.search(word, it) for it in frames)), "the rest")
        seen[kind] += int(count)
    return seen


def _table(cpu: dict[str, float], seconds: float, spied: float, seen: dict[str, Counter[str]]) -> str:
    whole = seconds * (psutil.cpu_count() or 1)
    rows = list[tuple[str, str, float]]()
    own = 0.0
    for name, total in sorted(cpu.items(), key=lambda it: -it[1]):
        if name == ALL or total < 0.05:
            continue
        own += total
        called, kinds = _KINDS.get(name, (name, []))[0], seen.get(name, Counter[str]())
        rows += [(called, kind, total * count / kinds.total()) for kind, count in kinds.most_common()]
        if not kinds:
            rows.append((called, "all of it", total))
    others = max(0.0, cpu[ALL] - own - spied)
    left = whole - others  # what others had is said, and no part of the shares
    rows += [("py-spy", "", spied), ("nobody", "idle", max(0.0, whole - cpu[ALL]))]
    named = sum(it for _, kind, it in rows if kind != "the rest")
    cores = psutil.cpu_count()
    lines = [
        f"{seconds:.1f} s of {cores} cores, {whole:.1f} s in all; others, the kernel and what ended unseen "
        f"had {others:.1f}; of the {left:.1f} that were left {named / left:.1%} have a name",
        "| process | what it does | seconds | of what was left |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {called} | {kind} | {it:.1f} | {it / left:.1%} |" for called, kind, it in rows if it >= 0.05
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
