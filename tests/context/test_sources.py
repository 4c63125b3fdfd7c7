"""The head that is read from files is the head of the LM."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from context.heads import HEADS, run, tiny_lm
from foretrace.context import Head, Probe, read_head
from foretrace.context.head import logit_transform, unsuitable_tokens
from foretrace.context.measure import state_error
from foretrace.errors import InvalidFileError, InvalidInputError
from tiny_lm import WORDS


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("shards", ["one file", "sharded"])
def test_a_folder_has_the_head_of_the_model(kind: str, shards: str, tmp_path: Path) -> None:
    model = tiny_lm(kind)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "sharded" else "5GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > (shards == "sharded")
    head = read_head(tmp_path)
    assert head.fingerprint == Head.of_model(model).fingerprint
    logits, states = run(model)
    assert state_error(Probe.build(head, features=8), logits, states) < 1e-4


def test_a_fingerprint_identifies_the_function(tmp_path: Path) -> None:
    head = Head.of_model(tiny_lm("bias").bfloat16())
    weight, bias = head.weight, head.bias
    assert bias is not None
    for same in (Head(weight.float(), bias.double()), Head(1.0001 * weight.float(), bias)):
        assert same.fingerprint == head.fingerprint  # also as bfloat16 would round it
    others = [
        Head(weight, None),
        Head(weight, bias + 1),
        Head(weight, bias, scale=2.0),
        Head(weight, bias, softcap=30.0),
        Head(weight.flip(0), bias),
    ]
    assert len({other.fingerprint for other in [head, *others]}) == len(others) + 1


TRANSFORMS: list[tuple[dict[str, Any], tuple[float, float | None]]] = [
    ({}, (1.0, None)),
    ({"logit_scale": 0.25}, (0.25, None)),
    ({"model_type": "granite", "logits_scaling": 4.0}, (0.25, None)),
    ({"model_type": "hyperclovax", "logits_scaling": 4.0}, (4.0, None)),
    ({"text_config": {"final_logit_softcapping": 30.0}}, (1.0, 30.0)),
    ({"output_multiplier": 0.5, "final_logit_softcapping": 30}, (0.5, 30)),
    ({"logit_scale": None, "final_logit_softcapping": None}, (1.0, None)),
]


@pytest.mark.parametrize(("config", "expected"), TRANSFORMS)
def test_configs_name_the_scale_and_the_cap(
    config: dict[str, Any], expected: tuple[float, float | None]
) -> None:
    assert logit_transform(config) == expected


def test_special_and_short_tokens_are_excluded(tiny_lm: Path) -> None:
    assert unsuitable_tokens({"a": 0, "\u2581b": 1, "\u0120the": 2, "xy": 3}, {3}) == {0, 1, 3}
    head = read_head(tiny_lm)
    assert 0 in head.excluded  # the end of text
    assert len(head.excluded) < len(WORDS) / 2


def test_folders_without_a_head_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(InvalidFileError, match=r"no config\.json"):
        read_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    packed = {"lm_head.qweight": torch.zeros(4, 4), "model.embed_tokens.weight": torch.zeros(9, 4)}
    save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(InvalidFileError, match="not quantised"):
        read_head(tmp_path)
    with pytest.raises(InvalidInputError, match="16-bit"):
        Head(torch.zeros(4, 4, dtype=torch.uint8))


GGUF: list[tuple[str, str, dict[str, float], tuple[float, float | None]]] = [
    ("llama", "output.weight", {}, (1.0, None)),
    ("gemma2", "token_embd.weight", {"final_logit_softcapping": 30.0}, (1.0, 30.0)),
    ("granite", "token_embd.weight", {"logit_scale": 8.0}, (0.125, None)),
    ("command-r", "token_embd.weight", {"logit_scale": 0.0625}, (0.0625, None)),
]


@pytest.mark.parametrize(("architecture", "name", "keys", "expected"), GGUF)
def test_a_gguf_file_has_a_dequantised_head(
    architecture: str,
    name: str,
    keys: dict[str, float],
    expected: tuple[float, float | None],
    tmp_path: Path,
) -> None:
    gguf = pytest.importorskip("gguf")
    weight = np.random.default_rng(0).normal(size=(200, 32)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(weight, kind)
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tensor(name, packed, raw_dtype=kind)
    for key, value in keys.items():
        writer.add_float32(f"{architecture}.{key}", value)
    writer.add_token_list([f"word{token}" for token in range(200)])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 197)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    head = read_head(file)
    assert (head.scale, head.softcap) == expected
    assert head.excluded == {0, 1, 2}
    assert torch.equal(head.weight, torch.from_numpy(gguf.quants.dequantize(packed, kind)))
    assert Probe.build(head, features=8).vocab_size == 200


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(InvalidFileError, match="There is no file"):
        read_head(tmp_path / "none.gguf")
    (tmp_path / "wrong.gguf").write_bytes(b"nothing of the kind, at length")
    with pytest.raises(InvalidFileError, match="is not a GGUF file"):
        read_head(tmp_path / "wrong.gguf")
