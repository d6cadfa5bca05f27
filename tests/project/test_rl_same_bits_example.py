"""Test that examples/rl_same_bits.py learns with equal bits on both sides, and that parity finds each mismatch."""

import sys

import pytest

from examples import rl_same_bits as example


@pytest.mark.parametrize(
    ("mismatch", "step", "setting"),
    [
        ("amax", "amax (tensor amax)", "the largest of gate_proj, up_proj and rollout uses"),
        ("recipe", "block scale", "recipe nvfp4-te in train and nvfp4-flashinfer-4over6-mse-448 in rollout"),
        ("activations", "product", "setting: the inputs are quantized differently; see the inputs"),
        ("unit", "product", "unit sm100 in train and dequantized in rollout"),
        ("nibbles", "code", "rollout: the even element of each byte is in the high nibble; swap the nibbles"),
    ],
)
def test_mismatches_are_found(mismatch, step, setting, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rl_same_bits.py", "--steps", "2", "--mismatch", mismatch])
    example.main()
    out = capsys.readouterr().out
    assert "log-probabilities equal in every bit in 2 steps\n3 layers and 1 input are equal in every bit" in out
    assert f"first step that differs: {step}" in out and setting in out


def test_the_policy_learns():
    _, rewards = example.train(40)
    assert rewards[0] < 0.3 and rewards[-1] > 0.9


def test_a_server_that_differs_is_noticed(monkeypatch):
    other = example.CONTRACT.stating(shared_amax=())
    monkeypatch.setattr(example, "refit", lambda masters, contract: example.quantized(masters, other))
    with pytest.raises(SystemExit, match=r"^step 0: log-probabilities differ\n1 of 3 layers differ"):
        example.train(1)
