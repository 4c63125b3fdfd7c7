"""Check that every package that foretrace and its extras install has a free licence.

Reads the metadata of the current environment. Prints the packages whose licence is not known to be
free, and exits with 1 if there are any.
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

FREE = re.compile(
    r"apache|\bmit\b|mit-cmu|\bbsd|0bsd|\bisc\b|python|psf|mozilla|mpl|unlicense|zlib|hpnd|"
    r"public domain|cnri|\bof[lt]|lgpl|lesser general",
    re.IGNORECASE,
)
SELF = "foretrace"
EXTRAS = frozenset({"transformers", "vllm", "mlx", "llama-cpp", "evaluate", "playground"})
# Free of charge for use with the vendor's devices; torch installs them for such devices.
VENDORS = re.compile(r"^(nvidia|cuda|triton)")


def main() -> None:
    """Check the licence of every required package."""
    licences = sorted(_licences().items())
    unknown = {name: licence for name, licence in licences if not FREE.search(licence)}
    for name, licence in unknown.items():
        print(f"{name}: {licence or 'no licence in its metadata'}")
    if unknown:
        sys.exit(f"{len(unknown)} packages have a licence that is not known to be free.")


def _licences() -> dict[str, str]:
    """Return the licences of all packages that foretrace requires, directly or indirectly."""
    licences: dict[str, str] = {}
    pending = [(SELF, EXTRAS)]
    seen = set(pending)
    while pending:
        name, extras = pending.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform, or of an extra that is not installed
        if name != SELF and not VENDORS.match(name):
            licences[name] = _licence(package)
        for line in package.requires or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                continue
            key = (requirement.name.lower().replace("_", "-"), frozenset(requirement.extras))
            if key not in seen:
                seen.add(key)
                pending.append(key)
    return licences


def _licence(package: Distribution) -> str:
    metadata = package.metadata
    classifiers = [
        classifier
        for classifier in metadata.get_all("Classifier", [])
        if classifier.startswith("License")
    ]
    expression, text = metadata.get("License-Expression", ""), metadata.get("License", "")
    return " ".join([expression, *classifiers, text[:200]]).strip()


if __name__ == "__main__":
    main()
