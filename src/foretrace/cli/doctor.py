"""`foretrace doctor`: what is here, what works and what is missing, to paste into a bug report."""

import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any

import typer

EPILOG = "Example: foretrace doctor"
EXTRA = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Part:
    """A package that foretrace needs, or that one of its extras does."""

    name: str
    wanted: str
    found: str | None
    """Its version; None if it is not installed."""
    extra: str | None
    fits: bool


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is installed, what works and what is missing; exit with 1 if steering cannot."""
    from foretrace import __version__

    parts, off = list(_parts()), _enumerated()
    report = {
        "foretrace": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": _devices(),
        "extras": _extras(parts),
        "packages": [asdict(part) for part in parts],
        "enumeration": off,
    }
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(_told(report)))
    broken = [part for part in parts if part.extra is None and not part.fits]
    if broken or off > TOLERANCE:
        sys.exit(1)


def _parts() -> Iterator[Part]:
    """Read what foretrace says of itself that it needs, and look for it."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    for line in requires("foretrace") or []:
        need = Requirement(line)
        extra = EXTRA.search(str(need.marker or ""))
        if extra is not None and extra[1] == "dev":
            continue
        found = _version(need.name)
        fits = found is not None and need.specifier.contains(found, prereleases=True)
        yield Part(need.name, str(need.specifier), found, extra[1] if extra else None, fits)


def _version(name: str) -> str | None:
    """Find a package's version, also if it goes by another name, as vLLM for CPUs does."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return next((version(each) for each in _providers().get(name, [])), None)


@cache
def _providers() -> Mapping[str, list[str]]:
    """List which package provides each module: all that is installed is looked at."""
    from importlib.metadata import packages_distributions

    return packages_distributions()


def _extras(parts: list[Part]) -> dict[str, str]:
    """Tell of each extra whether all of it is here, or how to get it."""
    told = {}
    for extra in dict.fromkeys(part.extra for part in parts if part.extra is not None):
        missing = [part.name for part in parts if part.extra == extra and not part.fits]
        install = f"pip install 'foretrace[{extra}]'"
        told[extra] = f"lacks {', '.join(missing)}: {install}" if missing else "yes"
    return told


def _devices() -> list[str]:
    """List what there is to compute on."""
    import torch

    own = f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    found = [own]
    for place in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(place)
        found.append(f"cuda:{place}: {facts.name}, {facts.total_memory / 1e9:.0f} GB")
    return found


def _enumerated() -> float:
    """Hold EAP against the sum over all futures of a tiny HMM, and give the largest difference."""
    import torch

    from foretrace import HMM, Attribute, Lookahead

    states, tokens, length = 3, 4, 5
    hmm = HMM.random(states, tokens, seed=0, dtype=torch.float64)
    likes = Attribute.from_weights(torch.tensor([0.5, 1.0, 0.25, 0.9], dtype=torch.float64))
    goal = ~likes
    every = torch.cartesian_prod(*[torch.arange(tokens)] * length)
    likely = hmm.log_likelihood(every).exp()
    has_it = likely * goal.probability(every)
    by_first = torch.stack([likely, has_it]).reshape(2, tokens, -1).sum(-1)
    found = Lookahead(hmm, goal, length).eap(torch.zeros(0, dtype=torch.long), length - 1)
    return float((found - by_first[1] / by_first[0]).abs().max())


def _told(report: dict[str, Any]) -> Iterator[str]:
    """Write it as Markdown."""
    ready = [name for name, told in report["extras"].items() if told == "yes"]
    engines = [name for name in ("transformers", "vllm") if name in ready]
    verdict = (
        f"Steering works here with {' and '.join(engines)}." if engines else "No engine is here."
    )
    yield verdict + " What follows is for a report; extras that lack something are for other uses."
    yield ""
    yield f"foretrace {report['foretrace']}, Python {report['python']}, {report['platform']}"
    yield ""
    yield from (f"- {device}" for device in report["devices"])
    yield from (f"- extra `{name}`: {told}" for name, told in report["extras"].items())
    off = report["enumeration"]
    good = "exact" if off <= TOLERANCE else "WRONG"
    yield f"- EAP against the sum over all futures of a tiny HMM: {good} (off by {off:.0e})"
    yield ""
    yield "| package | here | wanted | for |"
    yield "|---|---|---|---|"
    for part in report["packages"]:
        here = part["found"] or "missing"
        here += "" if part["fits"] or part["found"] is None else " (does not fit)"
        yield f"| {part['name']} | {here} | {part['wanted']} | {part['extra'] or 'everything'} |"
