"""Test the examples train_convert_serve.py and rl_same_bits.py, which notice values that differ."""

import sys

import pytest

from examples import rl_same_bits as example


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the example with arguments in this process and returns what it prints.

    The libraries are not imported when tests are collected, because importing them takes seconds.
    """
    for package in ("torch", "transformers", "compressed_tensors", "accelerate"):
        pytest.importorskip(package)
    from examples import train_convert_serve

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["train_convert_serve.py", *arguments])
        train_convert_serve.main()
        return capsys.readouterr().out

    call.module = train_convert_serve
    return call


def test_the_trained_model_is_the_served_one(run):
    out = run("--steps", "12")
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step")]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert out.endswith("14 of 14 layers are equal in every bit\nlogits are equal in every bit\n")


def test_another_recipe_is_noticed(run, monkeypatch):
    convert = run.module.convert
    monkeypatch.setattr(run.module, "convert", lambda a, b, **kw: convert(a, b, "nvfp4-flashinfer", **kw))
    with pytest.raises(SystemExit, match=r"^the trained and the served model differ: model.layers.0.self_attn."):
        run("--steps", "4", "--scheme", "nvfp4-w4a16")


@pytest.mark.parametrize(
    ("mismatch", "step", "setting"),
    [
        ("amax", "amax (tensor amax)", "the largest of gate_proj, up_proj and rollout uses"),
        (
            "recipe",
            "block scale",
            "recipe nvfp4-te in train and nvfp4-flashinfer-4over6-mse-448 in rollout",
        ),
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
    with pytest.raises(SystemExit, match=r"^step 0: log-probabilities differ\n1 of 3 layers differs"):
        example.train(1)
