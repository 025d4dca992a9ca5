"""TVM's runtime for a platform, with its headers and licences: from this environment, or from wheels in a cache.

As a program it fills the cache: `python -m khtst_compile.runner.libraries linux/arm64`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from khtst_compile.artifact import writable
from khtst_compile.errors import EnvironmentProblem, KhtstError, UsageError
from khtst_compile.runner.platforms import PLATFORMS, Platform

PACKAGES = ("apache-tvm", "apache-tvm-ffi")
LIBRARIES = ("libtvm_ffi.so", "libtvm_runtime.so")
# path in a package -> where it goes; of licences those of what is inside the two libraries
_HEADERS = ("tvm/ffi/c_api.h", "dlpack/dlpack.h")
_WANTED = {
    "apache-tvm": {
        "tvm/lib/libtvm_runtime.so": "lib/libtvm_runtime.so",
        "tvm/LICENSE": "licenses/apache-tvm/LICENSE",
        "tvm/NOTICE": "licenses/apache-tvm/NOTICE",
        "tvm/licenses/LICENSE.builtin_fp16.txt": "licenses/apache-tvm/LICENSE.builtin_fp16.txt",
    },
    "apache-tvm-ffi": {
        "tvm_ffi/lib/libtvm_ffi.so": "lib/libtvm_ffi.so",
        **{f"tvm_ffi/include/{name}": f"include/{name}" for name in _HEADERS},
        "{dist}/licenses/LICENSE": "licenses/apache-tvm-ffi/LICENSE",
        "{dist}/licenses/NOTICE": "licenses/apache-tvm-ffi/NOTICE",
        "tvm_ffi/3rdparty/libbacktrace/LICENSE": "licenses/apache-tvm-ffi/LICENSE.libbacktrace",
    },
}


@dataclass(frozen=True)
class Runtime:
    """TVM's runtime. files: path as in a runner's folder ("lib/libtvm_ffi.so", "include/..", "licenses/..") -> file."""

    files: dict[str, Path]


def versions() -> tuple[str, str]:
    """Of tvm and tvm-ffi, as installed here."""
    tvm, ffi = (metadata.version(package) for package in PACKAGES)
    return tvm, ffi


def cache() -> Path:
    """Where downloads are kept: KHTST_CACHE, else khtst-compile in the user's cache folder."""
    if given := os.environ.get("KHTST_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "khtst-compile"


def place(target: Platform) -> Path:
    """The folder of the cache with the runtime for a platform, of the versions that are installed here."""
    return cache() / target.name.replace("/", "-") / "tvm-{}-ffi-{}".format(*versions())


def runtime(target: Platform) -> Runtime:
    """The runtime for a platform. Raises EnvironmentProblem with the command that brings it, where it is not here."""
    if target.native:
        return Runtime({to: _installed(package, name) for package, wanted in _WANTED.items() for name, to in wanted.items()})
    folder = place(target)
    files = {to: folder / to for wanted in _WANTED.values() for to in wanted.values()}
    if missing := [to for to, file in files.items() if not file.is_file()]:
        raise EnvironmentProblem(
            f"--emit-runner: TVM's runtime for {target.name} is not in the cache ({folder} has no {missing[0]}); "
            f"needed: that of tvm {versions()[0]}; python -m khtst_compile.runner.libraries {target.name} downloads it"
        )
    return Runtime(files)


def headers() -> dict[str, Path]:
    """The headers of TVM's C ABI: path as in an #include -> file."""
    return {name: _installed("apache-tvm-ffi", f"tvm_ffi/include/{name}") for name in _HEADERS}


def _installed(package: str, name: str) -> Path:
    found = metadata.distribution(package)
    path = Path(str(found.locate_file(_in_wheel(package, found.version, name))))
    if not path.is_file():
        raise EnvironmentProblem(f"--emit-runner: {package} here has no {path}; needed: the wheel of PyPI; install it again")
    return path


def _in_wheel(package: str, version: str, name: str) -> str:
    return name.format(dist=f"{package.replace('-', '_')}-{version}.dist-info")


def fetch(target: Platform) -> Path:
    """Download the wheels for a platform, of the versions installed here, and keep what a runner needs; returns the folder.

    Does nothing where it is there. Raises EnvironmentProblem where pip cannot download them, with its words.
    """
    folder = place(target)
    if folder.is_dir():
        return folder
    with writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        for package, version in zip(PACKAGES, versions(), strict=True):
            _unpack(_download(package, version, target, Path(temporary)), package, version, made)
        try:
            made.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    return folder


def _download(package: str, version: str, target: Platform, into: Path) -> Path:
    """The wheel of a package."""
    wheels = into / package
    tags = [word for tag in target.wheels for word in ("--platform", tag)]
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", *tags, "--python-version", python, "--dest", str(wheels), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(wheels.glob("*.whl"))
    if done.returncode or len(found) != 1:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EnvironmentProblem(
            f"{package}=={version} for {target.name} cannot be downloaded ({said}); needed: pip and a package index; "
            f"or put {', '.join(LIBRARIES)} with headers and licences into {place(target)}"
        )
    return found[0]


def _unpack(wheel: Path, package: str, version: str, made: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name, to in _WANTED[package].items():
            target = made / PurePosixPath(to)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with archive.open(_in_wheel(package, version, name)) as source, target.open("wb") as stream:
                    shutil.copyfileobj(source, stream)
            except KeyError as error:
                raise EnvironmentProblem(f"{wheel.name} has no {name}; needed: {package}=={version} as PyPI has it") from error


def main(arguments: list[str]) -> int:
    """Print the folder with the runtime for the platform named, downloaded if need be; returns an exit code."""
    try:
        if len(arguments) != 1 or arguments[0] not in PLATFORMS:
            raise UsageError(f"platform {' '.join(arguments)!r}; needed: one of {', '.join(PLATFORMS)}")
        sys.stdout.write(f"{fetch(PLATFORMS[arguments[0]])}\n")
    except KhtstError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
