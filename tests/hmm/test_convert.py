"""Converting checkpoints of TRACE and Ctrl-G restores the HMM that they were written from."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretrace.errors import InvalidFileError
from foretrace.hmm import HMM
from foretrace.hmm.convert import read_published
from published import write_published


@pytest.mark.parametrize("layout", ["trace", "ctrl-g"])
def test_converting_restores_the_likelihoods(layout: str, tmp_path: Path) -> None:
    hmm = HMM.random(8, 30, eos_token_id=5, seed=1)
    write_published(tmp_path / layout, hmm, layout)
    converted = read_published(tmp_path / layout)
    tokens = hmm.sample(20, 15, seed=0)
    torch.testing.assert_close(
        converted.log_likelihood(tokens), hmm.log_likelihood(tokens), rtol=1e-5, atol=1e-5
    )
    assert converted.config.eos_token_ids == (5,)
    assert converted.config.distillation == {"converted_from": layout}
    converted.save_pretrained(tmp_path / "saved")
    assert HMM.from_pretrained(tmp_path / "saved").num_states == 8


def test_several_end_of_text_tokens(tmp_path: Path) -> None:
    write_published(tmp_path, HMM.random(8, 30, seed=1), "trace")
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_published(tmp_path).config.eos_token_ids == (1, 2)


def test_another_kind_of_checkpoint_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidFileError, match="neither 'gamma_exp'"):
        read_published(tmp_path)


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidFileError, match=r"no model.safetensors.*pickle"):
        read_published(tmp_path)


def test_a_missing_tensor_is_reported(tmp_path: Path) -> None:
    hmm = HMM.random(8, 30, seed=1)
    write_published(tmp_path, hmm, "trace")
    save_file({"gamma_exp": hmm.initial[None]}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidFileError, match="no tensor 'alpha_exp'"):
        read_published(tmp_path)


def test_probabilities_instead_of_logarithms_are_refused(tmp_path: Path) -> None:
    hmm = HMM.random(8, 30, seed=1)
    write_published(tmp_path, hmm, "trace")
    identity = torch.eye(8)
    wrong = {"alpha_exp": hmm.transition.predict(identity), "gamma_exp": hmm.initial[None].clone()}
    save_file({**wrong, "beta": hmm.emission.predict(identity)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidFileError, match="does not sum to 1"):
        read_published(tmp_path)


@pytest.mark.parametrize("eos", ['"5"', '["5"]', "5.5", "true", "[[5]]", '{"5": 5}'])
def test_an_end_of_text_token_must_be_an_integer(eos: str, tmp_path: Path) -> None:
    write_published(tmp_path, HMM.random(8, 30, seed=1), "trace")
    (tmp_path / "config.json").write_text(f'{{"eos_token_id": {eos}}}')
    with pytest.raises(InvalidFileError, match="eos_token_id is"):
        read_published(tmp_path)


@pytest.mark.parametrize("shape", [(), (8,), (2, 8, 30)])
def test_an_emission_of_another_rank_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    write_published(tmp_path, HMM.random(8, 30, seed=1), "trace")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "beta": torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidFileError, match="tensor 'beta' has shape"):
        read_published(tmp_path)
