"""Test gluon_mgpu on the GPUs of this machine, and write the results into one file to send back.

    pip install '.[cu112,train,dev]'
    python scripts/gpu_report.py

It takes at most ten minutes. A complete report requires two NVIDIA GPUs of compute capability 5.0 to 8.9; the report lists
the parts that were not tested. The file, gpu_report.json, is text that you can read before you send it. Names of users and
of this computer, and paths of home folders are removed. It holds no environment variables, and those whose names suggest keys or
passwords are not passed to the programs that it runs.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SECRET = re.compile(r"key|token|secret|passw|passphrase|credential|auth|cookie|session", re.IGNORECASE)  # in a variable's name
NEEDS_TWO = "sums over two GPUs, NCCL, copies from GPU to GPU, the balance of memory, and what a second GPU brings"

FACTS = """
import json, gluon_mgpu, mxnet
from dataclasses import asdict
from gluon_mgpu.devices import describe_devices, usable_gpus
print(json.dumps({
    "gluon_mgpu": gluon_mgpu.__version__,
    "mxnet": mxnet.__version__,
    "usable_gpus": [str(context) for context in usable_gpus()],
    "devices": [asdict(device) for device in describe_devices()],
}))
"""


@dataclass(frozen=True)
class Done:
    """The result of a command: `code` is None if it took too long. `files` holds the JSON that it wrote."""

    code: Any
    seconds: float
    output: str
    errors: str
    files: Dict[str, Any]

    def facts(self) -> Dict[str, Any]:
        """Return the result as a part of the report."""
        ended = "took too long" if self.code is None else "well" if self.code == 0 else f"exit status {self.code}"
        output = {} if self.code == 0 else {"output": self.output[-4000:], "errors": self.errors[-8000:]}
        return {"ended": ended, "seconds": round(self.seconds, 1), **output, **self.files}


def main() -> int:
    """Make the report; return 0 if every part that could run succeeded."""
    options = parse()
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="gpu_report_") as folder:
        report = make(Path(folder), options.only, options.limit)
    report["seconds"] = round(time.time() - began, 1)
    text = json.dumps(scrub(report, secrets()), indent=1)
    Path(options.output).write_text(text + "\n", encoding="utf-8")
    tell(report, options.output, len(text))
    return 0 if report["went_well"] else 1


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description="Try gluon_mgpu on the GPUs here: the doctor, measurements, the tests that are marked gpu, and benchmarks. "
        "Everything goes into one file of text, without names of users and computers, which you can read and send back."
    )
    parser.add_argument("--output", default="gpu_report.json", help="the file (default: gpu_report.json)")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="for all parts together (default: 600)")
    options = parser.parse_args()
    if "tests" in options.only and find_spec("pytest") is None:
        parser.error("pytest is not installed. Run pip install '.[dev]', or leave the tests out with --only.")
    return options


def make(folder: Path, parts: Sequence[str], limit_s: float) -> Dict[str, Any]:
    """Return the report: facts, each part, a list of untested parts, and whether all succeeded."""
    print("inspecting this machine", flush=True)
    end = time.monotonic() + limit_s
    facts, gpus = look(folder, limit_s)
    report: Dict[str, Any] = {"format": 1, "machine": machine(), "facts": facts}
    for part in parts:
        print(f"{part} on {', '.join(gpus) or 'CPU contexts: there is no usable GPU'}", flush=True)
        report[part] = PARTS[part](folder, gpus, max(1.0, end - time.monotonic()))
        print(f"  {report[part]['ended']}, {report[part]['seconds']} s", flush=True)
    report["not_tested"] = not_tested(gpus, report, parts)
    # The doctor's exit status reports a problem of this machine; that is a finding, not a failure of the report.
    report["went_well"] = all(report[part]["ended"] == "well" for part in ("facts", *parts) if part != "doctor")
    return report


def look(folder: Path, limit_s: float) -> Tuple[Dict[str, Any], List[str]]:
    """Return versions and devices, and the GPUs that MXNet can run on; [] if it cannot be imported."""
    done = run([sys.executable, "-c", FACTS], folder, limit_s)
    found = last_json(done.output) if done.code == 0 else {}
    return {**done.facts(), **found}, list(found.get("usable_gpus", []))


def machine() -> Dict[str, Any]:
    """Return a description of this machine."""
    system = {"system": platform.system(), "kernel": platform.release(), "C library": " ".join(platform.libc_ver())}
    return {**system, "Python": platform.python_version(), "cores": os.cpu_count()}


def doctor(folder: Path, gpus: Sequence[str], limit_s: float) -> Dict[str, Any]:
    """Return the output of `gluon-mgpu doctor --json`."""
    done = run([sys.executable, "-m", "gluon_mgpu", "doctor", "--json"], folder, limit_s)
    found = last_json(done.output)
    programs = {str(one["name"]) for gpu in found.get("gpus", []) for one in gpu.get("processes") or () if one.get("name")}
    return {**done.facts(), "told": scrub(found, [(name, "<program>") for name in sorted(programs, key=len, reverse=True)])}


def measurements(folder: Path, gpus: Sequence[str], limit_s: float) -> Dict[str, Any]:
    """Return the results of scripts/gpu_measurements.py."""
    devices = ["gpu", str(len(gpus))] if gpus else ["cpu", "2"]
    done = run([sys.executable, str(ROOT / "scripts" / "gpu_measurements.py"), *devices], folder, limit_s)
    return {**done.facts(), "found": last_json(done.output)}


def tests(folder: Path, gpus: Sequence[str], limit_s: float) -> Dict[str, Any]:
    """Return the outcome of each test of tests/test_gpu.py, on GPUs and of its rehearsal, with durations and tracebacks."""
    results = folder / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", "tests/test_gpu.py"]
    done = run(command, ROOT, limit_s)
    cases = read_cases(results)
    counts = {outcome: sum(case["outcome"] == outcome for case in cases) for outcome in ("passed", "failed", "skipped")}
    on_gpus = sum(case["outcome"] != "skipped" for case in cases if is_on_gpu(case["test"]))
    return {**done.facts(), "counts": counts, "on_gpus": on_gpus, "cases": cases}


def step(folder: Path, gpus: Sequence[str], limit_s: float) -> Dict[str, Any]:
    """Return what a step costs, ours and plain Gluon's, on one device and on two."""
    return bench("step", [*compared(gpus), "--contenders", "ours,gluon"], folder, limit_s)


def train(folder: Path, gpus: Sequence[str], limit_s: float) -> Dict[str, Any]:
    """Return ResNet-18's images/s, ours and plain Gluon's, on one device and on two."""
    return bench("train", [*compared(gpus), "--contenders", "ours,gluon"], folder, limit_s)


Part = Callable[[Path, Sequence[str], float], Dict[str, Any]]
PARTS: Dict[str, Part] = {"doctor": doctor, "measurements": measurements, "tests": tests, "step": step, "train": train}


def compared(gpus: Sequence[str]) -> List[str]:
    """Return the options of a comparison: on GPUs in full; on CPU contexts so small that it only shows that it runs."""
    if not gpus:
        return ["--device", "cpu", "--num-devices", "1,2", "--quick"]
    return ["--device", "gpu", "--num-devices", "1,2" if len(gpus) > 1 else "1", "--rounds", "2"]


def bench(name: str, arguments: Sequence[str], folder: Path, limit_s: float) -> Dict[str, Any]:
    """Run a comparison of scripts/benchmarks, and return its results."""
    command = [sys.executable, str(ROOT / "scripts" / "benchmarks"), name, *arguments, "--output", str(folder)]
    return {"arguments": list(arguments), **run(command, folder, limit_s, files=[f"{name}.json"]).facts()}


def run(command: Sequence[str], where: Path, limit_s: float, *, files: Sequence[str] = ()) -> Done:
    """Run a command to its end or its time limit; a crash is a finding, and the report continues."""
    began = time.perf_counter()
    known = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    environment = {**known, "PYTHONWARNINGS": "ignore", "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(list(command), cwd=str(where), env=environment, stdout=out, stderr=errors)
        code: Any = None
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        printed = [read_all(file) for file in (out, errors)]
    written = {Path(name).stem: json.loads((where / name).read_text()) for name in files if (where / name).exists()}
    return Done(code, time.perf_counter() - began, printed[0], printed[1], written)


def read_all(file: Any) -> str:
    """Return the content of a file."""
    file.seek(0)
    return str(file.read().decode(errors="replace"))


def last_json(text: str) -> Any:
    """Return the JSON object at the end of a text, {} if there is none: libraries may print lines before it."""
    for start in [match.start() for match in re.finditer(r"^\{", text, re.MULTILINE)]:
        try:
            return json.loads(text[start:])
        except ValueError:
            continue
    return {}


def read_cases(results: Path) -> List[Dict[str, Any]]:
    """Return each test's name, outcome, seconds, and why it was skipped or how it failed; [] if pytest wrote nothing."""
    if not results.exists():
        return []
    found = []
    for case in ElementTree.parse(str(results)).getroot().iter("testcase"):
        reasons = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = {"failure": "failed", "error": "failed", "skipped": "skipped"}[reasons[0].tag] if reasons else "passed"
        one = {"test": case.get("name", ""), "outcome": outcome, "seconds": round(float(case.get("time", 0)), 2)}
        if reasons:
            texts = (child.text or "" for child in reasons)
            one["why"] = reasons[0].get("message", "") if outcome == "skipped" else "\n".join(texts)
        found.append(one)
    return found


def is_on_gpu(test: str) -> bool:
    """Return whether a test's name is that of its run on GPUs: test_memory[gpu], test_copy[float32-gpu]."""
    return "gpu" in re.split(r"[\[\]-]", test)[1:]


def not_tested(gpus: Sequence[str], report: Dict[str, Any], parts: Sequence[str]) -> List[str]:
    """Return sentences about the parts that were not tested."""
    found = []
    if not gpus:
        reasons = sorted({device["reason"] for device in report["facts"].get("devices", []) if not device["usable"]})
        found.append(" ".join(["No GPU that MXNet can run on: nothing was tried on a GPU.", *reasons]))
    if len(gpus) == 1:
        found.append(f"Only one GPU: {NEEDS_TWO} were not tried.")
    found += [f"{part} was not requested." for part in PARTS if part not in parts]
    found += [f"{part} failed: {report[part]['ended']}." for part in parts if report[part]["ended"] != "well"]
    if gpus and "tests" in parts and not report["tests"]["on_gpus"]:
        found.append("No test ran on a GPU: each has its reason for skipping.")
    return found


def secrets() -> List[Tuple[str, str]]:
    """Return private texts and their replacements, the longest first."""
    folders = {str(ROOT): "<project>", sys.prefix: "<environment>", sys.base_prefix: "<python>", str(Path.home()): "~"}
    folders[tempfile.gettempdir()] = "<tmp>"
    names = dict.fromkeys((socket.gethostname(), platform.node(), socket.gethostname().split(".")[0]), "<host>")
    users = [os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), Path.home().name]
    with suppress(KeyError, OSError):  # a user without a name, in a container
        users.append(getpass.getuser())
    names.update(dict.fromkeys(users, "<user>"))
    keys = {name: value for name, value in os.environ.items() if SECRET.search(name)}
    names.update({value: "<secret>" for value in keys.values() if len(value) > 7})
    found = [(text, mark) for text, mark in {**folders, **names}.items() if len(text) > 1 and text != "localhost"]
    return sorted(found, key=lambda pair: len(pair[0]), reverse=True)


def scrub(value: Any, hidden: Sequence[Tuple[str, str]]) -> Any:
    """Return nested data without names of users, of this computer, or of home folders."""
    if isinstance(value, dict):
        return {scrub(key, hidden): scrub(one, hidden) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(one, hidden) for one in value]
    if not isinstance(value, str):
        return value
    for text, mark in hidden:
        edge = (r"(?<![\w-])", r"(?![\w-])") if not text.startswith("/") else ("", r"(?![\w.-])")
        value = re.sub(edge[0] + re.escape(text) + edge[1], mark, value)
    value = re.sub(r"/(home|Users)/[^/\s'\":,;]+", "~", value)
    value = re.sub(r"/root(?![\w.-])", "~", value)
    return re.sub(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4,12}){4}", "<uuid of a GPU>", value)


def tell(report: Dict[str, Any], path: str, num_bytes: int) -> None:
    """Print a summary of the report."""
    if "tests" in report:
        counts, on_gpus = report["tests"]["counts"], report["tests"]["on_gpus"]
        print(f"\ntests: {', '.join(f'{number} {outcome}' for outcome, number in counts.items())}; {on_gpus} ran on GPUs")
    print("\nnot tested:" if report["not_tested"] else "\neverything was tried")
    for sentence in report["not_tested"]:
        print(f"  {sentence}")
    print(f"\nwrote {path}, {num_bytes / 1000:.0f} kB. Read it, and send this one file.")


if __name__ == "__main__":
    sys.exit(main())
