"""BERT-base (Devlin et al. 2018), the encoder: 12 layers of width 768, 128 tokens, Gelu and attention in small ops."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from models.network import Network, tensor_input

_LAYERS, _WIDTH, _HEADS, _INNER = 12, 768, 12, 3072
_VOCABULARY, _TOKENS, _EPSILON = 30522, 128, 1e-12


class _Bert(Network):
    def shared_constants(self) -> None:
        head = _WIDTH // _HEADS
        self._split = self.constant(np.array([0, _TOKENS, _HEADS, head], np.int64), "split")
        self._join = self.constant(np.array([0, _TOKENS, _WIDTH], np.int64), "join")
        self._scale = self.scalar(head**-0.5)
        self._half, self._one, self._root_half = self.scalar(0.5), self.scalar(1.0), self.scalar(0.5**0.5)

    def scalar(self, value: float) -> str:
        return self.constant(np.array(value, np.float32), "scalar")

    def linear(self, x: str, inner: int, outer: int) -> str:
        return self.op(
            "Add", self.op("MatMul", x, self.normal((inner, outer), inner**-0.5)), self.normal((outer,), 0.02)
        )

    def layer_norm(self, x: str) -> str:
        scale, bias = self.uniform((_WIDTH,), 0.9, 1.1, "scale"), self.normal((_WIDTH,), 0.02, "bias")
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=_EPSILON)

    def gelu(self, x: str) -> str:
        erf = self.op("Erf", self.op("Mul", x, self._root_half))
        return self.op("Mul", self.op("Mul", x, self.op("Add", erf, self._one)), self._half)

    def heads(self, x: str, order: list[int]) -> str:
        return self.op("Transpose", self.op("Reshape", self.linear(x, _WIDTH, _WIDTH), self._split), perm=order)

    def attention(self, x: str, bias: str) -> str:
        query, key, value = self.heads(x, [0, 2, 1, 3]), self.heads(x, [0, 2, 3, 1]), self.heads(x, [0, 2, 1, 3])
        scores = self.op("Add", self.op("Mul", self.op("MatMul", query, key), self._scale), bias)
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        joined = self.op("Reshape", self.op("Transpose", mixed, perm=[0, 2, 1, 3]), self._join)
        return self.linear(joined, _WIDTH, _WIDTH)

    def layer(self, x: str, bias: str) -> str:
        x = self.layer_norm(self.op("Add", self.attention(x, bias), x))
        y = self.linear(self.gelu(self.linear(x, _WIDTH, _INNER)), _INNER, _WIDTH)
        return self.layer_norm(self.op("Add", y, x))

    def embedding(self) -> str:
        words = self.op("Gather", self.normal((_VOCABULARY, _WIDTH), 0.5, "words"), "input_ids")
        kinds = self.op("Gather", self.normal((2, _WIDTH), 0.1, "kinds"), "token_type_ids")
        positions = self.normal((1, _TOKENS, _WIDTH), 0.1, "positions")
        return self.layer_norm(self.op("Add", self.op("Add", words, kinds), positions))

    def mask_bias(self) -> str:
        """0 where a token counts, -10000 where it is masked, of shape (batch, 1, 1, tokens)."""
        mask = self.op("Unsqueeze", "attention_mask", self.constant(np.array([1, 2], np.int64), "axes"))
        mask = self.op("Cast", mask, to=TensorProto.FLOAT)
        return self.op("Mul", self.op("Sub", self._one, mask), self.scalar(-10000.0))


def bert_base(batch: int | str = 1, seed: int = 0) -> onnx.ModelProto:
    """Inputs input_ids, attention_mask, token_type_ids: int64 (batch, 128). Output: the last hidden state."""
    net = _Bert("bert_base", seed)
    net.shared_constants()
    bias = net.mask_bias()
    x = net.embedding()
    for _ in range(_LAYERS):
        x = net.layer(x, bias)
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [tensor_input(name, [batch, _TOKENS], TensorProto.INT64) for name in names]
    return net.model(inputs, x, [batch, _TOKENS, _WIDTH])
