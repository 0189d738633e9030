"""Transformer encoder that this and other dump tools are measured on.

Its 26 leaf modules write 25.6 MB a step; attention and activation are plain operations between
them. Needs torch only: a peer's Python imports it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .training import Trainer


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model and its batch."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    sequence: int = 128
    batch: int = 4
    vocabulary: int = 1000


SHAPES = {
    "standard": Shape(),
    "many_small": Shape(layers=24, width=32, sequence=8, batch=1),
    "growth": Shape(width=32, sequence=8, batch=1),
}
"""Shapes by case: the usual one, many calls on small tensors, and many steps."""


class Layer(nn.Module):
    """Attention, then two linear maps, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape: batch, sequence, width."""
        x = x + self.out(self._attention(self.qkv(self.norm1(x))))
        return x + self.contract(functional.gelu(self.expand(self.norm2(x))))

    def _attention(self, qkv: Tensor) -> Tensor:
        batch, sequence, triple = qkv.shape
        depth = triple // 3 // self.heads
        q, k, v = qkv.view(batch, sequence, 3, self.heads, depth).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * depth**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(batch, sequence, triple // 3)


class Encoder(nn.Module):
    """Network from tokens to scores of tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores: batch, sequence, vocabulary."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def encoder_trainer(shape: Shape, device: str = "cpu") -> Trainer:
    """Return a trainer; equal shapes give equal models."""
    torch.manual_seed(0)
    model = Encoder(shape).to(device)
    tokens = torch.randint(shape.vocabulary, (2, shape.batch, shape.sequence), device=device)

    def loss() -> Tensor:
        scores = model(tokens[0])
        return functional.cross_entropy(scores.flatten(0, 1), tokens[1].flatten())

    return Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=1e-2))
