"""`cordee doctor`: looks at this machine and says what would keep training from working, and what to do."""

from __future__ import annotations

import ast
import importlib.util
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from cordee.core import Job
from cordee.core.env import cache_folder, runs_folder
from cordee.core.errors import CommunicationError, DataError
from cordee.core.findings import Finding
from cordee.tools.new import examples_folder

GIB = 2**30
LEAST_DISK_BYTES = 1 * GIB
LEAST_MEMORY_BYTES = 1 * GIB


def examine() -> list[Finding]:
    """Look at everything. Takes a second or two, most of it importing torch."""
    checks: list[Callable[[], Iterable[Finding]]] = [
        check_python,
        check_torch,
        check_cores,
        check_memory,
        check_shared_memory,
        check_disk,
        check_ports,
        check_data,
        check_extras,
        check_examples,
    ]
    return [finding for check in checks for finding in check()]


def examine_engine(name: str) -> list[Finding]:
    """Look at the cluster that an engine would use, and at what this machine needs for any. Raises JobError."""
    from cordee.cluster.engines import check_engine

    found = check_engine(name)
    return [*check_python(), *check_torch(), *check_shared_memory(), *check_disk(), *found]


def check_python() -> Iterable[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def check_torch() -> Iterable[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "problem", str(error), "pip install -c constraints.txt torch")
        return
    yield Finding("torch", "ok", str(torch.__version__))  # a class of its own, which JSON does not know
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("devices", "ok", f"{len(names)} GPU: {', '.join(names)}")
    else:
        yield Finding("devices", "ok", "CPU only (no GPU that this torch can use)")


def check_cores() -> Iterable[Finding]:
    import psutil
    import torch

    from cordee.compute import usable_cores

    usable, present = usable_cores(), psutil.cpu_count() or 1
    detail = f"{usable} usable of {present}, torch uses {torch.get_num_threads()} threads"
    yield Finding("cores", "ok" if usable == present else "note", detail)


def check_memory(control_groups: Path = Path("/sys/fs/cgroup")) -> Iterable[Finding]:
    import psutil

    from cordee.planner.measurements import memory_limit

    memory = psutil.virtual_memory()
    free, total, whose = memory.available, memory.total, ""
    if (limit := memory_limit(control_groups)) is not None and limit[1] < total:
        free, total, whose = min(free, limit[0]), limit[1], " (the limit of this container)"
    detail = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}{whose}"
    if free < LEAST_MEMORY_BYTES:
        yield Finding("memory", "problem", detail, "end other programs, raise the limit, or use a smaller batch")
    else:
        yield Finding("memory", "ok", detail)


def check_shared_memory() -> Iterable[Finding]:
    """Make and fill what two workers on this host share, as they would."""
    from cordee.communication.shared_memory.segment import try_segment

    subject, num_workers = "shared memory", 2
    try:
        num_bytes = try_segment(num_workers)
    except CommunicationError as error:
        yield Finding(subject, "problem", str(error), "or train with one worker")
        return
    yield Finding(subject, "ok", f"{num_bytes / 2**20:.0f} MiB for {num_workers} workers can be had and attached to")


def check_disk() -> Iterable[Finding]:
    for subject, folder in (("runs folder", runs_folder()), ("cache folder", cache_folder())):
        existing = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
        try:
            probe = existing / f".cordee-probe-{socket.gethostname()}-{id(folder)}"
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as error:
            yield Finding(subject, "problem", f"{folder}: {error.strerror}", "make it writable or choose another")
            continue
        free = shutil.disk_usage(existing).free
        detail = f"{folder} ({free / GIB:.1f} GiB free)"
        if free < LEAST_DISK_BYTES:
            yield Finding(subject, "note", detail, "free some space: checkpoints may not fit")
        else:
            yield Finding(subject, "ok", detail)


def check_ports() -> Iterable[Finding]:
    try:
        with socket.socket() as listener, socket.socket() as caller:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            caller.settimeout(2)
            caller.connect(("127.0.0.1", port))
    except OSError as error:
        yield Finding("ports", "problem", f"no connection over loopback: {error}", "check the firewall and `ip addr`")
        return
    yield Finding("ports", "ok", f"loopback works (the system chose port {port})")


def check_data() -> Iterable[Finding]:
    from cordee.data import FILE_SOURCES, find_files

    for name in FILE_SOURCES:
        try:
            yield Finding(name, "ok", str(find_files(name)))
        except DataError as error:
            advice = [line.strip() for line in str(error).splitlines() if line.strip().startswith(("Put", "With"))]
            yield Finding(name, "note", "not on this machine", " ".join(advice))


EXTRAS = {
    "tensorboard": "tensorboard",
    "onnx": "onnxscript",
    "report": "matplotlib",
    "dashboard": "starlette",
    "watch": "textual",
    "tune": "optuna",
    "storage": "fsspec",
    "parquet": "pyarrow",
}


def check_extras() -> Iterable[Finding]:
    for extra, module in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            yield Finding(extra, "note", "not installed", f"pip install 'cordee[{extra}]'")
        else:
            yield Finding(extra, "ok", "installed")


def check_examples() -> Iterable[Finding]:
    """Say which job files among the examples can be trained here, and what the others lack."""
    runnable, missing = [], []
    for path in sorted(examples_folder().glob("*.toml")):
        if lack := _lacks(path):
            missing.append(f"{path.name} needs {lack}")
        else:
            runnable.append(path.name)
    if runnable:
        yield Finding("examples", "ok", f"can run here: {', '.join(runnable)}")
    if missing:
        yield Finding("examples", "note", "cannot run here", "; ".join(missing))


def _lacks(path: Path) -> str:
    """Return what an example needs and this machine has not; empty if it can be trained."""
    from cordee.data import FILE_SOURCES, find_files

    job = Job.load(path)
    source = str(job.data.use)
    if source in FILE_SOURCES:
        try:
            find_files(source)
        except DataError:
            return f"the files of {source}"
    for used in (source, str(job.model.use)):
        own = path.with_name(f"{used.partition(':')[0]}.py")
        if ":" in used and own.is_file():
            for package in _imported(own):
                if importlib.util.find_spec(package) is None:
                    return f"the package {package}"
    place = job.data.args.get("path") or job.data.args.get("root")
    if isinstance(place, str) and "://" not in place and not any(Path(place).parent.glob(Path(place).name)):
        script = next((name.name for name in path.parent.glob(f"{path.stem}_*.py")), "")
        return f"the files in {place}" + (f", which {script} writes" if script else "")
    return ""


def _imported(module: Path) -> list[str]:
    """Return the packages that a file imports when it is imported itself."""
    names = []
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def can_train(findings: list[Finding]) -> bool:
    return all(finding.state != "problem" for finding in findings)


MACHINE = ("everything that training needs is here", "to fix before training works")


def render_findings(findings: list[Finding], *, as_json: bool, conclusions: tuple[str, str] = MACHINE) -> str:
    """Return what was found, and how to fix it, as text; of `conclusions` the first is said if all is well."""
    if as_json:
        return msgspec.json.format(msgspec.json.encode(findings)).decode()
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        mark = {"ok": "ok  ", "note": "note", "problem": "BAD "}[finding.state]
        lines.append(f"{mark}  {finding.subject:<{width}}  {finding.detail}")
        if finding.remedy:
            lines.append(f"{'':{width + 8}}{finding.remedy}")
    problems = sum(finding.state == "problem" for finding in findings)
    lines.append(conclusions[0] if not problems else f"{problems} {conclusions[1]}")
    return "\n".join(lines)
