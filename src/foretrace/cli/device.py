"""Choose the device that a command runs on, and the dtype of the language model."""

import os


def choose_device(device: str) -> str:
    """Return the device to use: under torchrun, a GPU per process."""
    import torch

    from foretrace.distill.em.distributed import launched_group
    from foretrace.errors import InvalidInputError

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InvalidInputError(f"There is no device '{device}'. Use cpu, cuda or auto.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            "CUDA is not available: the machine has no GPU, or torch is built without CUDA. Use "
            "--device cpu, or install torch for CUDA."
        )
    if device.startswith("cuda:") and launched_group().size > 1:
        raise InvalidInputError(
            f"Several processes cannot share {device}. Use --device cuda, which gives each process "
            f"a GPU."
        )
    if device != "cuda":
        return device
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(gpu)
    return gpu


def choose_dtype(dtype: str, device: str) -> str:
    """Return the dtype of a language model; `auto` depends on the device's hardware."""
    from foretrace._hardware import default_dtype
    from foretrace.hmm.probability import dtype_name

    return dtype_name(default_dtype(device)) if dtype == "auto" else dtype
