"""Generate text with vLLM's second model runner, in Triton's interpreter.

A program of its own, because the model runner is chosen before vLLM is imported. Reads requests
as JSON from standard input, and prints as the last line the generated tokens of each request, and
how many of them were drafted.

Usage: second_runner.py MODEL [DRAFTS], with the number of tokens that n-grams draft in a step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "TRITON_DEFAULT_BACKEND": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def main(model: str, num_drafts: int = 0) -> None:
    """Run all requests, at most three at a time."""
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(Path(__file__).parent / "doubles"))
    from vllm import LLM, SamplingParams

    _accept_masks_of_integers()
    requests = json.load(sys.stdin)
    speculative = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    speculative["num_speculative_tokens"] = num_drafts
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=3,
        enforce_eager=True,
        speculative_config=speculative if num_drafts else None,
        disable_log_stats=False,
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
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    accepted = metrics.get("vllm:spec_decode_num_accepted_tokens")
    num_accepted = 0 if accepted is None else accepted.value
    sys.stdout.write(json.dumps({"tokens": token_ids, "accepted": num_accepted}) + "\n")


def _accept_masks_of_integers() -> None:
    """Let Triton's interpreter take a mask of integers, as a GPU does."""
    from triton.runtime.interpreter import InterpreterBuilder

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        original = getattr(InterpreterBuilder, name)

        def call(builder: Any, *args: Any, original: Any = original, place: int = place) -> Any:
            args[place].data = args[place].data.astype(bool)
            return original(builder, *args)

        setattr(InterpreterBuilder, name, call)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
