"""Stands in for a GPU where there is none: kernels run in Triton's interpreter, slow and right.

With this folder on the path, and TRITON_INTERPRET=1 TRITON_DEFAULT_BACKEND=cpu
VLLM_USE_V2_MODEL_RUNNER=1, vLLM's second model runner runs on a CPU.
"""
