"""Writes what requests ask for through vLLM's second model runner, in Triton's interpreter.

A program of its own: which runner there is, is decided before vLLM is imported. Reads JSON
requests from standard input, prints the tokens of each as the last line.
"""

import json
import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "TRITON_DEFAULT_BACKEND": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def main(model: str) -> None:
    """Run all requests on three slots."""
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(Path(__file__).parent / "doubles"))
    from vllm import LLM, SamplingParams

    requests = json.load(sys.stdin)
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=3,
        enforce_eager=True,
        logits_processors=["foretrace.engines.vllm:SteeringProcessor"],
    )
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    answers = llm.generate(
        [{"prompt_token_ids": each["prompt"]} for each in requests],
        [
            SamplingParams(temperature=0, max_tokens=each["max_tokens"], extra_args=each["goal"])
            for each in requests
        ],
        use_tqdm=False,
    )
    sys.stdout.write(json.dumps([list(each.outputs[0].token_ids) for each in answers]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
