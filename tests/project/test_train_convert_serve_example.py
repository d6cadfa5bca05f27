"""Test that examples/train_convert_serve.py ends with equal weights, and that it notices weights that differ."""

import sys

import pytest


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
