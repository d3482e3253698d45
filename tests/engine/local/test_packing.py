"""Packed linear layers compute what plain ones do, and only where they are faster."""

import torch
from torch import nn

from agentkv.engine.local.packing import PackedLinear, pack


class _Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.embedding = nn.Embedding(128, 96, dtype=dtype)
        self.inner = nn.Sequential(nn.Linear(96, 64, dtype=dtype), nn.Linear(64, 96, bias=False, dtype=dtype))
        self.head = nn.Linear(96, 128, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.tiny = nn.Linear(4, 4, dtype=dtype)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, ids):
        return self.head(self.inner(self.embedding(ids)))


def test_packed_layers_compute_the_same():
    """Within bfloat16's rounding, for one row and for many; an embedding that shares a matrix keeps it."""
    torch.manual_seed(0)
    model = _Model(torch.bfloat16)
    inputs = [torch.randint(0, 128, (1, count)) for count in (1, 7, 100)]
    with torch.inference_mode():
        expected = [model(ids) for ids in inputs]
        count = pack(model)
        actual = [model(ids) for ids in inputs]
    assert count in (0, 3)  # 0 where this machine cannot
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=0.05, atol=0.05)
    assert (128, 96) == tuple(model.embedding.weight.shape)
    assert type(model.tiny) is nn.Linear


def test_float32_models_keep_their_layers():
    """Their tokens are compared with transformers' bit by bit."""
    model = _Model(torch.float32)
    assert 0 == pack(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_torch_that_cannot_pack_is_no_obstacle(monkeypatch):
    """The operation is not part of torch's documented surface."""

    def gone(*_args):
        raise AttributeError("no such operation")

    monkeypatch.setattr("agentkv.engine.local.packing.PackedLinear", gone)
    assert 0 == pack(_Model(torch.bfloat16))
