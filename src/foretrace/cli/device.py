"""Which device a command runs on."""

import os


def choose_device(device: str) -> str:
    """Choose the device: under torchrun, each process its own GPU."""
    import torch

    from foretrace.distill.em.distributed import launched_group
    from foretrace.errors import InvalidInputError

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InvalidInputError(f"There is no device '{device}': use cpu, cuda or auto.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            "This machine, or this torch, has no CUDA. Use --device cpu, or install torch for CUDA."
        )
    if device.startswith("cuda:") and launched_group().size > 1:
        raise InvalidInputError(
            f"Several processes cannot share {device}: give --device cuda, and each takes its own."
        )
    if device != "cuda":
        return device
    place = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(place)
    return place
