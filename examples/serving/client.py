"""Send the same prompt to a server twice with the OpenAI SDK: without a goal and with one.

foretrace serve MODEL --hmm my-hmm --attributes attributes --port 8000
python examples/serving/client.py http://localhost:8000 nontoxic "I think that you"
"""

import sys

from openai import OpenAI


def main(address: str, goal: str, prompt: str) -> None:
    """Print both continuations."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id
    for label, arguments in (("bare", {}), (goal, {"goal": goal, "level": "strong"})):
        answer = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=30,
            temperature=0,
            extra_body={"vllm_xargs": arguments} if arguments else None,
        )
        sys.stdout.write(f"{label}: {answer.choices[0].text}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
