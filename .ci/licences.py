"""Check that all that foretrace installs, with its extras, may be used freely.

Reads what is installed here. A licence that is not known to be free is named, and ends with 1.
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
OWN = {"foretrace"}
# Freely given, for use with their own devices; torch brings them where there are some.
VENDORS = re.compile(r"^(nvidia|cuda|triton)")


def main() -> None:
    """Walk through everything that is needed, and look at each one's licence."""
    wrong = {name: told for name, told in sorted(_licences().items()) if not FREE.search(told)}
    for name, told in wrong.items():
        print(f"{name}: {told or 'says nothing of its licence'}")
    if wrong:
        sys.exit(f"{len(wrong)} packages have a licence that is not known to be free.")


def _licences() -> dict[str, str]:
    found: dict[str, str] = {}
    waiting = [("foretrace", frozenset({"transformers", "vllm", "evaluate", "playground"}))]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            known = distribution(name)
        except PackageNotFoundError:
            continue  # of another platform, or of an extra that is not installed here
        if name not in OWN and not VENDORS.match(name):
            found[name] = _licence(known)
        for line in known.requires or []:
            need = Requirement(line)
            marks = [need.marker] if need.marker else []
            if all(any(m.evaluate({"extra": e}) for e in extras | {""}) for m in marks):
                step = (need.name.lower().replace("_", "-"), frozenset(need.extras))
                if step not in seen:
                    seen.add(step)
                    waiting.append(step)
    return found


def _licence(known: Distribution) -> str:
    said = known.metadata
    classified = [each for each in said.get_all("Classifier", []) if each.startswith("License")]
    parts = [said.get("License-Expression", ""), *classified, said.get("License", "")[:200]]
    return " ".join(parts).strip()


if __name__ == "__main__":
    main()
