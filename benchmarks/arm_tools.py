"""What benchmarks/arm.py runs on: emulated processors, an ARM system with Python and the peers' wheels in a folder, and the programs that
count. All of it is made in that folder on the first run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from khtst_compile.runner import libraries
from khtst_compile.runner.emit import CFLAGS, LINK, write_sources
from khtst_compile.runner.platforms import PLATFORMS

HERE = Path(__file__).parent
TOOLS = ("qemu-aarch64", "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump", "llvm-mca-19", "gcc")
ARM_PYTHON = "3.11"
PACKAGES = ("onnxruntime==1.32.0", "numpy==2.4.6")
EXECUTORCH = "executorch==1.5.1"
DEBIAN = ("python3.11", "libpython3.11-stdlib", "libstdc++6", "libgomp1", "libatomic1")
LIMIT_S = 1200
"""Of one program under emulation."""
_TAGS = tuple(word for n in ("2_28", "2_27", "2_17") for word in ("--platform", f"manylinux_{n}_aarch64"))
_PLAIN = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
_N1 = f"{_PLAIN} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp ssbs"


@dataclass(frozen=True)
class Cpu:
    """A processor. qemu: as qemu calls one with its features; variant: what of our artifact runs; part, features: as the kernel of
    such a machine has them in /proc/cpuinfo, which peers read; mca: as LLVM calls it."""

    qemu: str
    variant: str
    part: int
    features: str

    def cpuinfo(self) -> str:
        """/proc/cpuinfo of a machine with one core."""
        fields = {
            "processor": "0",
            "BogoMIPS": "50.00",
            "Features": self.features,
            "CPU implementer": "0x41",
            "CPU architecture": "8",
            "CPU variant": "0x1",
            "CPU part": f"0x{self.part:03x}",
            "CPU revision": "1",
        }
        return "".join(f"{name}\t: {value}\n" for name, value in fields.items()) + "\n"


CPUS = {
    "cortex-a72": Cpu("cortex-a72", "arm-neon", 0xD08, _PLAIN),
    "neoverse-n1": Cpu("neoverse-n1", "arm-dotprod", 0xD0C, _N1),
    # qemu 7.2 knows no V1. What it has beyond int8 products is left out where it can be: our kernels use none of it.
    "neoverse-v1": Cpu("max,sve=off,sme=off,pauth-impdef=on", "arm-i8mm", 0xD40, f"{_N1} i8mm bf16"),
}
"""LLVM's name of a processor -> what is emulated."""


@dataclass(frozen=True)
class Tools:
    """root: an ARM system; site: Python packages for it; executorch: its unpacked wheel, or None with the reason in `lacking`; libraries:
    TVM's runtime; plugin, call, mark, xnnpack: what is made of arm_count.c, arm_call.c, arm_mark.c and arm_xnnpack.cpp."""

    root: Path
    site: Path
    libraries: Path
    plugin: Path
    call: Path
    mark: Path
    xnnpack: Path | None
    lacking: dict[str, str]

    def pretend(self, cpu: Cpu) -> None:
        """Show that processor's /proc/cpuinfo to every program run from now on."""
        (self.root / "proc").mkdir(exist_ok=True)
        (self.root / "proc" / "cpuinfo").write_text(cpu.cpuinfo(), encoding="ascii")

    def count(self, cpu: Cpu, command: Sequence[str | Path], counts: Path, environment: Sequence[str] = ()) -> str:
        """Run an ARM program with the plugin; returns what the plugin wrote to `counts`. environment: NAME=VALUE of the program alone.
        Raises RuntimeError with the program's last words where it fails."""
        counts.unlink(missing_ok=True)
        variables = [word for pair in ("OMP_NUM_THREADS=1", *environment) for word in ("-E", pair)]
        emulator = ["qemu-aarch64", "-L", str(self.root), "-cpu", cpu.qemu, "-plugin", f"{self.plugin},out={counts}", *variables]
        done = subprocess.run(
            [*emulator, *map(str, command)], capture_output=True, text=True, check=False, timeout=LIMIT_S, errors="replace"
        )
        if done.returncode or not counts.exists():
            said = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
            raise RuntimeError(f"{Path(str(command[0])).name} ended with {done.returncode}: {said}"[:300])
        return counts.read_text(encoding="ascii")

    def python(self) -> Path:
        return self.root / "usr" / "bin" / f"python{ARM_PYTHON}"


def prepare(folder: Path, say: Callable[[str], None]) -> Tools:
    """Make what is missing in `folder`. Raises SystemExit where a tool of this machine is missing."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise SystemExit(f"{', '.join(missing)} not on the path; scripts/install-system.sh python3 arm")
    folder.mkdir(parents=True, exist_ok=True)
    lacking: dict[str, str] = {}
    root, site, wheel = folder / "root", folder / "site", folder / "executorch"
    steps: list[tuple[str, Path, str, Callable[[Path], None]]] = [
        ("python", root, " ".join(DEBIAN), _unpack_debian),
        ("onnxruntime", site, " ".join(PACKAGES), _install),
        ("xnnpack", wheel, EXECUTORCH, _unpack_wheel),
    ]
    for name, where, key, make in steps:
        stamp = folder / f"{name}.json"
        if where.is_dir() and stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == key:
            continue
        say(f"fetching {key}")
        shutil.rmtree(where, ignore_errors=True)
        try:
            make(where)
        except (subprocess.CalledProcessError, OSError) as error:
            words = str(getattr(error, "stderr", None) or error).strip().splitlines()
            lacking[name] = f"not installed: {words[-1] if words else 'no reason given'}"
            continue
        stamp.write_text(json.dumps(key), encoding="utf-8")
    root.mkdir(exist_ok=True)
    runtime = libraries.fetch(PLATFORMS["linux/arm64"])
    made = folder / "programs"
    made.mkdir(exist_ok=True)
    if "xnnpack" not in lacking:
        lacking |= _built("xnnpack", lambda: _build_xnnpack(wheel / "executorch", made / "arm_xnnpack"))
    _compile(["aarch64-linux-gnu-gcc", "-O2", "-shared", "-fPIC"], HERE / "arm_mark.c", made / "arm_mark.so")
    return Tools(
        root,
        site,
        runtime / "lib",
        build_plugin(made),
        build_call(made),
        made / "arm_mark.so",
        made / "arm_xnnpack" if "xnnpack" not in lacking else None,
        lacking,
    )


def build_plugin(made: Path) -> Path:
    """Compile arm_count.c for this machine."""
    _compile(
        ["gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"], HERE / "arm_count.c", made / "arm_count.so"
    )
    return made / "arm_count.so"


def build_call(made: Path) -> Path:
    """Compile arm_call.c with the runner's sources, less its command line."""
    runner = made / "runner"
    shutil.rmtree(runner, ignore_errors=True)
    write_sources(runner, libraries.runtime(PLATFORMS["linux/arm64"]))
    own = ("main", "verbs", "verify", "bench")
    sources = [str(p) for p in sorted((runner / "src").glob("*.c")) if p.stem not in own]
    include = [f"-I{runner / 'src'}", f"-I{runner / 'include'}"]
    _compile(["aarch64-linux-gnu-gcc", *CFLAGS, "-Werror", *include], HERE / "arm_call.c", made / "arm_call", *sources, *LINK)
    return made / "arm_call"


def _build_xnnpack(wheel: Path, made: Path) -> None:
    names = ("executorch", "executorch_kernels_optimized", "executorch_kernels_quantized", "executorch_backend_xnnpack")
    include = [f"-I{wheel / 'include'}", f"-I{wheel / 'include' / 'executorch/runtime/core/portable_type/c10'}"]
    command = [
        "aarch64-linux-gnu-g++",
        "-std=c++17",
        "-O2",
        "-w",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
        "-DET_USE_THREADPOOL",
        *include,
    ]
    # Operators and XNNPACK register themselves when they are loaded: nothing names them.
    link = [f"-L{wheel / 'lib'}", "-Wl,--no-as-needed", *(f"-l{n}" for n in (*names, "executorch_threadpool"))]
    _compile(command, HERE / "arm_xnnpack.cpp", made, *link, f"-Wl,-rpath,{wheel / 'lib'}")


def _compile(command: Sequence[str], source: Path, made: Path, *more: str) -> None:
    subprocess.run([*command, str(source), "-o", str(made), *more], check=True, capture_output=True, text=True)


def _built(name: str, make: Callable[[], None]) -> dict[str, str]:
    try:
        make()
    except subprocess.CalledProcessError as error:
        return {name: f"not built: {(error.stderr.strip().splitlines() or ['no reason given'])[-1]}"}
    return {}


def _unpack_debian(root: Path) -> None:
    """Debian's packages for ARM with what they depend on, unpacked: without its package manager knowing the architecture."""
    lists = root.parent / "debian"
    for name in ("lists/partial", "cache/archives/partial", "sources"):
        (lists / name).mkdir(parents=True, exist_ok=True)
    (lists / "status").touch()
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    source = f"deb [signed-by={keyring}] http://deb.debian.org/debian bookworm main\n"
    (lists / "sources" / "debian.list").write_text(source, encoding="ascii")
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "Dir::State::Lists": str(lists / "lists"),
        "Dir::State::status": str(lists / "status"),
        "Dir::Cache": str(lists / "cache"),
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": str(lists / "sources"),
        "APT::Install-Recommends": "false",
        "Debug::NoLocking": "1",
        "Acquire::Languages": "none",
    }
    config = lists / "apt.conf"
    config.write_text("#clear APT::Architectures;\n" + "".join(f'{k} "{v}";\n' for k, v in options.items()), encoding="ascii")
    apt = ["env", f"APT_CONFIG={config}", "apt-get", "-qq"]
    subprocess.run([*apt, "update"], check=True, capture_output=True, text=True)
    subprocess.run([*apt, "install", "-y", "--download-only", *DEBIAN], check=True, capture_output=True, text=True)
    root.mkdir()
    for package in sorted((lists / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True, capture_output=True, text=True)


def _install(site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(site), *_TAGS]
    command += ["--only-binary=:all:", "--python-version", ARM_PYTHON, *PACKAGES]
    subprocess.run(command, check=True, capture_output=True, text=True)


def _unpack_wheel(into: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", *_TAGS]
    command += ["--only-binary=:all:", "--python-version", ARM_PYTHON, "--dest", str(into), EXECUTORCH]
    subprocess.run(command, check=True, capture_output=True, text=True)
    for wheel in into.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
        wheel.unlink()
