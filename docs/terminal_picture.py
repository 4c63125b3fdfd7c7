"""Draw the terminal of one command as docs/images/terminal.svg, from its real output.

    python docs/terminal_picture.py LM

The prompt was chosen among a dozen; the seed is the default. LM is SmolLM2-135M-Instruct.
"""

import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMMAND = [
    "foretrace generate LM --hmm examples/smollm2-135m",
    "--attributes examples/attributes --goal negative",
    '--prompt "I think this film is" --top-p 0.9 --compare',
]


def main() -> None:
    """Run the command and write the picture."""
    command = " ".join(COMMAND).replace("LM", sys.argv[1], 1)
    done = subprocess.run(command, shell=True, cwd=ROOT, check=True, capture_output=True, text=True)
    console = Console(record=True, width=82, file=StringIO())
    shown = " \\\n    ".join(COMMAND).replace("LM", NAME, 1)
    console.print(Text("$ ", "bold green") + Text(shown))
    console.print(Text.from_ansi(done.stdout.rstrip()))
    console.save_svg(str(ROOT / "docs" / "images" / "terminal.svg"), title="foretrace")


if __name__ == "__main__":
    main()
