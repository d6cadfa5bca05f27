"""Train a small policy by reinforcement learning, roll it out with a server's arithmetic, and keep both bit-identical.

    python examples/rl_same_bits.py [--steps 40] [--mismatch amax]

The policy is a gated MLP in NumPy. Each step

1. refits the server: convert_tensors quantizes the trainer's master weights as `fp4kit convert` would;
2. rolls out: the server samples actions from its log-probabilities, with NVFP4 weights and activations that are
   multiplied as a B200 multiplies them (fp4kit.matmul, on any machine);
3. trains: the trainer computes the log-probabilities of the same actions from its own masters. They must equal the
   server's in every bit, so that the importance ratio is exactly 1;
4. updates the masters by the policy gradient, with straight-through gradients of the quantizers.

Then one mismatch is injected into the server, and fp4kit.parity names it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit import Contract, Quantized
from fp4kit.checkpoint import Rules, convert_tensors

STATES, HIDDEN, ACTIONS, BATCH = 64, 128, 16, 64
LEARNING_RATE = 3.0
MLP = "model.layers.0.mlp"
SHAPES = {"gate_proj": (HIDDEN, STATES), "up_proj": (HIDDEN, STATES), "down_proj": (ACTIONS, HIDDEN)}
CONTRACT = Contract(
    weights="nvfp4-te",
    activations="nvfp4-te",
    shared_amax=[("gate_proj", "up_proj")],  # servers fuse these layers, so they need one tensor scale
    unit="sm100",
    container="modelopt NVFP4",
)
MISMATCHES = ("amax", "recipe", "activations", "unit", "nibbles")

Masters = Mapping[str, np.ndarray]
Weights = Mapping[str, Quantized]


def new_masters(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random float32 master weights: layer -> matrix."""
    return {
        leaf: rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5) for leaf, shape in SHAPES.items()
    }


def quantized(masters: Masters, contract: Contract) -> dict[str, Quantized]:
    """Return the master weights, quantized as a contract says. The trainer computes with them."""
    amaxes = {leaf: fp4kit.amax(w) for leaf, w in masters.items()}
    found = {}
    for leaf, w in masters.items():
        group = contract.group_of(leaf, masters)
        found[leaf] = fp4kit.quantize(w, contract.recipe_of(leaf), tensor_amax=max(amaxes[one] for one in group))
    return found


def refit(masters: Masters, contract: Contract) -> dict[str, Quantized]:
    """Return the weights that the server computes with: the tensors that convert_tensors sends to it."""
    rules = Rules.of(contract.weights, format="modelopt", config={"model_type": "llama"})
    sent = dict(convert_tensors(((f"{MLP}.{leaf}.weight", w) for leaf, w in masters.items()), rules))
    return {
        leaf: Quantized.from_parts(
            sent[f"{MLP}.{leaf}.weight"],
            sent[f"{MLP}.{leaf}.weight_scale"],
            sent[f"{MLP}.{leaf}.weight_scale_2"],
            recipe=contract.weights,
            dtype=np.float32,
        )
        for leaf in masters
    }


def linear(x: np.ndarray, w: Quantized, contract: Contract) -> np.ndarray:
    """Return x w^T, with x quantized by the contract's recipe of activations, as the contract's unit adds it."""
    return np.asarray(fp4kit.matmul(fp4kit.quantize(x, contract.activations), w, unit=contract.unit))


def forward(x: np.ndarray, weights: Weights, contract: Contract) -> tuple[np.ndarray, ...]:
    """Return gate, up and hidden activations and the log-probabilities of all actions, for states x."""
    gate, up = (linear(x, weights[leaf], contract) for leaf in ("gate_proj", "up_proj"))
    hidden = (np.maximum(gate, 0) * up).astype(ml_dtypes.bfloat16)
    logits = linear(hidden, weights["down_proj"], contract)
    logits = logits - logits.max(axis=1, keepdims=True)
    return gate, up, hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def update(
    masters: dict[str, np.ndarray], weights: Weights, x: np.ndarray, actions: np.ndarray, gain: np.ndarray
) -> None:
    """Update the masters by the policy gradient of states x. gain: the advantage of each action."""
    gate, up, hidden, logp = forward(x, weights, CONTRACT)
    w = {leaf: q.dequantize() for leaf, q in weights.items()}
    onehot = np.eye(ACTIONS, dtype=np.float32)[actions]
    grad = (onehot - np.exp(logp)) * gain[:, None] / np.float32(len(x))
    into_hidden = grad @ w["down_proj"]
    gradients = {
        "down_proj": grad.T @ hidden.astype(np.float32),
        "up_proj": (into_hidden * np.maximum(gate, 0)).T @ x.astype(np.float32),
        "gate_proj": (into_hidden * up * (gate > 0)).T @ x.astype(np.float32),
    }
    for leaf, gradient in gradients.items():
        masters[leaf] = masters[leaf] + np.float32(LEARNING_RATE) * gradient


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two float32 arrays are equal in every bit."""
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())


def train(steps: int, seed: int = 0) -> tuple[dict[str, np.ndarray], list[float]]:
    """Run the loop, and return the masters and the mean reward of every step.

    Raise SystemExit if a log-probability of the trainer differs from the server's in any bit.
    """
    rng = np.random.default_rng(seed)
    masters = new_masters(rng)
    centers = rng.standard_normal((ACTIONS, STATES), np.float32)  # the right action for a state is its nearest center
    rewards = []
    for step in range(steps):
        served = refit(masters, CONTRACT)
        right = rng.integers(ACTIONS, size=BATCH)
        x = (centers[right] + rng.standard_normal((BATCH, STATES), np.float32) / 2).astype(ml_dtypes.bfloat16)
        logp_rollout = forward(x, served, CONTRACT)[-1]
        noise = rng.gumbel(size=logp_rollout.shape)
        actions = (logp_rollout + noise).argmax(axis=1)
        reward = (actions == right).astype(np.float32)
        weights = quantized(masters, CONTRACT)
        logp_train = forward(x, weights, CONTRACT)[-1]
        if not same_bits(logp_train, logp_rollout):
            raise SystemExit(f"step {step}: log-probabilities differ\n{fp4kit.parity(weights, served)}")
        update(masters, weights, x, actions, reward - np.float32(1 / ACTIONS))
        rewards.append(float(reward.mean()))
    return masters, rewards


def injected(masters: Masters, mismatch: str) -> tuple[Contract, dict[str, Quantized]]:
    """Return the contract and the weights of a server that differs from the trainer in one setting."""
    other = {
        "amax": {"shared_amax": ()},
        "recipe": {"weights": "nvfp4-flashinfer-4over6-mse-448"},
        "activations": {"activations": "nvfp4-te-4over6-mse-448"},
        "unit": {"unit": "dequantized"},
        "nibbles": {},
    }[mismatch]
    contract = CONTRACT.stating(**other)
    # A server that quantizes layer by layer shares no amaxes, unlike convert_tensors.
    served = quantized(masters, contract) if mismatch == "amax" else refit(masters, contract)
    if mismatch == "nibbles":
        served = {leaf: replace(q, packed=q.packed >> 4 | q.packed << 4) for leaf, q in served.items()}
    return contract, served


def main() -> None:
    """Train with equal bits, then inject a mismatch and let fp4kit.parity find it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--mismatch", choices=MISMATCHES, default="amax")
    options = parser.parse_args()
    masters, rewards = train(options.steps)
    print(
        f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}; log-probabilities equal in every bit in {options.steps} steps"
    )

    good = fp4kit.parity(CONTRACT, (CONTRACT, refit(masters, CONTRACT)), weights=masters)
    print(good.verdict)
    found = fp4kit.parity(CONTRACT, injected(masters, options.mismatch), weights=masters)
    print(f"\ninjected into the server: another {options.mismatch}\n{found}")
    if not good.equal or found.equal:
        raise SystemExit("parity is wrong")


if __name__ == "__main__":
    main()
