"""Generate text with vLLM's second model runner, in Triton's interpreter.

A program of its own, because the model runner is chosen before vLLM is imported. Reads requests
as JSON from standard input, and prints the generated tokens of each request as the last line.
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
    """Run all requests, at most three at a time."""
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
        [{"prompt_token_ids": request["prompt"]} for request in requests],
        [
            SamplingParams(
                temperature=0, max_tokens=request["max_tokens"], extra_args=request["goal"]
            )
            for request in requests
        ],
        use_tqdm=False,
    )
    token_ids = [list(answer.outputs[0].token_ids) for answer in answers]
    sys.stdout.write(json.dumps(token_ids) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
